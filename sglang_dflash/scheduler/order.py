"""Whether a result is looked at before what comes next is chosen and launched, or after.

A scheduler that overlaps launches first, so that the device computes while the host works. But then everybody is seen a
step of the host later: an answer of n rounds takes n + 2 steps, where it would take n + 1. Looking first makes each of
them longer by what the host waits for the device. So that is better where it waits less in n + 1 steps than one of them
takes, as with a very small model; and on a CPU, where the host computes the rounds itself.
"""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang_dflash.errors import DFlashError

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler

    from sglang_dflash.scheduler.pace import Pace

# For tests and measurements: one order always, or both at random, the same on all ranks.
ORDER = "SGLANG_DFLASH_ORDER"
AHEAD, FIRST, RANDOM = "ahead", "first", "random"

_KEPT = 64  # answers whose rounds count
# The part of a step behind a round's first launch: the others, and looking for requests. Meanwhile the device computes.
_BEHIND = 0.25


class Order:
    """What is better at present. All ranks see the same results and times, so they have the same order."""

    def __init__(self, device: str, pace: Pace):
        """
        Args:
            device: the server's, as in `--device`.
            pace: of the host.

        Raises:
            DFlashError: `SGLANG_DFLASH_ORDER` names no order.
        """
        self._pace, self._named = pace, _named(device)
        self._rounds: deque[int] = deque(maxlen=_KEPT)
        self._takes: float | None = None
        self._prompts = False

    def launched(self, takes: float | None, prompts: bool = False) -> None:
        """Something is launched.

        Args:
            takes: milliseconds of it on the device; None if nobody knows.
            prompts: whether it is a round with prompts.
        """
        self._takes, self._prompts = takes, prompts

    def ended(self, rounds: int) -> None:
        """A request has ended, after so many rounds."""
        self._rounds.append(rounds)

    def looks_first(self) -> bool:
        """Whether the result of what was launched last is looked at before anything is chosen."""
        if self._named is not None:
            return self._named()
        if self._takes is None or not self._rounds:
            return False
        host, steps = self._pace.of(self._prompts), 1 + sum(self._rounds) / len(self._rounds)
        return steps * max(0.0, self._takes - _BEHIND * host) < host


def _named(device: str) -> Callable[[], bool] | None:
    """What says it where nothing is to be found out."""
    name = os.environ.get(ORDER) or (FIRST if device == "cpu" else None)
    if name == RANDOM:
        draws = random.Random(0)
        return lambda: draws.random() < 0.5
    if name not in (None, AHEAD, FIRST):
        raise DFlashError(
            f"{ORDER} is {name!r}: set it to {AHEAD}, {FIRST} or {RANDOM}, or not at all."
        )
    return None if name is None else lambda: name == FIRST


def choose_in_order(scheduler: Scheduler) -> None:
    """From now on, of a scheduler that overlaps."""
    if not scheduler.enable_overlap:
        return
    choose, worker = scheduler.get_next_batch_to_run, scheduler.draft_worker

    def choose_next() -> ScheduleBatch | None:
        looks = bool(scheduler.result_queue) and worker.order.looks_first()
        if looks:
            _look(scheduler)
        chosen = choose()
        if looks:
            # The loop would take the result of what it launches now for the one before.
            scheduler.last_batch = None
        worker.pace.in_a_row = looks and chosen is not None
        return chosen

    scheduler.get_next_batch_to_run = choose_next


def _look(scheduler: Scheduler) -> None:
    """At all that is in flight."""
    while scheduler.result_queue:
        scheduler.process_batch_result(*scheduler.result_queue.popleft())
    for batch in (scheduler.running_batch, scheduler.last_batch):
        if batch is not None and batch.spec_info is not None:
            batch.spec_info.in_flight = 0
