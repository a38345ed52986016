"""A row in FP8, as kernels make it that have all of it."""

from __future__ import annotations

import triton
import triton.language as tl

from sglang_dflash.gpu.fp8 import SMALLEST_SCALE

_SMALLEST = tl.constexpr(SMALLEST_SCALE)


@triton.jit
def store_fp8(y, y_ptr, scale_ptr, row, at, inside, LARGEST: tl.constexpr):
    """Divided by its scale, which is stored at `row`.

    Args:
        y: float32; zero where not `inside`.
        at: where its numbers go.
    """
    scale = tl.maximum(tl.max(tl.abs(y), axis=0) / LARGEST, _SMALLEST)
    tl.store(y_ptr + at, (y / scale).to(y_ptr.dtype.element_ty), mask=inside)
    tl.store(scale_ptr + row, scale)
