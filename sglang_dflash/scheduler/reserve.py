"""KV slots for the rounds to come.

A request owns the slots of `[0, kv_allocated_len)`; those of `[0, kv_committed_len)` hold tokens,
the rest is reserved for the next round and stays with the request from round to round. Whoever
frees the request frees both (`release_kv_cache` of SGLang).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from sglang.srt.mem_cache.common import alloc_token_slots
from sglang.srt.utils import ceil_align

from sglang_dflash.two_pools import has_two

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator

# Slots that all requests get beyond those that they need as soon as one lacks some, where there are so many, so that it
# is some rounds until one does again; and the part of the pool that all of these may be.
_SPARE, _SPARE_SHARE = 32, 1 / 16


def slot_limit(req: Req) -> int:
    """Length beyond which no token of the request ever needs a slot.

    The last token that a request may produce needs none, but has one: if it is run, as a draft or in a
    round in vain, the next request with this prefix finds it. Rows of a block beyond this length are cut:
    they use slot 0, which SGLang keeps for padding.
    """
    return len(req.origin_input_ids) + req.sampling_params.max_new_tokens


def _reserved_end(req: Req, lookahead: int, page_size: int) -> int:
    """Length for which `req` must own slots so that `lookahead` more tokens can be run."""
    want = min(req.kv_committed_len + lookahead, slot_limit(req))
    return ceil_align(max(want, req.kv_allocated_len), page_size)


def slots_required(reqs: Sequence[Req], page_size: int, lookahead: int) -> int:
    """New slots that the next decode step of `reqs` takes from the allocator, in tokens.

    Args:
        lookahead: tokens that the step may run after the committed ones.
    """
    return sum(
        _reserved_end(req, lookahead, page_size) - ceil_align(req.kv_allocated_len, page_size)
        for req in reqs
        if _lacks(req, lookahead)
    )


def _lacks(req: Req, lookahead: int) -> bool:
    """Whether it owns slots for fewer than `lookahead` tokens beyond its committed ones, as it does near its limit."""
    return req.kv_committed_len + lookahead > req.kv_allocated_len


def _spare(batch: ScheduleBatch, requests: int, lookahead: int) -> int:
    """What so many requests each get beyond their need, without taking it from prefixes or retracting anybody."""
    allocator = batch.tree_cache.token_to_kv_pool_allocator
    if has_two(allocator.get_kvcache()):  # that of sliding layers is small, as windows are
        return 0
    small = len(batch.reqs) * _SPARE <= allocator.size * _SPARE_SHARE
    each = lookahead + _SPARE + batch.tree_cache.page_size
    free = requests * each <= allocator.available_size()
    return _SPARE if small and free else 0


def reserve(batch: ScheduleBatch, lookahead: int) -> None:
    """Gives every request of `batch` slots for `lookahead` tokens after its committed ones, or some more.

    Writes the new slots to `req_to_token`, and 0 where a request reached its `slot_limit`, so that
    a block's rows beyond it can never touch a slot that somebody else owns.

    Raises:
        RuntimeError: the pool is exhausted (SGLang's own error; it retracts before this happens).
    """
    lacking = [req for req in batch.reqs if _lacks(req, lookahead)]
    if not lacking:
        return
    if spare := _spare(batch, len(batch.reqs), lookahead):
        lookahead += spare
        lacking = [req for req in batch.reqs if _lacks(req, lookahead)]
    else:
        lookahead += _spare(batch, len(lacking), lookahead)
    table = batch.req_to_token_pool.req_to_token
    page_size = batch.tree_cache.page_size
    tail, fresh, cut = Spans(), Spans(), Spans()
    for req in lacking:
        owned = ceil_align(req.kv_allocated_len, page_size)
        end = _reserved_end(req, lookahead, page_size)
        # Rest of a page that the prompt filled in part: owned already, not yet in the table.
        tail.add(req.req_pool_idx, req.kv_allocated_len, min(owned, table.shape[1]))
        fresh.add(req.req_pool_idx, owned, end)
        cut.add(req.req_pool_idx, end, min(req.kv_committed_len + lookahead, table.shape[1]))
        req.kv_allocated_len = end

    if tail.total:
        rows, columns, first = tail.tensors(table.device)
        last, further = table[rows, first - 1], columns - first + 1
        table[rows, columns] = slots = last + further.to(table.dtype)
        _pair(batch.tree_cache.token_to_kv_pool_allocator, slots, last, further)
    if fresh.total:
        slots = alloc_token_slots(batch.tree_cache, fresh.total)
        rows, columns, _ = fresh.tensors(table.device)
        if fresh.end > table.shape[1]:  # a page may end beyond the longest context
            # Rare, because the host waits for the device to know how many these are.
            inside = columns < table.shape[1]
            rows, columns, slots = rows[inside], columns[inside], slots[inside]
        table[rows, columns] = slots.to(table.dtype)
    if cut.total:
        rows, columns, _ = cut.tensors(table.device)
        table[rows, columns] = torch.zeros_like(columns, dtype=table.dtype)  # 0 alone would wait


def _pair(
    allocator: BaseTokenToKVPoolAllocator,
    slots: torch.Tensor,
    last: torch.Tensor,
    further: torch.Tensor,
) -> None:
    """Pairs the rest of a page with that of the same tokens in a pool of sliding layers' own, if there is one.

    Args:
        slots: [n] int, of the rest.
        last: [n] int, slot before it in its page.
        further: [n] int64, by how much each of `slots` lies behind that.
    """
    if has_two(allocator.get_kvcache()):
        sliding = allocator.full_to_swa_index_mapping
        sliding[slots] = sliding[last] + further


class Spans:
    """Column ranges of rows of `req_to_token`, as index tensors."""

    def __init__(self) -> None:
        self.spans: list[tuple[int, int, int]] = []
        self.total = self.end = 0

    def add(self, row: int, begin: int, end: int) -> None:
        if end > begin:
            self.spans.append((row, begin, end))
            self.total += end - begin
            self.end = max(self.end, end)

    def tensors(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Row, column and first column of its span for each cell, [total] int64 each."""
        row, begin, end = np.array(self.spans, dtype=np.int64).T
        lengths = end - begin
        cells = np.empty((3, self.total), dtype=np.int64)
        cells[0], cells[2] = row.repeat(lengths), begin.repeat(lengths)
        cells[1] = np.arange(self.total) + (end - lengths.cumsum()).repeat(lengths)
        cells = torch.from_numpy(cells)
        if device.type == "cuda":
            cells = cells.pin_memory()
        return tuple(cells.to(device, non_blocking=True))
