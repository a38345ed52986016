"""Largest element of each of many rows, and the next, read once by a program a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_FEWEST_ROWS = 64  # with fewer, PyTorch's reduction occupies more of the GPU


@triton.jit
def _row_max(x_ptr, value_ptr, index_ptr, stride, SIZE: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, TILE)
    best = tl.full([TILE], float("-inf"), tl.float32)
    at = tl.zeros([TILE], tl.int32)
    for first in range(0, SIZE, TILE):
        inside = first + i < SIZE
        x = tl.load(x_ptr + row * stride + first + i, mask=inside, other=float("-inf"))
        x = x.to(tl.float32)
        higher = (x > best) | ((x != x) & (best == best))  # NaN is the largest, the first of them
        best = tl.where(higher, x, best)
        at = tl.where(higher, first + i, at)
    nan = best != best
    top = tl.max(tl.where(nan, float("inf"), best), axis=0)
    any_nan = tl.max(nan.to(tl.int32), axis=0) > 0
    is_top = nan | ((best == top) & (any_nan == 0))
    value = tl.where(any_nan, float("nan"), top)
    tl.store(value_ptr + row, value.to(value_ptr.dtype.element_ty))
    tl.store(index_ptr + row, tl.min(tl.where(is_top, at, SIZE), axis=0).to(tl.int64))


def row_max(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and indices of the largest elements, the lower index of equal ones: [n, size] → [n] each.

    NaN is larger than anything.
    """
    if not x.is_cuda or len(x) < _FEWEST_ROWS:
        value, index = x.max(dim=-1)
        return value, index
    return row_max_kernel(x)


def row_max_kernel(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`row_max` by the kernel; elements of a row are side by side."""
    value, index = x.new_empty(len(x)), x.new_empty(len(x), dtype=torch.int64)
    size = x.shape[1]
    tile = min(4096, triton.next_power_of_2(size))
    _row_max[(len(x),)](x, value, index, x.stride(0), SIZE=size, TILE=tile, num_warps=8)
    return value, index


@triton.jit
def _row_top2(
    x_ptr, value_ptr, index_ptr, second_ptr, stride, SIZE: tl.constexpr, TILE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, TILE)
    best = tl.full([TILE], float("-inf"), tl.float32)
    second = tl.full([TILE], float("-inf"), tl.float32)
    at = tl.zeros([TILE], tl.int32)
    for first in range(0, SIZE, TILE):
        inside = first + i < SIZE
        x = tl.load(x_ptr + row * stride + first + i, mask=inside, other=float("-inf"))
        x = x.to(tl.float32)
        higher = x > best
        second = tl.maximum(second, tl.where(higher, best, x))
        best = tl.where(higher, x, best)
        at = tl.where(higher, first + i, at)
    top = tl.max(best, axis=0)
    index = tl.min(tl.where(best == top, at, SIZE), axis=0)
    # In every other column the best competes, in its own the second.
    next_best = tl.max(tl.where((best == top) & (at == index), second, best), axis=0)
    tl.store(value_ptr + row, top.to(value_ptr.dtype.element_ty))
    tl.store(second_ptr + row, next_best.to(value_ptr.dtype.element_ty))
    tl.store(index_ptr + row, tl.minimum(index, SIZE - 1).to(tl.int64))


def row_top2(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values and indices of the largest elements, and the next largest values: [n, size] → [n] each.

    Of equal ones the lower index. What a row with NaN gives is not defined, but its index is one of the row.
    """
    if x.is_cuda:
        return row_top2_kernel(x)
    value, index = x.max(dim=-1)
    rest = x.scatter(1, index[:, None], float("-inf"))
    return value, index, rest.amax(dim=-1)


def row_top2_kernel(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`row_top2` by the kernel; elements of a row are side by side."""
    value, second = x.new_empty(2, len(x))
    index = x.new_empty(len(x), dtype=torch.int64)
    size = x.shape[1]
    tile = min(4096, triton.next_power_of_2(size))
    _row_top2[(len(x),)](x, value, index, second, x.stride(0), SIZE=size, TILE=tile, num_warps=8)
    return value, index, second
