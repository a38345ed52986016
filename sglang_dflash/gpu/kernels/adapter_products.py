"""What LoRA adapters add to a matrix product: rows through two thin matrices, those of each request's own adapter.

The release's kernels give all columns of sixteen rows to one program, which then reads them one after the other while
most of the GPU rests. Here they are split over programs, and the second launch adds up what those made. Rows of all
requests with one adapter are computed together: where requests have few rows each, segments of them would be nearly
empty. The first launch needs nothing of the product, and is in front of it: a product that starts early reads its
weights meanwhile.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sglang_dflash.gpu.kernels.adapter_rows import Segments
from sglang_dflash.gpu.kernels.launch import device_of, starts_early

_MOST_PARTS = 8  # that the second launch adds up for every tile of columns
_WAVES = 2  # programs of a multiprocessor, so that one computes while another waits
_STEP = 128  # columns that a program reads at once, and twice as many of a matrix that is thinner than the rows
_MOST_STAGES = 5  # steps whose columns are on their way at once, and one that is computed
_TILE = 128  # columns that a program of the second launch writes


class Adapted(NamedTuple):
    """The adapters of one product, which may be several side by side, its slices.

    Attributes:
        a: [places, slices * most, in], contiguous: the first matrices of an adapter's slices, one behind the other,
            each of as many rows as its rank.
        b: [places, out, most], contiguous: the second ones, of which the first columns count, as many as the rank.
        bounds: [slices + 1] int32, columns at which slices of the product begin, and where the last one ends.
        widest: columns of the widest slice.
    """

    a: torch.Tensor
    b: torch.Tensor
    bounds: torch.Tensor
    widest: int


@triton.jit(do_not_specialize=["rows"])
def _shrink(
    x_ptr,
    a_ptr,
    parts_ptr,
    segment_rows_ptr,
    places_ptr,
    ranks_ptr,
    rows,
    DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    SLICES: tl.constexpr,
    SHARE: tl.constexpr,
    LONGEST: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    segment, part = tl.program_id(0), tl.program_id(1)
    row = tl.load(segment_rows_ptr + segment * LONGEST + tl.arange(0, LONGEST))
    place, columns = tl.load(places_ptr + segment), tl.load(ranks_ptr + segment) * SLICES
    column = tl.program_id(2) * TILE + tl.arange(0, TILE)
    if columns > tl.program_id(2) * TILE:
        inside = row >= 0
        taken = column < columns
        x_at = x_ptr + row[:, None].to(tl.int64) * DEPTH
        a_at = a_ptr + (place.to(tl.int64) * COLUMNS + column[None, :]) * DEPTH
        total = tl.zeros([LONGEST, TILE], tl.float32)
        for step in range(0, SHARE, STEP):
            k = part * SHARE + step + tl.arange(0, STEP)
            known = k < DEPTH
            x = tl.load(x_at + k[None, :], mask=inside[:, None] & known[None, :], other=0)
            a = tl.load(a_at + k[:, None], mask=taken[None, :] & known[:, None], other=0)
            total = tl.dot(x, a, total, input_precision="ieee")
        to = parts_ptr + (part * rows + row[:, None]).to(tl.int64) * COLUMNS + column[None, :]
        tl.store(to, total, mask=inside[:, None] & taken[None, :])


@triton.jit
def _added(
    parts_ptr,
    b_ptr,
    row,
    column,
    inside,
    taken,
    piece,
    place,
    rank,
    scaling,
    rows,
    SIZE: tl.constexpr,
    MOST: tl.constexpr,
    MOST_POW2: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """What an adapter adds to columns of a slice; rounded as the release's kernels round."""
    k = tl.arange(0, MOST_POW2)
    known = k < rank
    at = row[:, None].to(tl.int64) * COLUMNS + piece * rank + k[None, :]
    mask = inside[:, None] & known[None, :]
    x = tl.load(parts_ptr + at, mask=mask, other=0)
    for part in tl.static_range(1, PARTS):
        x += tl.load(parts_ptr + part * rows * COLUMNS + at, mask=mask, other=0)
    b_at = b_ptr + (place.to(tl.int64) * SIZE + column[None, :]) * MOST + k[:, None]
    b = tl.load(b_at, mask=taken[None, :] & known[:, None], other=0)
    return (tl.dot(x.to(b.dtype), b, input_precision="ieee") * scaling).to(b.dtype)


