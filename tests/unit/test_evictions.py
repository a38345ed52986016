"""Prefixes that a full cache gives up: the oldest, many at a time, none that is in use."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import evict_from_tree_cache
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

from sglang_dflash.scheduler.evictions import SHARE, evict_much_at_once
from sglang_dflash.scheduler.session_kv import SessionKV

SIZE, EACH = 6400, 10


class World:
    """A pool whose prefix cache is full of prompts that have nothing in common."""

    def __init__(self, wrapped: bool = False):
        self.slots = TokenToKVPoolAllocator(SIZE, torch.float32, "cpu", None, need_sort=False)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=self.slots,
            page_size=1,
        )
        radix = RadixCache(params)
        self.cache = SessionKV(radix) if wrapped else radix
        self.prompts = [[1000 * n + i for i in range(EACH)] for n in range(SIZE // EACH)]
        for prompt in self.prompts:
            self.answer(prompt)

    def answer(self, prompt: list[int]) -> None:
        """A request that ends; its K/V stay."""
        evict_from_tree_cache(self.cache, EACH)
        slots = self.slots.alloc(EACH)
        assert slots is not None
        self.cache.insert(InsertParams(key=RadixKey(prompt), value=slots))

    def known(self, prompt: list[int]) -> bool:
        found = self.cache.match_prefix(MatchPrefixParams(key=RadixKey(prompt)))
        return len(found.device_indices) == EACH


@pytest.mark.parametrize("wrapped", [False, True])
def test_rarely(wrapped: bool) -> None:
    """One eviction serves many requests, and takes a small share of the pool."""
    seen, evict = [], RadixCache.evict

    def counting(cache: RadixCache, params: EvictParams):
        seen.append(params.num_tokens)
        return evict(cache, params)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RadixCache, "evict", counting)
        world = World(wrapped)
        evict_much_at_once(world.cache)
        for n in range(100):
            world.answer([10**6 + 1000 * n + i for i in range(EACH)])
    assert seen == [EACH + SIZE * SHARE] * 10
    assert world.slots.available_size() == 10 * (EACH + SIZE * SHARE) - 100 * EACH


def test_the_oldest_and_none_in_use() -> None:
    world = World()
    evict_much_at_once(world.cache)
    first = world.prompts[0]
    found = world.cache.match_prefix(MatchPrefixParams(key=RadixKey(first)))
    world.cache.inc_lock_ref(found.last_device_node)
    for prompt in world.prompts[1:3]:
        assert world.known(prompt)  # read again
    world.answer([10**6 + i for i in range(EACH)])
    gone = [n for n, prompt in enumerate(world.prompts) if not world.known(prompt)]
    assert gone == [*range(3, 3 + 1 + int(SIZE * SHARE / EACH))]


def test_caches_that_know_their_oldest_are_left_alone() -> None:
    cache = SimpleNamespace(evict=print)
    evict_much_at_once(cache)
    assert cache.evict is print
