"""What stands between SGLang's scheduler under DFLASH and those who ask it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_dflash.scheduler.operations import Operations
from sglang_dflash.serving.first_tokens import send_ahead

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler


def connect(scheduler: Scheduler) -> None:
    """When the scheduler has its dispatcher of requests and its senders of outputs."""
    scheduler._request_dispatcher = Operations(scheduler, scheduler._request_dispatcher)
    send_ahead(scheduler)
