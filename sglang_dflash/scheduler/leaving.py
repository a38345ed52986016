"""Requests that have ended make room for those that wait in the same step.

The release takes them out of the batch that decodes when it prepares that for its next round, which is after it has
chosen prompts. So where as many clients ask as requests may run, one that asks again at once waits for a round more, or
for two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler


def leave_at_once(scheduler: Scheduler) -> None:
    """From now on, unless others could get the rows of those that have ended while a round still reads them."""
    rows, requests = scheduler.req_to_token_pool.size, scheduler.max_running_requests
    if scheduler.enable_overlap and rows < 2 * requests:  # see `scheduler/rows.py`
        return
    choose = scheduler.get_new_batch_prefill

    def choose_with_room() -> ScheduleBatch | None:
        leave_out_ended(scheduler.running_batch)
        return choose()

    scheduler.get_new_batch_prefill = choose_with_room


def leave_out_ended(batch: ScheduleBatch) -> None:
    """Takes requests whose end is known out of the batch that decodes."""
    if any(req.finished() for req in batch.reqs):
        batch.filter_batch(v1_spec_info_filtered=True)
        batch.batch_is_full = False
