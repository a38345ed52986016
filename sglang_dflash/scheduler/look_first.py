"""On a CPU nothing overlaps: the host computes each round itself.

There a result is looked at before what comes next is chosen, as without overlap. Who begins would else wait for a round
more before its first token, and rounds would be in vain that need not be.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler

# Tests set it, which see on a CPU what overlap does on a GPU.
ON_CPU = "SGLANG_DFLASH_OVERLAP_ON_CPU"


def overlaps(device: str) -> bool:
    """Whether anything is gained by rounds that are launched ahead of results."""
    return device != "cpu" or bool(os.environ.get(ON_CPU))


def look_first(scheduler: Scheduler) -> None:
    """From now on, of a scheduler that overlaps where nothing does."""
    if not scheduler.enable_overlap or overlaps(scheduler.server_args.device):
        return
    choose = scheduler.get_next_batch_to_run

    def look_and_choose() -> ScheduleBatch | None:
        while scheduler.result_queue:
            scheduler.process_batch_result(*scheduler.result_queue.popleft())
        for batch in (scheduler.running_batch, scheduler.last_batch):
            if batch is not None and batch.spec_info is not None:
                batch.spec_info.in_flight = 0
        chosen = choose()
        # The loop would take the result of what it launches now for the one before.
        scheduler.last_batch = None
        return chosen

    scheduler.get_next_batch_to_run = look_and_choose
