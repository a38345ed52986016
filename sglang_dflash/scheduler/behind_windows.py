"""Slots of sliding layers' own pool that no window reaches any more.

The release gives them back as a request decodes, a token at a time. Here it is done when a round is committed: of a
request that decodes, whatever is in flight begins at its committed length or beyond, and its prompt is through.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from sglang_dflash.scheduler.reserve import Spans
from sglang_dflash.two_pools import has_two

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.model_executor.model_runner import ModelRunner

_PART = 4  # of a window: so much may lie behind it until it is worth the launches that free it


class BehindWindows:
    """Frees them; nothing where all layers share one pool."""

    def __init__(self, target: ModelRunner):
        self._there = has_two(target.token_to_kv_pool)
        if not self._there:
            return
        self._allocator = target.token_to_kv_pool_allocator
        self._table: torch.Tensor = target.req_to_token_pool.req_to_token
        self._page_size, self._window = target.page_size, target.sliding_window_size

    def free(self, reqs: Sequence[Req]) -> None:
        """Frees those of requests whose round was just committed, of all together when one has enough of them.

        What the prefix cache has is its own to free.
        """
        if not self._there:
            return
        living = [req for req in reqs if not (req.finished() or req.is_retracted)]
        begins = [max(req.swa_evicted_seqlen, req.cache_protected_len) for req in living]
        ends = [self._first_seen(req) for req in living]
        behind = [end - begin for begin, end in zip(begins, ends, strict=True)]
        if max(behind, default=0) < max(self._page_size, self._window // _PART):
            return
        spans = Spans()
        for req, begin, end in zip(living, begins, ends, strict=True):
            spans.add(req.req_pool_idx, begin, end)
            req.swa_evicted_seqlen = max(begin, end)
        rows, columns, _ = spans.tensors(self._table.device)
        self._allocator.free_swa(self._table[rows, columns])

    def _first_seen(self, req: Req) -> int:
        """Where the page begins that the next round's first row sees first.

        It is before the last page of the request: the prefix cache takes for granted that this is still there.
        """
        kept = max(self._window, self._page_size)
        return max(0, req.kv_committed_len - kept) // self._page_size * self._page_size
