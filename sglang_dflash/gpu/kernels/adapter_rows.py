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


class GroupedRows(NamedTuple):
    """Rows in an order in which those of one adapter are side by side, in segments that have one adapter each.

    Attributes:
        ends: [segments + 1] int32, where in that order each begins, and where the last one ends.
        places: [segments] int32, of its adapter; of segments without rows any.
        order: [rows] int32, the rows in that order.
    """

    ends: torch.Tensor
    places: torch.Tensor
    order: torch.Tensor

    @classmethod
    def empty(cls, rows: int, adapters: int, tile: int, device: torch.device) -> GroupedRows:
        """For rows of so many adapters and of none, in segments of a tile's rows at most."""
        segments = segments_of(rows, adapters, tile)
        sizes = (segments + 1, segments, rows)
        return cls(*(torch.empty(size, dtype=torch.int32, device=device) for size in sizes))


def segments_of(rows: int, adapters: int, tile: int) -> int:
    """How many segments there may be: of each adapter, and of rows without one, the last may be short."""
    return rows // tile + adapters + 1


@triton.jit(do_not_specialize=["rows", "requests", "segments"])
def _group(
    ends_ptr,
    places_ptr,
    ranks_ptr,
    begins_ptr,
    segment_places_ptr,
    order_ptr,
    rows,
    requests,
    segments,
    ROWS_POW2: tl.constexpr,
    STEPS: tl.constexpr,
    NONE: tl.constexpr,
    TILE: tl.constexpr,
    SEGMENTS_POW2: tl.constexpr,
):
    row = tl.arange(0, ROWS_POW2)
    known = row < rows
    # The request of a row: how many end at it or before, by halves.
    low, high = tl.zeros([ROWS_POW2], tl.int32), tl.zeros([ROWS_POW2], tl.int32) + requests
    for _ in tl.static_range(STEPS):
        open_ = low < high
        middle = (low + high) // 2
        end = tl.load(ends_ptr + 1 + middle, mask=known & open_, other=0)
        behind = open_ & (end <= row)
        high = tl.where(open_ & (end > row), middle, high)
        low = tl.where(behind, middle + 1, low)
    somebody = known & (low < requests)
    place = tl.load(places_ptr + low, mask=somebody, other=NONE)
    rank = tl.load(ranks_ptr + place, mask=somebody, other=0)
    place = tl.where(rank > 0, place, NONE)
    segment = tl.arange(0, SEGMENTS_POW2)
    at = tl.zeros([ROWS_POW2], tl.int32)
    begins = tl.zeros([SEGMENTS_POW2], tl.int32) + rows
    owners = tl.zeros([SEGMENTS_POW2], tl.int32) + NONE
    before, made = 0, 0
    for adapter in range(0, NONE + 1):
        its = known & (place == adapter)
        count = tl.sum(its.to(tl.int32), axis=0)
        at = tl.where(its, before + tl.cumsum(its.to(tl.int32), axis=0) - 1, at)
        tiles = (count + TILE - 1) // TILE
        here = (segment >= made) & (segment < made + tiles)
        begins = tl.where(here, before + TILE * (segment - made), begins)
        owners = tl.where(here, adapter, owners)
        before += count
        made += tiles
    tl.store(order_ptr + at, row, mask=known)
    tl.store(begins_ptr + segment, begins, mask=segment <= segments)
    tl.store(segment_places_ptr + segment, owners, mask=segment < segments)


def group_rows(
    ends: torch.Tensor, places: torch.Tensor, ranks: torch.Tensor, rows: int, tile: int
) -> GroupedRows:
    """Rows of requests by their adapters; those without one, and those of nobody, are the last.

    Args:
        ends: [requests + 1] int32 or int64, where each request's rows begin, and where the last one's end.
        places: [requests] int32, of a request's adapter.
        ranks: [adapters + 1] int32, of the adapter at a place; 0 for none, as of the last.
        rows: of all requests, and of what fills the pass up.
        tile: rows of a segment, at most.
    """
    requests, adapters = len(ends) - 1, len(ranks) - 1
    grouped = GroupedRows.empty(rows, adapters, tile, ends.device)
    segments = len(grouped.places)
    _group[(1,)](
        ends,
        places,
        ranks,
        *grouped,
        rows,
        requests,
        segments,
        ROWS_POW2=max(128, triton.next_power_of_2(rows)),
        STEPS=requests.bit_length(),
        NONE=adapters,
        TILE=tile,
        SEGMENTS_POW2=triton.next_power_of_2(segments + 1),
        num_warps=_WARPS,
    )
    return grouped


def group_rows_reference(
    ends: torch.Tensor, places: torch.Tensor, ranks: torch.Tensor, rows: int, tile: int
) -> GroupedRows:
    """What `group_rows` does; on a CPU it is faster."""
    none = len(ranks) - 1
    row = torch.arange(rows, device=ends.device)
    request = torch.searchsorted(ends[1:].long(), row, right=True)
    somebody = request < len(places)
    place = places[request.clamp(max=len(places) - 1)].masked_fill(~somebody, none)
    place = place.masked_fill(ranks[place] == 0, none)
    counts = torch.bincount(place, minlength=none + 1).tolist()
    grouped = GroupedRows.empty(rows, none, tile, ends.device)
    grouped.ends.fill_(rows)
    grouped.places.fill_(none)
    grouped.order.copy_(place.argsort(stable=True))
    segment, begin = 0, 0
    for adapter, count in enumerate(counts):
        for first in range(0, count, tile):
            grouped.ends[segment], grouped.places[segment] = begin + first, adapter
            segment += 1
        begin += count
    return grouped
