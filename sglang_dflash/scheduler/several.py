"""Which steps may have several rounds, one launched right behind the other; `order.py` says where that is better.

The host sees the tokens of all of them at once. So nobody may be among their requests whose next round needs something
of the host: masks of a grammar, or what was asked to be told of rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from sglang_dflash.scheduler.reserve import slots_required
from sglang_dflash.two_pools import has_two

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

_PART = 1 / 4  # of the slots that are left


def may_be_several(reqs: Iterable[Req]) -> bool:
    """Whether rounds of these requests can be launched without a look at the one before."""
    return not any(
        req.grammar is not None
        or req.return_logprob
        or req.return_hidden_states
        or req.custom_logit_processor
        for req in reqs
    )


def with_slots(batch: ScheduleBatch, rounds: int, width: int) -> int:
    """Of so many rounds those for which there are slots; at least one, which has its own in any case.

    Those behind the first take a part of what is left only, prefixes that nobody uses included, so that nobody who
    waits does so because of them.

    Args:
        width: of blocks of rounds behind the first.
    """
    allocator, tree = batch.tree_cache.token_to_kv_pool_allocator, batch.tree_cache
    if has_two(allocator.get_kvcache()):  # that of sliding layers is small, as windows are
        return 1
    lookahead = batch.spec_info.in_flight + batch.spec_info.width
    one = slots_required(batch.reqs, tree.page_size, lookahead)
    left = allocator.available_size() + tree.evictable_size() - one
    while rounds > 1:
        several = slots_required(batch.reqs, tree.page_size, lookahead + (rounds - 1) * width)
        if several - one <= left * _PART:
            break
        rounds -= 1
    return rounds
