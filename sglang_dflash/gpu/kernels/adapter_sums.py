"""What LoRA adapters add to products that came with the first half of it (`gpu/wide_products.py`).

Rows of all requests are computed together, whatever their adapters are: of what all adapters made of a row, its own
one's counts, all else is zero. So no program waits to know which rows have its adapter.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sglang_dflash.gpu.kernels.launch import starts_early

_MOST_ROWS = 64  # of a program
_STEP = 64  # of all adapters' ranks that a program multiplies at once


class Wide(NamedTuple):
    """A product of which adapters may be part.

    Attributes:
        weight: [wide, in], contiguous: the weight, [out, in]; then [places, slices * most, in], the first matrices of
            an adapter's slices, one behind the other, each of as many rows as its rank; then what rounds it up.
        b: [places, out, most], contiguous: the second matrices, of which the first columns count, as many as the rank.
        begins: columns at which slices begin.
        tile: a power of two that divides all slices.
    """

    weight: torch.Tensor
    b: torch.Tensor
    begins: tuple[int, ...]
    tile: int


class Owners(NamedTuple):
    """Which adapter each row has.

    Attributes:
        places: [n] int32, of an adapter in the pool of them, for `width` rows each; any other number is none.
        width: rows that lie side by side.
        ranks, scalings: [places + 1] int32 and float32, of the adapter at a place; a rank of 0 for none.
    """

    places: torch.Tensor
    width: int
    ranks: torch.Tensor
    scalings: torch.Tensor


@triton.jit
def _summed(y_ptr, at, mask, rows, WIDE: tl.constexpr, PARTS: tl.constexpr, DTYPE: tl.constexpr):
    """A product's parts added up, rounded as a whole product is."""
    y = tl.load(y_ptr + at, mask=mask, other=0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        y += tl.load(y_ptr + part * rows * WIDE + at, mask=mask, other=0)
    return y.to(DTYPE)


@triton.jit
def _added(
    y_ptr,
    b_ptr,
    ranks_ptr,
    row,
    inside,
    owner,
    scaling,
    rows,
    column,
    piece,
    WIDE: tl.constexpr,
    SIZE: tl.constexpr,
    SLICES: tl.constexpr,
    PLACES: tl.constexpr,
    MOST: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """[ROWS, TILE] that adapters add to columns of a slice; rounded as the release's kernels round."""
    total = tl.zeros([ROWS, TILE], tl.float32)
    for begin in tl.static_range(0, PLACES * MOST, STEP):
        k = begin + tl.arange(0, STEP)
        place, inner = k // MOST, k % MOST
        rank = tl.load(ranks_ptr + place, mask=place < PLACES, other=0)
        taken = inner < rank
        at = SIZE + place * SLICES * MOST + piece * rank + inner
        own = (owner[:, None] == place[None, :]) & (inside[:, None] & taken[None, :])
        x = _summed(y_ptr, row[:, None] * WIDE + at[None, :], own, rows, WIDE, PARTS, DTYPE)
        b_at = (place[:, None].to(tl.int64) * SIZE + column[None, :]) * MOST + inner[:, None]
        b = tl.load(b_ptr + b_at, mask=taken[:, None], other=0)
        total = tl.dot(x, b, total, input_precision="ieee")
    return (total * scaling[:, None]).to(DTYPE)


@triton.jit(do_not_specialize=["rows"])
def _add(
    y_ptr,
    b_ptr,
    out_ptr,
    places_ptr,
    ranks_ptr,
    scalings_ptr,
    rows,
    WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
    SIZE: tl.constexpr,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
    SLICES: tl.constexpr,
    PLACES: tl.constexpr,
    MOST: tl.constexpr,
    PARTS: tl.constexpr,
    SWIGLU: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    inside = row < rows
    owner = tl.load(places_ptr + row // WIDTH, mask=inside, other=PLACES)
    known = (owner >= 0) & (owner < PLACES)
    scaling = tl.load(scalings_ptr + owner, mask=known, other=0.0)
    begin = tl.program_id(0) * TILE
    piece = (begin >= SECOND).to(tl.int32) + (begin >= THIRD).to(tl.int32)
    column = begin + tl.arange(0, TILE)
    dtype = b_ptr.dtype.element_ty
    at = row[:, None] * WIDE + column[None, :]
    y = _summed(y_ptr, at, inside[:, None], rows, WIDE, PARTS, dtype)
    own = (y_ptr, b_ptr, ranks_ptr, row, inside, owner, scaling, rows, column, piece)
    y += _added(*own, WIDE, SIZE, SLICES, PLACES, MOST, PARTS, ROWS, TILE, STEP, dtype)
    if SWIGLU:
        half: tl.constexpr = SIZE // 2
        up = _summed(y_ptr, at + half, inside[:, None], rows, WIDE, PARTS, dtype)
        own = (y_ptr, b_ptr, ranks_ptr, row, inside, owner, scaling, rows, column + half, 1)
        up += _added(*own, WIDE, SIZE, SLICES, PLACES, MOST, PARTS, ROWS, TILE, STEP, dtype)
        gate = y.to(tl.float32)
        y = (gate / (1.0 + tl.exp(-gate)) * up.to(tl.float32)).to(dtype)
        to = row[:, None] * half + column[None, :]
    else:
        to = row[:, None] * SIZE + column[None, :]
    tl.store(out_ptr + to, y, mask=inside[:, None])


def add_second_halves(y: torch.Tensor, wide: Wide, owners: Owners, *, swiglu: bool) -> torch.Tensor:
    """A product with what each row's adapter adds to it.

    Args:
        y: [rows, wide], of the dtype of the adapters, or its parts, [parts, rows, wide] float32: what rows give with
            `wide.weight`; contiguous.
        swiglu: the product is one of two slices, the gate first: gives silu(gate) * up.

    Returns:
        [rows, out], or [rows, out / 2], of the dtype of the adapters.
    """
    parts, (rows, columns) = (len(y) if y.dim() == 3 else 1), y.shape[-2:]
    places, size, most = wide.b.shape
    out = wide.b.new_empty(rows, size // 2 if swiglu else size)
    tall = min(_MOST_ROWS, max(16, triton.next_power_of_2(rows)))
    begins = (*wide.begins[1:], size, size)
    early = starts_early(rows)
    _add[out.shape[1] // wide.tile, triton.cdiv(rows, tall)](
        *(y, wide.b, out, owners.places, owners.ranks, owners.scalings, rows),
        WIDTH=owners.width,
        WIDE=columns,
        SIZE=size,
        SECOND=begins[0],
        THIRD=begins[1],
        SLICES=len(wide.begins),
        PLACES=places,
        MOST=most,
        PARTS=parts,
        SWIGLU=swiglu,
        ROWS=tall,
        TILE=wide.tile,
        STEP=min(_STEP, max(16, triton.next_power_of_2(places * most))),
        EARLY=early,
        launch_pdl=early,
        num_warps=4,
    )
    return out


def add_second_halves_reference(
    y: torch.Tensor, wide: Wide, owners: Owners, *, swiglu: bool
) -> torch.Tensor:
    """What `add_second_halves` gives."""
    (places, size, most), dtype = wide.b.shape, wide.b.dtype
    y = (y.sum(0) if y.dim() == 3 else y).to(dtype)
    out, bounds = y[:, :size].clone(), (*wide.begins, size)
    for row, place in enumerate(owners.places.repeat_interleave(owners.width)[: len(y)].tolist()):
        if not 0 <= place < places:
            continue
        rank, scaling = int(owners.ranks[place]), float(owners.scalings[place])
        for piece, (left, right) in enumerate(zip(bounds, bounds[1:], strict=False)):
            at = size + place * len(wide.begins) * most + piece * rank
            b = wide.b[place, left:right, :rank].float()
            out[row, left:right] += (scaling * (b @ y[row, at : at + rank].float())).to(dtype)
    if not swiglu:
        return out
    gate, up = out.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(dtype)
