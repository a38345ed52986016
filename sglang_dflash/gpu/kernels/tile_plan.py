"""Which program computes what, where requests have different numbers of rows: made on the device, which alone knows.

Each request's rows are cut into tiles, and the keys of a tile into parts if there are many more than of others, so that
few rows of a long context occupy the device, too. How many entries a plan has depends on shapes alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sglang_dflash.gpu.kernels.block_tiles import Tile

LEAST = 512  # keys of a part: fewer are through before parts are put together


class Plan(NamedTuple):
    """What programs do in each layer of a pass.

    Attributes:
        entries: [entries, 8] int32. Of each the request, or -1 for none, the tile's first row in it, which part of its
            keys, and keys of a part; and of the request the token of its first row, its tokens, and its keys.
        split: only so many entries at the beginning may be one of several parts.
        tile: for which it was made.
    """

    entries: torch.Tensor
    split: int
    tile: Tile


@triton.jit
def entry_of(plan_ptr, entry):
    """The seven numbers of an entry."""
    at = plan_ptr + entry * 8
    request, first, part, size = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    return request, first, part, size, tl.load(at + 4), tl.load(at + 5), tl.load(at + 6)


@triton.jit(do_not_specialize=["requests", "room", "shortest"])
def _plan(
    plan_ptr,
    ends_ptr,
    lengths_ptr,
    requests,
    room,
    shortest,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WHOLE: tl.constexpr,
    REQUESTS: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    every = tl.arange(0, REQUESTS)
    there = every < requests
    begin = tl.load(ends_ptr + every, mask=there, other=0)
    width = tl.load(ends_ptr + every + 1, mask=there, other=0) - begin
    length = tl.load(lengths_ptr + every, mask=there, other=0)
    tiles = tl.cdiv(width * GROUP, ROWS)
    # A fair share of the keys of all tiles: so there are no more parts than tiles and `room` together.
    size = tl.cdiv(tl.sum(tiles.to(tl.int64) * length), room).to(tl.int32)
    size = tl.cdiv(tl.maximum(size, shortest), KEYS) * KEYS
    if WHOLE:
        size = tl.maximum(size, 1 << 30)
    parts = tl.maximum(tl.cdiv(length, size), 1)
    entries = tiles * parts
    # Tiles of several parts first: they take longest, and the launch that puts parts together looks no further.
    split = tl.where(parts > 1, entries, 0)
    whole = entries - split
    last = tl.where(parts > 1, tl.cumsum(split, 0), tl.sum(split) + tl.cumsum(whole, 0))
    first = last - entries

    entry = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    own = (entry[:, None] >= first[None, :]) & (entry[:, None] < last[None, :])
    found = tl.sum(own.to(tl.int32), axis=1)
    request = tl.sum(tl.where(own, every[None, :], 0), axis=1)
    index = entry - tl.sum(tl.where(own, first[None, :], 0), axis=1)
    begin = tl.load(ends_ptr + request)
    length = tl.load(lengths_ptr + request)
    parts = tl.maximum(tl.cdiv(length, size), 1)
    at = plan_ptr + entry * 8
    tl.store(at, tl.where(found > 0, request, -1))
    tl.store(at + 1, index // parts * ROWS)
    tl.store(at + 2, index % parts)
    tl.store(at + 3, size + entry * 0)
    tl.store(at + 4, begin)
    tl.store(at + 5, tl.load(ends_ptr + request + 1) - begin)
    tl.store(at + 6, length)


def make_plan(
    ends: torch.Tensor,
    cache_lengths: torch.Tensor,
    rows: int,
    group: int,
    tile: Tile,
    room: int,
    shortest: int = LEAST,
) -> Plan:
    """Tiles of all requests, and the parts into which their keys are split.

    Args:
        ends: [bs + 1] int32, where each request's rows begin, and end; from 0 to `rows`.
        cache_lengths: [bs] int32, keys that a request's last row sees; at least as many as it has rows.
        rows: of all requests.
        group: query heads that share a KV head.
        room: how many parts of a KV head occupy the device. 0 if keys are not to be split: each row's are then summed
            in one order, whoever is beside it.
        shortest: keys of a part, at least.
    """
    requests = len(cache_lengths)
    # Of each request one tile may not be full.
    most = rows * group // tile.rows + min(requests, rows) + room
    power = triton.next_power_of_2(requests)
    at_once = max(1, min(64, 8192 // power))  # so many elements as 128 threads hold
    blocks = triton.cdiv(most, at_once)
    entries = torch.empty(blocks * at_once, 8, dtype=torch.int32, device=ends.device)
    _plan[(blocks,)](
        entries,
        ends,
        cache_lengths,
        requests,
        max(room, 1),
        shortest,
        GROUP=group,
        ROWS=tile.rows,
        KEYS=tile.keys,
        WHOLE=room == 0,
        REQUESTS=power,
        ENTRIES=at_once,
        num_warps=4,
    )
    # Where a tile has several parts, each is half of a share or more on average.
    return Plan(entries[:most], min(2 * room, most), tile)
