"""What stands between SGLang's scheduler under DFLASH and those whom it asks and is asked by."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_dflash.scheduler.arrivals import wait_for_requests
from sglang_dflash.scheduler.evictions import evict_much_at_once
from sglang_dflash.scheduler.futures import number_nothing
from sglang_dflash.scheduler.leaving import leave_at_once
from sglang_dflash.scheduler.operations import Operations
from sglang_dflash.scheduler.order import choose_in_order
from sglang_dflash.scheduler.parameters import hand_over_unawaited
from sglang_dflash.serving.first_tokens import send_ahead

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler


def connect(scheduler: Scheduler) -> None:
    """When the scheduler has its prefix cache, its queue and dispatcher of requests and its senders of outputs."""
    evict_much_at_once(scheduler.tree_cache)
    wait_for_requests(scheduler)
    leave_at_once(scheduler)
    choose_in_order(scheduler)
    number_nothing(scheduler)
    hand_over_unawaited()
    scheduler._request_dispatcher = Operations(scheduler, scheduler._request_dispatcher)
    send_ahead(scheduler)
