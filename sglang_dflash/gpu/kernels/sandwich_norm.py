"""Gemma's norms in one launch where the release takes eight: of a stream, or of what is added to it and of the sum.

Its weights are stored less one, and a norm is rounded once, after its weight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dflash.gpu.kernels.launch import starts_early


@triton.jit
def _normed(x, weight_ptr, i, inside, eps, SIZE: tl.constexpr):
    weight = tl.load(weight_ptr + i, mask=inside, other=0).to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps) * (1 + weight)


@triton.jit
def _sandwich_norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    next_ptr,
    sum_ptr,
    y_ptr,
    eps,
    ADD: tl.constexpr,
    NEXT: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_POW2: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    i = tl.arange(0, SIZE_POW2)
    inside = i < SIZE
    at = tl.program_id(0).to(tl.int64) * SIZE + i
    x = tl.load(x_ptr + at, mask=inside, other=0)
    dtype = x.dtype
    y = _normed(x.to(tl.float32), weight_ptr, i, inside, eps, SIZE).to(dtype)
    if ADD:
        residual = tl.load(residual_ptr + at, mask=inside, other=0)
        total = (y.to(tl.float32) + residual.to(tl.float32)).to(dtype)
        tl.store(sum_ptr + at, total, mask=inside)
        if NEXT:
            y = _normed(total.to(tl.float32), next_ptr, i, inside, eps, SIZE).to(dtype)
    if NEXT or not ADD:
        tl.store(y_ptr + at, y, mask=inside)


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    following: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    n, size = x.shape
    total = None if residual is None else torch.empty_like(x)
    y = None if following is None and residual is not None else torch.empty_like(x)
    early = starts_early(n)
    _sandwich_norm[(n,)](
        x,
        residual,
        weight,
        following,
        total,
        y,
        eps,
        ADD=residual is not None,
        NEXT=following is not None,
        SIZE=size,
        SIZE_POW2=triton.next_power_of_2(size),
        EARLY=early,
        launch_pdl=early,
        num_warps=max(1, min(8, triton.next_power_of_2(size) // 512)),
    )
    return total, y


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Of rows.

    Args:
        x: [n, hidden], contiguous.
        weight: [hidden], less one.

    Returns:
        [n, hidden] of the dtype of `x`.
    """
    return _launch(x, None, weight, None, eps)[1]


def norm_add(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """`residual` + norm of `x`: [n, hidden] each, contiguous."""
    return _launch(x, residual, weight, None, eps)[0]


def norm_add_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    following: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`norm_add`, and the norm of that with the weight `following`."""
    return _launch(x, residual, weight, following, eps)


def norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """What `norm` returns."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * (1 + weight.float())).to(x.dtype)
