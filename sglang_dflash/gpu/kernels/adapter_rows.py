"""Which rows of a pass have which LoRA adapter, in one launch in front of it.

Requests have any numbers of rows, which only the device knows. As operations of PyTorch it is some forty launches, in
every pass.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

_WARPS = 8
_TILE = 128  # rows of a program where rows are not sorted


class Segments(NamedTuple):
    """Rows of a pass in segments that have one LoRA adapter each, or none.

    What a program needs of its segment lies under the segment's number, so it waits once for all of it.

    Attributes:
        rows: [segments, most] int32, which each has, the first ones; behind them -1. `most` is a power of two of at
            least 16.
        places: [segments] int32, of its adapter in the pool of them; any without an adapter.
        ranks: [segments] int32, of its adapter; 0 without one.
        scalings: [segments] float32, likewise.
    """

    rows: torch.Tensor
    places: torch.Tensor
    ranks: torch.Tensor
    scalings: torch.Tensor

    @property
    def most(self) -> int:
        """Rows that a segment may have."""
        return self.rows.shape[1]

    @classmethod
    def empty(cls, rows: int, adapters: int, most: int, device: torch.device) -> Segments:
        """As many as rows of so many adapters, and of none, may need: the last one of each may be short."""
        segments = rows // most + adapters + 1
        sizes = ((segments, most), segments, segments)
        numbers = (torch.empty(size, dtype=torch.int32, device=device) for size in sizes)
        return cls(*numbers, torch.empty(segments, device=device))


@triton.jit
def _request_of(row, known, ends_ptr, requests, STEPS: tl.constexpr):
    """How many requests end at a row or before, by halves: the number of its own."""
    low, high = tl.zeros_like(row), tl.zeros_like(row) + requests
    for _ in tl.static_range(STEPS):
        between = low < high
        middle = (low + high) // 2
        end = tl.load(ends_ptr + 1 + middle, mask=known & between, other=0)
        high = tl.where(between & (end > row), middle, high)
        low = tl.where(between & (end <= row), middle + 1, low)
    return low


@triton.jit(do_not_specialize=["rows", "requests"])
def _place(
    ends_ptr,
    places_ptr,
    out_ptr,
    rows,
    requests,
    STEPS: tl.constexpr,
    NONE: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    known = row < rows
    request = _request_of(row, known, ends_ptr, requests, STEPS)
    place = tl.load(places_ptr + request, mask=known & (request < requests), other=NONE)
    tl.store(out_ptr + row, place, mask=known)


@triton.jit(do_not_specialize=["rows", "requests", "segments"])
def _group(
    ends_ptr,
    places_ptr,
    ranks_ptr,
    scalings_ptr,
    segment_rows_ptr,
    segment_places_ptr,
    segment_ranks_ptr,
    segment_scalings_ptr,
    rows,
    requests,
    segments,
    ROWS_POW2: tl.constexpr,
    STEPS: tl.constexpr,
    NONE: tl.constexpr,
    MOST: tl.constexpr,
    SEGMENTS_POW2: tl.constexpr,
):
    segment = tl.arange(0, SEGMENTS_POW2)
    there = segment < segments
    cells = segment[:, None] * MOST + tl.arange(0, MOST)[None, :]
    tl.store(segment_rows_ptr + cells, tl.zeros_like(cells) - 1, mask=there[:, None])
    row = tl.arange(0, ROWS_POW2)
    known = row < rows
    request = _request_of(row, known, ends_ptr, requests, STEPS)
    somebody = known & (request < requests)
    place = tl.load(places_ptr + request, mask=somebody, other=NONE)
    rank = tl.load(ranks_ptr + place, mask=somebody, other=0)
    place = tl.where(rank > 0, place, NONE)
    at = tl.zeros([ROWS_POW2], tl.int32)
    owner = tl.zeros([SEGMENTS_POW2], tl.int32) + NONE
    made = 0
    for adapter in range(0, NONE + 1):
        its = known & (place == adapter)
        count = tl.sum(its.to(tl.int32), axis=0)
        at = tl.where(its, made * MOST + tl.cumsum(its.to(tl.int32), axis=0) - 1, at)
        last = made + (count + MOST - 1) // MOST
        owner = tl.where((segment >= made) & (segment < last), adapter, owner)
        made = last
    tl.store(segment_places_ptr + segment, owner, mask=there)
    ranks = tl.load(ranks_ptr + owner, mask=owner < NONE, other=0)
    tl.store(segment_ranks_ptr + segment, ranks, mask=there)
    scalings = tl.load(scalings_ptr + owner, mask=owner < NONE, other=0.0)
    tl.store(segment_scalings_ptr + segment, scalings, mask=there)
    tl.debug_barrier()  # rows are written over what stands for none
    tl.store(segment_rows_ptr + at, row, mask=known)


def row_places(ends: torch.Tensor, places: torch.Tensor, rows: int, none: int) -> torch.Tensor:
    """[rows] int32: the place of each row's adapter; `none` of those of nobody.

    Args:
        ends: [requests + 1] int32 or int64, where each request's rows begin, and where the last one's end.
        places: [requests] int32, of a request's adapter.
        rows: of all requests, and of what fills the pass up.
    """
    out, requests = torch.empty(rows, dtype=torch.int32, device=ends.device), len(places)
    grid, steps = (triton.cdiv(rows, _TILE),), requests.bit_length()
    _place[grid](ends, places, out, rows, requests, STEPS=steps, NONE=none, TILE=_TILE, num_warps=4)
    return out


def row_places_reference(
    ends: torch.Tensor, places: torch.Tensor, rows: int, none: int
) -> torch.Tensor:
    """What `row_places` gives; on a CPU it is faster."""
    request = torch.searchsorted(
        ends[1:].long(), torch.arange(rows, device=ends.device), right=True
    )
    place = places[request.clamp(max=len(places) - 1)]
    return place.masked_fill(request >= len(places), none)


def group_rows(
    ends: torch.Tensor,
    places: torch.Tensor,
    ranks: torch.Tensor,
    scalings: torch.Tensor,
    rows: int,
    most: int,
) -> Segments:
    """Rows of requests by their adapters; those without one, and those of nobody, are the last.

    Args:
        ends: [requests + 1] int32 or int64, where each request's rows begin, and where the last one's end.
        places: [requests] int32, of a request's adapter.
        ranks, scalings: [adapters + 1] int32 and float32, of the adapter at a place; a rank of 0 for none, as of the
            last.
        rows: of all requests, and of what fills the pass up.
        most: rows of a segment.
    """
    requests, adapters = len(ends) - 1, len(ranks) - 1
    made = Segments.empty(rows, adapters, most, ends.device)
    segments = len(made.places)
    _group[(1,)](
        *(ends, places, ranks, scalings),
        *made,
        *(rows, requests, segments),
        ROWS_POW2=max(128, triton.next_power_of_2(rows)),
        STEPS=requests.bit_length(),
        NONE=adapters,
        MOST=most,
        SEGMENTS_POW2=triton.next_power_of_2(segments),
        num_warps=_WARPS,
    )
    return made


def group_rows_reference(
    ends: torch.Tensor,
    places: torch.Tensor,
    ranks: torch.Tensor,
    scalings: torch.Tensor,
    rows: int,
    most: int,
) -> Segments:
    """What `group_rows` does; on a CPU it is faster."""
    none = len(ranks) - 1
    place = row_places_reference(ends, places, rows, none)
    place = place.masked_fill(ranks[place] == 0, none)
    made = Segments.empty(rows, none, most, ends.device)
    for part, value in zip(made, (-1, none, 0, 0), strict=True):
        part.fill_(value)
    segment = 0
    for adapter in range(none + 1):
        for piece in (place == adapter).nonzero().flatten().split(most):
            if len(piece):
                made.rows[segment, : len(piece)] = piece.to(torch.int32)
                made.places[segment] = adapter
                if adapter < none:
                    made.ranks[segment], made.scalings[segment] = ranks[adapter], scalings[adapter]
                segment += 1
    return made
