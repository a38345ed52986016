"""A prefix cache that is full gives up much at a time.

The release looks at all leaves of the cache whenever slots are wanted, to find those that nobody has read for longest,
and gives up as few as are wanted. On a server that has run for a while each step wants some: with four thousand
prefixes in the cache the scheduler spends a millisecond or more of each step on looking.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.base_prefix_cache import EvictParams, EvictResult
from sglang.srt.mem_cache.radix_cache import RadixCache

if TYPE_CHECKING:
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache

# Of the pool's slots, what an eviction gives up beyond what is wanted.
SHARE = 1 / 64


def evict_much_at_once(cache: BasePrefixCache) -> None:
    """From now on, where evicting costs as much for few slots as for many; other caches know their oldest."""
    if not isinstance(getattr(cache, "inner", cache), RadixCache):
        return
    evict, more = cache.evict, int(cache.token_to_kv_pool_allocator.size * SHARE)

    def evict_more(params: EvictParams) -> EvictResult:
        return evict(replace(params, num_tokens=params.num_tokens + more))

    cache.evict = evict_more
