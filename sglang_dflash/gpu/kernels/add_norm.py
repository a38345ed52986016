"""Residual sum and RMSNorm of the stream, in one launch that also adds up a split matrix product."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dflash.gpu.fp8 import DTYPE, LARGEST, Fp8Rows
from sglang_dflash.gpu.kernels.fp8_row import store_fp8
from sglang_dflash.gpu.kernels.launch import can_overlap, starts_early


@triton.jit
def _add_norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    sum_ptr,
    scale_ptr,
    eps,
    rows,
    LARGEST: tl.constexpr,
    PARTS: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_POW2: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = tl.program_id(0)
    i = tl.arange(0, SIZE_POW2)
    inside = i < SIZE
    at = row.to(tl.int64) * SIZE + i
    weight = tl.load(weight_ptr + i, mask=inside, other=0).to(tl.float32)
    dtype = sum_ptr.dtype.element_ty
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + at, mask=inside, other=0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        x += tl.load(x_ptr + part * rows * SIZE + at, mask=inside, other=0)
    # Rounded as a whole product would be.
    x = x.to(dtype).to(tl.float32)
    x += tl.load(residual_ptr + at, mask=inside, other=0).to(tl.float32)
    tl.store(sum_ptr + at, x.to(dtype), mask=inside)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps)
    y = x * scale * weight
    if LARGEST is None:
        tl.store(y_ptr + at, y.to(dtype), mask=inside)
    else:
        store_fp8(y, y_ptr, scale_ptr, row, at, inside, LARGEST)


def add_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, in_fp8: bool = False
) -> tuple[torch.Tensor | Fp8Rows, torch.Tensor]:
    """RMSNorm of a sum, and the sum.

    Args:
        x: [n, hidden], or the parts of a product, [parts, n, hidden] float32; contiguous.
        residual: [n, hidden], contiguous; not written.
        weight: [hidden].
        in_fp8: whether what is normed is to be quantized.

    Returns:
        [n, hidden] each, of the dtype of `residual`.
    """
    n, size = residual.shape
    y, total = (
        torch.empty_like(residual, dtype=DTYPE if in_fp8 else None),
        residual.new_empty(n, size),
    )
    scales = residual.new_empty(n, 1, dtype=torch.float32) if in_fp8 else None
    parts = x.shape[0] if x.dim() == 3 else 1
    # Parts come of a product that lets the kernel after it start.
    early = starts_early(n) or parts > 1 and can_overlap()
    _add_norm[(n,)](
        x,
        residual,
        weight,
        y,
        total,
        scales,
        eps,
        n,
        LARGEST=LARGEST if in_fp8 else None,
        PARTS=parts,
        SIZE=size,
        SIZE_POW2=triton.next_power_of_2(size),
        EARLY=early,
        launch_pdl=early,
        num_warps=max(1, min(8, triton.next_power_of_2(size) // 512)),
    )
    return (Fp8Rows(y, scales, residual.dtype) if in_fp8 else y), total


def add_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `add_norm` returns."""
    whole = x.sum(0) if x.dim() == 3 else x
    total = whole.to(residual.dtype).float() + residual.float()
    scale = torch.rsqrt(total.square().mean(-1, keepdim=True) + eps)
    return (total * scale * weight.float()).to(residual.dtype), total.to(residual.dtype)