@triton.jit(do_not_specialize=["rows"])
def _expand(
    parts_ptr,
    b_ptr,
    y_ptr,
    bounds_ptr,
    segment_rows_ptr,
    places_ptr,
    ranks_ptr,
    scalings_ptr,
    rows,
    SIZE: tl.constexpr,
    MOST: tl.constexpr,
    MOST_POW2: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    LONGEST: tl.constexpr,
    TILE: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    piece, segment = tl.program_id(1), tl.program_id(2)
    row = tl.load(segment_rows_ptr + segment * LONGEST + tl.arange(0, LONGEST))
    place, rank = tl.load(places_ptr + segment), tl.load(ranks_ptr + segment)
    scaling = tl.load(scalings_ptr + segment)
    begin, bound = tl.load(bounds_ptr + piece), tl.load(bounds_ptr + piece + 1)
    begin += tl.program_id(0) * TILE
    if (rank > 0) & (begin < bound):
        inside = row >= 0
        column = begin + tl.arange(0, TILE)
        taken = column < bound
        own = (row, column, inside, taken, piece, place, rank, scaling, rows)
        added = _added(parts_ptr, b_ptr, *own, SIZE, MOST, MOST_POW2, COLUMNS, PARTS)
        y_at = y_ptr + row[:, None].to(tl.int64) * SIZE + column[None, :]
        mask = inside[:, None] & taken[None, :]
        tl.store(y_at, tl.load(y_at, mask=mask, other=0) + added, mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _expand_swiglu(
    parts_ptr,
    b_ptr,
    y_ptr,
    out_ptr,
    segment_rows_ptr,
    places_ptr,
    ranks_ptr,
    scalings_ptr,
    rows,
    SIZE: tl.constexpr,
    MOST: tl.constexpr,
    MOST_POW2: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    LONGEST: tl.constexpr,
    TILE: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    segment, half = tl.program_id(1), SIZE // 2
    first = tl.load(segment_rows_ptr + segment * LONGEST)
    row = tl.load(segment_rows_ptr + segment * LONGEST + tl.arange(0, LONGEST))
    place, rank = tl.load(places_ptr + segment), tl.load(ranks_ptr + segment)
    scaling = tl.load(scalings_ptr + segment)
    if first < 0:
        return
    inside = row >= 0
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    taken = column < half
    mask = inside[:, None] & taken[None, :]
    y_at = y_ptr + row[:, None].to(tl.int64) * SIZE + column[None, :]
    gate, up = tl.load(y_at, mask=mask, other=0), tl.load(y_at + half, mask=mask, other=0)
    if rank > 0:
        matrices, its = (parts_ptr, b_ptr, row), (place, rank, scaling, rows)
        left, right = (column, inside, taken, 0), (half + column, inside, taken, 1)
        gate += _added(*matrices, *left, *its, SIZE, MOST, MOST_POW2, COLUMNS, PARTS)
        up += _added(*matrices, *right, *its, SIZE, MOST, MOST_POW2, COLUMNS, PARTS)
    gate = gate.to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up.to(tl.float32)
    out_at = out_ptr + row[:, None].to(tl.int64) * half + column[None, :]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=mask)


def shrink(x: torch.Tensor, adapted: Adapted, segments: Segments) -> torch.Tensor:
    """Rows through the first matrices, in parts that are to be added up.

    Args:
        x: [rows, in], contiguous, of the dtype of the adapters.

    Returns:
        [parts, rows, slices * most] float32; rows without adapters are not written.
    """
    (rows, depth), columns, count = x.shape, adapted.a.shape[1], len(segments.places)
    tile = min(64, max(16, triton.next_power_of_2(columns)))
    tiles = triton.cdiv(columns, tile)
    parts, share = split(depth, count * tiles, device_of(x.device).multiprocessors)
    step = 2 * _STEP if tile == 16 and share % (2 * _STEP) == 0 else _STEP
    shrunk = torch.empty(parts, rows, columns, dtype=torch.float32, device=x.device)
    early = starts_early(rows)
    _shrink[count, parts, tiles](
        x,
        adapted.a,
        shrunk,
        *segments[:3],
        rows,
        DEPTH=depth,
        COLUMNS=columns,
        SLICES=len(adapted.bounds) - 1,
        SHARE=share,
        LONGEST=segments.most,
        TILE=tile,
        STEP=step,
        EARLY=early,
        launch_pdl=early,
        num_warps=2 if tile < 64 else 4,
        num_stages=_stages(share // step, (segments.most + tile) * step * x.itemsize, x.device),
    )
    return shrunk


def _stages(steps: int, size: int, device: torch.device) -> int:
    """Of a loop over columns, each of whose steps reads so many bytes."""
    return max(2, min(_MOST_STAGES, steps + 1, device_of(device).shared_memory // size - 1))


def add_expanded(
    y: torch.Tensor, shrunk: torch.Tensor, adapted: Adapted, segments: Segments
) -> None:
    """Adds to each row of a product what its adapter makes of the row that was multiplied.

    Rows that are in no segment stay as they are.

    Args:
        y: [rows, out], contiguous; in float32 what is added is rounded before.
        shrunk: what `shrink` gave of the rows that were multiplied.
    """
    grid = (triton.cdiv(adapted.widest, _TILE), len(adapted.bounds) - 1, len(segments.places))
    where = (adapted.bounds, *segments, len(y))
    _expand[grid](shrunk, adapted.b, y, *where, **_constants(shrunk, adapted, segments))


def expanded_swiglu(
    gate_up: torch.Tensor, shrunk: torch.Tensor, adapted: Adapted, segments: Segments
) -> torch.Tensor:
    """`swiglu` of a product with what adapters add to it.

    Args:
        gate_up: [rows, 2 * size], contiguous, of two slices; each row is in a segment.
        shrunk: as in `add_expanded`.

    Returns:
        [rows, size].
    """
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, size)
    grid, where = (triton.cdiv(size, _TILE), len(segments.places)), (*segments, rows)
    rest = _constants(shrunk, adapted, segments)
    _expand_swiglu[grid](shrunk, adapted.b, gate_up, out, *where, **rest)
    return out


def _constants(shrunk: torch.Tensor, adapted: Adapted, segments: Segments) -> dict[str, int]:
    """Of a second launch."""
    (parts, rows, columns), (_, size, most) = shrunk.shape, adapted.b.shape
    early = starts_early(rows)
    return dict(
        SIZE=size,
        MOST=most,
        MOST_POW2=max(16, triton.next_power_of_2(most)),
        COLUMNS=columns,
        PARTS=parts,
        LONGEST=segments.most,
        TILE=_TILE,
        EARLY=early,
        launch_pdl=early,
        num_warps=4,
    )


def split(depth: int, programs: int, multiprocessors: int) -> tuple[int, int]:
    """Into how many parts columns are split that so many programs would read all of, and how many each part has."""
    steps = triton.cdiv(depth, _STEP)
    wanted = _WAVES * multiprocessors // programs
    parts = max(1, min(_MOST_PARTS, steps // 2, triton.next_power_of_2(wanted + 1) // 2))
    share = triton.cdiv(steps, parts) * _STEP
    return triton.cdiv(depth, share), share


def add_adapted_reference(
    y: torch.Tensor, x: torch.Tensor, adapted: Adapted, segments: Segments
) -> None:
    """What `shrink` and `add_expanded` do.

    Args:
        x: the rows that were multiplied.
    """
    bounds = adapted.bounds.tolist()
    for segment, place in enumerate(segments.places.tolist()):
        rank, scaling = int(segments.ranks[segment]), float(segments.scalings[segment])
        if rank == 0:
            continue
        rows = segments.rows[segment].long()
        rows = rows[rows >= 0]
        for piece, (left, right) in enumerate(zip(bounds, bounds[1:], strict=False)):
            a = adapted.a[place, piece * rank : (piece + 1) * rank].float()
            b = adapted.b[place, left:right, :rank].float()
            inner = (x[rows].float() @ a.T).to(x.dtype).float()
            y[rows, left:right] += (scaling * (inner @ b.T)).to(x.dtype)
