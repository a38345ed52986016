"""Largest element of each of many rows, and the next, read once by as many programs as the GPU has room for."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TILE = 4096
_PROGRAMS = 1024  # that a GPU runs at a time
_MOST_PARTS = 16  # of a row


@triton.jit
def _largest(value, index, SIZE: tl.constexpr):
    """Of columns with their largest elements, and where these are: both of the whole. NaN is larger than anything."""
    nan = value != value
    any_nan = tl.max(nan.to(tl.int32), axis=0) > 0
    top = tl.max(tl.where(nan, float("-inf"), value), axis=0)
    is_top = tl.where(any_nan, nan, value == top)
    return tl.where(any_nan, float("nan"), top), tl.min(tl.where(is_top, index, SIZE), axis=0)


@triton.jit
def _part_of_row(
    x_ptr,
    value_ptr,
    index_ptr,
    second_ptr,
    stride,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    SECOND: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, TILE)
    best = tl.full([TILE], float("-inf"), tl.float32)
    second = tl.full([TILE], float("-inf"), tl.float32)
    at = tl.zeros([TILE], tl.int32)
    span: tl.constexpr = (SIZE + TILE * PARTS - 1) // (TILE * PARTS) * TILE
    for step in range(0, span, TILE):
        column = part * span + step + i
        x = tl.load(x_ptr + row * stride + column, mask=column < SIZE, other=float("-inf"))
        x = x.to(tl.float32)
        higher = (x > best) | ((x != x) & (best == best))  # of NaN the first
        if SECOND:
            second = tl.maximum(second, tl.where(higher, best, x))
        best = tl.where(higher, x, best)
        at = tl.where(higher, column, at)
    top, index = _largest(best, at, SIZE)
    out = row * PARTS + part
    tl.store(value_ptr + out, top.to(value_ptr.dtype.element_ty))
    tl.store(index_ptr + out, tl.minimum(index, SIZE - 1).to(tl.int64))
    if SECOND:
        # In every other column the best competes, in its own the second.
        next_best = tl.max(tl.where((best == top) & (at == index), second, best), axis=0)
        tl.store(second_ptr + out, next_best.to(second_ptr.dtype.element_ty))


@triton.jit
def _of_parts(
    values_ptr,
    indices_ptr,
    seconds_ptr,
    value_ptr,
    index_ptr,
    second_ptr,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    SECOND: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    of_row = row * PARTS + tl.arange(0, PARTS)
    values, indices = tl.load(values_ptr + of_row).to(tl.float32), tl.load(indices_ptr + of_row)
    top, index = _largest(values, indices, SIZE)
    tl.store(value_ptr + row, top.to(value_ptr.dtype.element_ty))
    tl.store(index_ptr + row, index.to(tl.int64))
    if SECOND:
        seconds = tl.load(seconds_ptr + of_row)
        next_best = tl.max(tl.where(indices == index, seconds, values), axis=0)
        tl.store(second_ptr + row, next_best)


def row_max(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and indices of the largest elements, the lower index of equal ones: [n, size] → [n] each.

    NaN is larger than anything.
    """
    if not x.is_cuda:
        value, index = x.max(dim=-1)
        return value, index
    return row_max_kernel(x)


def row_max_kernel(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`row_max` by the kernel; elements of a row are side by side."""
    value, index = x.new_empty(len(x)), x.new_empty(len(x), dtype=torch.int64)
    _launch(x, value, index, None)
    return value, index


def row_top2(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values and indices of the largest elements, and the next largest values: [n, size] → [n] each, values in float32.

    Of equal ones the lower index. What a row with NaN gives is not defined, but its index is one of the row.
    """
    if x.is_cuda:
        return row_top2_kernel(x)
    value, index = x.max(dim=-1)
    rest = x.scatter(1, index[:, None], float("-inf"))
    return value.float(), index, rest.amax(dim=-1).float()


def row_top2_kernel(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`row_top2` by the kernel; elements of a row are side by side."""
    value, second = x.new_empty(2, len(x), dtype=torch.float32)
    index = x.new_empty(len(x), dtype=torch.int64)
    _launch(x, value, index, second)
    return value, index, second


def _launch(
    x: torch.Tensor, value: torch.Tensor, index: torch.Tensor, second: torch.Tensor | None
) -> None:
    rows, size = x.shape
    tile = min(_TILE, triton.next_power_of_2(size))
    parts = parts_of(rows, triton.cdiv(size, tile))
    options = dict(SIZE=size, PARTS=parts, SECOND=second is not None)
    found = value, index, second
    if parts > 1:
        found = [None if each is None else each.new_empty(rows, parts) for each in found]
    _part_of_row[(rows, parts)](x, *found, x.stride(0), TILE=tile, num_warps=8, **options)
    if parts > 1:
        _of_parts[(rows,)](*found, value, index, second, num_warps=1, **options)


def parts_of(rows: int, tiles: int) -> int:
    """Of each row, that programs look at side by side: a power of two, no more than a row has tiles."""
    most = min(_MOST_PARTS, max(1, _PROGRAMS // max(1, rows)), tiles)
    return 1 << (most.bit_length() - 1)
