"""The gate of shared experts, whose product has a single column."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _gate_shared(
    x_ptr,
    weight_ptr,
    made_ptr,
    x_stride,
    made_stride,
    SIZE: tl.constexpr,
    MADE: tl.constexpr,
    SIZE_POW2: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    dtype = made_ptr.dtype.element_ty
    i = tl.arange(0, SIZE_POW2)
    x = tl.load(x_ptr + row * x_stride + i, mask=i < SIZE, other=0).to(tl.float32)
    weight = tl.load(weight_ptr + i, mask=i < SIZE, other=0).to(tl.float32)
    # Rounded wherever the release's steps round.
    gate = tl.sum(x * weight).to(dtype).to(tl.float32)
    share = (1.0 / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    for begin in range(0, MADE, TILE):
        j = begin + tl.arange(0, TILE)
        at = made_ptr + row * made_stride + j
        made = tl.load(at, mask=j < MADE, other=0).to(tl.float32)
        tl.store(at, (made * share).to(dtype), mask=j < MADE)


def gate_shared(x: torch.Tensor, weight: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """Multiplies what shared experts made of rows by sigmoid(x · weight), in place.

    Args:
        x: [n, hidden], what the experts read; rows may lie apart.
        weight: [1, hidden], contiguous.
        made: [n, size], written; of the dtype of `x`.

    Returns:
        `made`.
    """
    n, size = made.shape
    _gate_shared[(n,)](
        x,
        weight,
        made,
        x.stride(0),
        made.stride(0),
        x.shape[1],
        size,
        triton.next_power_of_2(x.shape[1]),
        min(2048, triton.next_power_of_2(size)),
        num_warps=4,
    )
    return made


def gate_shared_reference(
    x: torch.Tensor, weight: torch.Tensor, made: torch.Tensor
) -> torch.Tensor:
    """What `gate_shared` returns."""
    return torch.sigmoid(torch.nn.functional.linear(x, weight)) * made
