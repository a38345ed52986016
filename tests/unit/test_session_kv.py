"""What streaming sessions keep, in the release's own pools, on the CPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils import ceil_align

from sglang_dflash.scheduler.session_kv import SessionKV

SIZE, ROWS, RESERVED = 480, 8, 16


class World:
    """A session on empty pools, and what the scheduler does to its turns."""

    def __init__(self, page_size: int):
        self.page_size = page_size
        self.rows = ReqToTokenPool(ROWS, 96, "cpu", enable_memory_saver=False)
        if page_size == 1:
            self.slots = TokenToKVPoolAllocator(SIZE, torch.float32, "cpu", None, need_sort=False)
        else:
            self.slots = PagedTokenToKVPoolAllocator(
                SIZE, page_size, torch.float32, "cpu", None, need_sort=False
            )
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.slots,
            page_size=page_size,
        )
        self.cache = SessionKV(RadixCache(params))
        self.session = SimpleNamespace(session_id="s", streaming=True)

    def match(self, tokens: list[int], max_new_tokens: int = 40) -> Req:
        """A turn that waits; `tokens` are all of its conversation."""
        params = SamplingParams(temperature=0, max_new_tokens=max_new_tokens)
        req = Req("r", "", list(tokens), params, session=self.session, vocab_size=100)
        req.fill_ids = list(tokens)
        key = RadixKey(token_ids=tokens[:-1])
        matched = self.cache.match_prefix(MatchPrefixParams(key=key, req=req))
        req.prefix_indices, req.last_node = matched.device_indices, matched.last_device_node
        protected = matched.cache_protected_len
        req.cache_protected_len = len(req.prefix_indices) if protected is None else protected
        return req

    def run(self, req: Req, output: list[int]) -> None:
        """Its prefill and its rounds, the last of which reserved more than it committed."""
        self.cache.inc_lock_ref(req.last_node)
        self.rows.alloc([req])
        req.extend_batch_idx += 1
        row, length = self.rows.req_to_token[req.req_pool_idx], len(req.fill_ids)
        row[: len(req.prefix_indices)] = req.prefix_indices
        self._own(row, len(req.prefix_indices), length)
        req.kv_committed_len = req.kv_allocated_len = length
        self.cache.cache_unfinished_req(req)
        req.output_ids += output
        req.kv_committed_len += max(len(output) - 1, 0)
        end = ceil_align(req.kv_committed_len + RESERVED, self.page_size)
        self._own(row, length, end)
        req.kv_allocated_len = end

    def _own(self, row: torch.Tensor, begin: int, end: int) -> None:
        """Slots of `[begin, end)`, the rest of a page that is owned already first."""
        owned = min(ceil_align(begin, self.page_size), end)
        if owned > begin:
            row[begin:owned] = row[begin - 1] + torch.arange(1, owned - begin + 1)
        fresh = self.slots.alloc(ceil_align(end - owned, self.page_size))
        row[owned:end] = fresh[: end - owned]

    def finish(self, req: Req, keep: bool = True) -> None:
        """What `release_kv_cache` does."""
        req.finished_reason = FINISH_LENGTH(len(req.output_ids)) if keep else None
        self.cache.cache_finished_req(req, is_insert=keep)
        if req.req_pool_idx is None:
            return
        begin, end = req.pop_overallocated_kv_cache()
        begin = ceil_align(begin, self.page_size)
        if begin < end:
            self.slots.free(self.rows.req_to_token[req.req_pool_idx][begin:end])
        self.rows.free(req)

    def free(self) -> int:
        return self.slots.available_size() + self.cache.evictable_size()

    def check(self, running: Req | None = None) -> None:
        """Every slot is somebody's, as the release counts them; rows, too."""
        mine = 0
        if running is not None:
            mine = ceil_align(running.kv_allocated_len, self.page_size)
            mine -= running.cache_protected_len
        held = self.cache.session_held_tokens() + self.cache.protected_size()
        assert self.free() + held + mine == SIZE
        free_rows = self.rows.free_slots
        assert len(set(free_rows)) == len(free_rows)

    def check_empty(self) -> None:
        assert self.free() == SIZE and not self.cache.slots and not self.cache.turns
        assert sorted(self.rows.free_slots) == list(range(ROWS))


@pytest.fixture(params=[1, 16])
def world(request: pytest.FixtureRequest) -> World:
    return World(request.param)


PROMPT, ANSWER, MORE = list(range(1, 22)), [50, 51, 52, 53, 54], [60, 61, 62]


def first_turn(world: World, **sampling: int) -> list[int]:
    req = world.match(PROMPT, **sampling)
    world.run(req, ANSWER)
    world.check(req)
    world.finish(req)
    world.check()
    return PROMPT + ANSWER[: sampling.get("max_new_tokens")]


def test_the_next_turn_has_what_the_last_one_ran(world: World) -> None:
    tokens = first_turn(world)
    slots = world.rows.req_to_token[world.cache.slots["s"].req_pool_idx, : len(tokens) - 1].tolist()
    for _ in range(2):  # a turn that waits is matched again and again
        second = world.match(tokens + MORE)
        world.check()
        assert second.prefix_indices.tolist() == slots
    world.run(second, ANSWER)
    world.check(second)
    world.finish(second)
    world.check()
    world.cache.release_session("s")
    world.check_empty()


def test_a_token_that_was_drawn_in_vain_is_not_kept(world: World) -> None:
    """With max_new_tokens 0 a token is drawn, and may be run, that is no part of the conversation."""
    req = world.match(PROMPT, max_new_tokens=0)
    world.run(req, ANSWER[:1])
    req.kv_committed_len += 1
    world.finish(req)
    world.check()
    assert len(world.match(PROMPT + MORE).prefix_indices) == len(PROMPT)


@pytest.mark.parametrize("turns", [1, 2])
def test_what_must_not_be_kept_is_freed(world: World, turns: int) -> None:
    """A turn that is retracted, or failed by NaN; it, or the next, runs all again."""
    tokens = PROMPT
    if turns == 2:
        tokens = first_turn(world) + MORE
    req = world.match(tokens)
    world.run(req, ANSWER)
    world.finish(req, keep=False)
    world.check()
    world.check_empty()
    req = world.match(tokens)
    world.run(req, ANSWER)
    world.finish(req)
    world.check()
    world.cache.release_session("s")
    world.check_empty()


def test_closed_while_a_turn_waits(world: World) -> None:
    tokens = first_turn(world)
    second = world.match(tokens + MORE)
    world.cache.release_session("s")
    world.check_empty()
    assert second.req_pool_idx is None and second.kv_committed_len == 0


def test_closed_while_a_turn_runs(world: World) -> None:
    """What the session kept is the turn's then, which leaves it to others with its prefix."""
    tokens = first_turn(world)
    second = world.match(tokens + MORE)
    world.run(second, ANSWER)
    second.session = None
    world.cache.release_session("s")
    world.check(second)
    world.finish(second)
    world.check_empty()
    world.session = None
    known = world.match(tokens + MORE + ANSWER).prefix_indices
    assert len(known) >= len(tokens + MORE) - len(tokens + MORE) % world.page_size


def test_a_prompt_that_was_cut_runs_again(world: World) -> None:
    tokens = first_turn(world)
    second = world.match(tokens[:-3])
    assert len(second.prefix_indices) <= len(PROMPT)
    world.run(second, ANSWER)
    world.finish(second)
    world.check()
    world.cache.release_session("s")
    world.check_empty()
