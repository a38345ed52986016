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


def may_be_several(reqs: Iterable[Req]) -> bool:
    """Whether rounds of these requests can be launched without a look at the one before."""
    return not any(
        req.grammar is not None
        or req.return_logprob
        or req.return_hidden_states
        or req.custom_logit_processor
        for req in reqs
    )


def with_slots(batch: ScheduleBatch, rounds: int) -> int:
    """Of so many rounds those for which there are slots, if nothing is taken from prefixes; at least one."""
    allocator = batch.tree_cache.token_to_kv_pool_allocator
    if has_two(allocator.get_kvcache()):  # that of sliding layers is small, as windows are
        return 1
    draft, page_size = batch.spec_info, batch.tree_cache.page_size
    free = allocator.available_size()
    while rounds > 1:
        lookahead = draft.in_flight + rounds * draft.width
        if slots_required(batch.reqs, page_size, lookahead) <= free:
            break
        rounds -= 1
    return rounds
