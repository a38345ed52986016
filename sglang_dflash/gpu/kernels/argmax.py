"""Largest element of each of many rows, and all others together, read once by as many programs as fill a GPU."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl


class Way(NamedTuple):
    """How rows are read.

    Attributes:
        tile: columns that a program looks at at a time.
        warps: of a program.
        programs: about as many as there are at most, or one for each row.
        most_parts: of a row.
    """

    tile: int
    warps: int
    programs: int
    most_parts: int


# The second by what an H200 took for others, too (benchmark/results/kernels/h200-likeliest.jsonl).
ALONE, WITH_REST = Way(4096, 8, 1024, 16), Way(1024, 4, 4096, 64)


@triton.jit
def _largest(value, index, SIZE: tl.constexpr):
    """Of columns with their largest elements, and where these are: both of the whole. NaN is larger than anything."""
    nan = value != value
    any_nan = tl.max(nan.to(tl.int32), axis=0) > 0
    top = tl.max(tl.where(nan, float("-inf"), value), axis=0)
    is_top = tl.where(any_nan, nan, value == top)
    return tl.where(any_nan, float("nan"), top), tl.min(tl.where(is_top, index, SIZE), axis=0)


@triton.jit
def _mass(best, mass, top):
    """Of columns together, as exponentials of what is below the best of all."""
    return tl.sum(tl.where(best == float("-inf"), 0.0, mass * tl.exp(best - top)), axis=0)


@triton.jit
def _rest(top, mass):
    """Logarithm of the sum of the others' exponentials, where the best is 1 of the mass."""
    return top + tl.log(tl.maximum(mass - 1, 0.0))


@triton.jit
def _part_of_row(
    x_ptr,
    value_ptr,
    index_ptr,
    rest_ptr,
    stride,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    REST: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, TILE)
    best = tl.full([TILE], float("-inf"), tl.float32)
    mass = tl.zeros([TILE], tl.float32)  # of the column, as exponentials of what is below its best
    at = tl.zeros([TILE], tl.int32)
    span: tl.constexpr = (SIZE + TILE * PARTS - 1) // (TILE * PARTS) * TILE
    for step in range(0, span, TILE):
        column = part * span + step + i
        x = tl.load(x_ptr + row * stride + column, mask=column < SIZE, other=float("-inf"))
        x = x.to(tl.float32)
        higher = (x > best) | ((x != x) & (best == best))  # of NaN the first
        if REST:
            # Whichever is lower, the element or the best before it: one exponential for both.
            nothing = (x == float("-inf")) | (best == float("-inf"))
            below = tl.where(nothing, 0.0, tl.exp(-tl.abs(x - best)))
            mass = tl.where(higher, mass * below + 1, mass + below)
        best = tl.where(higher, x, best)
        at = tl.where(higher, column, at)
    top, index = _largest(best, at, SIZE)
    out = row * PARTS + part
    tl.store(value_ptr + out, top.to(value_ptr.dtype.element_ty))
    tl.store(index_ptr + out, tl.minimum(index, SIZE - 1).to(tl.int64))
    if REST:
        mass = _mass(best, mass, top)
        tl.store(rest_ptr + out, mass if PARTS > 1 else _rest(top, mass))


@triton.jit
def _of_parts(
    values_ptr,
    indices_ptr,
    masses_ptr,
    value_ptr,
    index_ptr,
    rest_ptr,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    REST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    of_row = row * PARTS + tl.arange(0, PARTS)
    values, indices = tl.load(values_ptr + of_row).to(tl.float32), tl.load(indices_ptr + of_row)
    top, index = _largest(values, indices, SIZE)
    tl.store(value_ptr + row, top.to(value_ptr.dtype.element_ty))
    tl.store(index_ptr + row, index.to(tl.int64))
    if REST:
        mass = _mass(values, tl.load(masses_ptr + of_row), top)
        tl.store(rest_ptr + row, _rest(top, mass))


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


def row_max_and_rest(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values and indices of the largest elements, and the logarithms of the sums of all others' exponentials.

    [n, size] → [n] each, all but the indices in float32. Of equal ones the lower index. What a row with NaN gives is
    not defined, but its index is one of the row.
    """
    if x.is_cuda:
        return row_max_and_rest_kernel(x)
    value, index = x.max(dim=-1)
    others = x.float().scatter(1, index[:, None], float("-inf"))
    return value.float(), index, others.logsumexp(dim=-1)


def row_max_and_rest_kernel(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`row_max_and_rest` by the kernel; elements of a row are side by side."""
    value, rest = x.new_empty(2, len(x), dtype=torch.float32)
    index = x.new_empty(len(x), dtype=torch.int64)
    _launch(x, value, index, rest)
    return value, index, rest


def _launch(
    x: torch.Tensor, value: torch.Tensor, index: torch.Tensor, rest: torch.Tensor | None
) -> None:
    rows, size = x.shape
    way = ALONE if rest is None else WITH_REST
    tile = min(way.tile, triton.next_power_of_2(size))
    parts = parts_of(rows, triton.cdiv(size, tile), way)
    options = dict(SIZE=size, PARTS=parts, REST=rest is not None)
    found = value, index, rest
    if parts > 1:
        found = [None if each is None else each.new_empty(rows, parts) for each in found]
    grid = rows, parts
    _part_of_row[grid](x, *found, x.stride(0), TILE=tile, num_warps=way.warps, **options)
    if parts > 1:
        _of_parts[(rows,)](*found, value, index, rest, num_warps=1, **options)


def parts_of(rows: int, tiles: int, way: Way) -> int:
    """Of each row, that programs look at side by side: a power of two, no more than a row has tiles."""
    most = min(way.most_parts, max(1, way.programs // max(1, rows)), tiles)
    return 1 << (most.bit_length() - 1)
