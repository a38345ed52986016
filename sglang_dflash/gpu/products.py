"""A matrix product as it was found to be the fastest."""

from __future__ import annotations

import torch

from sglang_dflash.gpu import cublas_lt
from sglang_dflash.gpu.kernels.skinny_matmul import Tiling, launch
from sglang_dflash.gpu.kernels.swiglu import swiglu
from sglang_dflash.gpu.tilings import Choice


def multiply(
    x: torch.Tensor, weight: torch.Tensor, choice: Choice, with_swiglu: bool
) -> torch.Tensor:
    """[n, in] × [out, in] → [n, out], or the parts of it, [parts, n, out] float32, if a tiling has several.

    Args:
        x, weight: bfloat16, contiguous, of a shape and of rows that this was found for.
        with_swiglu: the weight has the gate's rows first, and [n, out / 2] is wanted.
    """
    if isinstance(choice, Tiling):
        return launch(x, weight, choice, with_swiglu)
    y = cublas_lt.multiply(x, weight, choice)
    return swiglu(y) if with_swiglu else y
