"""K/V that a streaming session keeps between its turns.

SGLang's `SessionAwareCache` leaves a turn's slots and its row of `req_to_token` to the next turn. What is
added here holds for plain decoding, too: slots that were reserved for tokens that never came are freed, a
session that is closed leaves them to the turn that still runs, and none are counted twice.

Draft K/V lies under the target's slots, so a session keeps both. An overlapped round in vain may still run
when the next turn gets the same row; what it writes there lies beyond the tokens that are kept, and the
turn's own prefill, launched later on the same stream, writes it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams, MatchResult
from sglang.srt.mem_cache.session_aware_cache import SessionAwareCache, SessionSlot
from sglang.srt.utils import ceil_align

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


class SessionKV(SessionAwareCache):
    """SGLang's prefix cache `inner`, and what open streaming sessions keep."""

    def __init__(self, inner: Any):
        super().__init__(inner)
        # By session: the request that was last given what its slot keeps, until it finishes.
        self.turns: dict[str, Req] = {}

    def reset(self) -> None:
        self.turns.clear()
        super().reset()

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """All that the session keeps, or what the prefix cache knows of a first turn."""
        req = params.req
        slot = self.slots.get(req.session.session_id) if _streams(req) else None
        if slot is not None and len(params.key.token_ids) < slot.kv_committed_len:
            # Only a prompt that was cut is shorter than what was run before it.
            self.release_session(req.session.session_id)
            slot = None
        if slot is None:
            return self.inner.match_prefix(params)
        self.turns[req.session.session_id] = req
        slot.restore_to_req(req)
        kept = self.req_to_token_pool.req_to_token[slot.req_pool_idx, : slot.kv_committed_len]
        return MatchResult(
            device_indices=kept.to(torch.int64),
            last_device_node=slot.virtual_node,
            last_host_node=slot.virtual_node,
            cache_protected_len=slot.cache_protected_len,
        )

    def cache_finished_req(self, req: Req, is_insert: bool = True, **keywords: Any) -> None:
        """Keeps what a turn has run for the next one; frees it if it must serve nobody or make room."""
        if not _streams(req):
            return self.inner.cache_finished_req(req, is_insert=is_insert, **keywords)
        session_id = req.session.session_id
        self.turns.pop(session_id, None)
        if not is_insert:
            slot = self.slots.pop(session_id, None)
            if slot is not None:
                _hand_over(slot, req)
            return self.inner.cache_finished_req(req, is_insert=False, **keywords)
        self._free_what_is_not_kept(req)
        super().cache_finished_req(req)
        # They are the session's now, and counted there.
        req.kv_committed_freed = req.kv_overallocated_freed = True

    def _free_what_is_not_kept(self, req: Req) -> None:
        """Leaves a request the slots of tokens that the next turn will find before its own."""
        output = req.output_ids[: req.sampling_params.max_new_tokens]
        kept = min(req.kv_committed_len, len(req.origin_input_ids) + len(output))
        begin, end = ceil_align(kept, self.page_size), req.kv_allocated_len
        if begin < end:
            row = self.req_to_token_pool.req_to_token[req.req_pool_idx]
            self.token_to_kv_pool_allocator.free(row[begin:end])
        req.kv_committed_len = req.kv_allocated_len = kept

    def release_session(self, session_id: str) -> None:
        """Frees what a session keeps, or leaves it to its turn if that runs."""
        turn = self.turns.pop(session_id, None)
        if turn is not None and turn.extend_batch_idx > 0:
            _hand_over(self.slots.pop(session_id), turn)
            return
        if turn is not None:  # it waits, and will be matched again
            turn.req_pool_idx = None
            turn.kv_committed_len = turn.kv_allocated_len = 0
        super().release_session(session_id)

    def session_held_tokens(self) -> int:
        """Slots that sessions keep, less those of the prefix cache and of turns that run."""
        return sum(self._end(slot) - slot.cache_protected_len for slot in self._resting())

    def session_held_swa_tokens(self) -> int:
        """The same of sliding layers' own pool, where what windows have left is free."""
        return sum(
            self._end(slot) - max(slot.cache_protected_len, slot.swa_evicted_seqlen)
            for slot in self._resting()
        )

    def _end(self, slot: SessionSlot) -> int:
        return ceil_align(slot.kv_allocated_len, self.page_size)

    def _resting(self) -> Iterator[SessionSlot]:
        """What is kept of sessions of which no turn runs."""
        running = {key for key, turn in self.turns.items() if turn.extend_batch_idx > 0}
        return (slot for key, slot in self.slots.items() if key not in running)


def _hand_over(slot: SessionSlot, turn: Req) -> None:
    """Makes a running turn the owner of what its session kept, as any other request is."""
    turn.last_node = slot.last_node
    turn.cache_protected_len = slot.cache_protected_len
    turn.swa_uuid_for_lock = slot.swa_uuid_for_lock


def _streams(req: Req | None) -> bool:
    return req is not None and req.session is not None and req.session.streaming
