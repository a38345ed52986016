"""How many rounds a step has, and whether its results are looked at before what comes next is chosen, or after.

A scheduler that overlaps launches first, so that the device computes while the host works. But then everybody is seen a
step of the host later: an answer of n rounds takes n + 2 steps, where it would take n + 1. Looking first makes each of
them longer by what the host waits for the device. So that is better where it waits less in n + 1 steps than one of them
takes, as with a very small model; and on a CPU, where the host computes the rounds itself.

Where the device is through sooner than the host, it waits for the host in turn. All that a round needs of the one
before it is on the device, so several can be launched in one step, of which all but the first cost the host a part of a
step only. The device then has less time for each, and verifies fewer rows. An answer takes fewer steps, of which the
last has rounds in vain, and one or two more, which now are longer.
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

    from sglang_dflash.scheduler.choices import Promise
    from sglang_dflash.scheduler.pace import Pace

# For tests and measurements: one order always, or both at random; one number of rounds, or each at random. The same on
# all ranks.
ORDER, ROUNDS = "SGLANG_DFLASH_ORDER", "SGLANG_DFLASH_STEP_ROUNDS"
AHEAD, FIRST, RANDOM = "ahead", "first", "random"

MOST_ROUNDS = 4  # of a step
_LASTS = 8  # steps for which a number of rounds is chosen
_GAIN = 0.95  # of the time with one round, which several must not exceed: first tokens come later with them
_LONGEST = 40.0  # milliseconds of a step with several: nobody sees anything meanwhile
_KEPT = 64  # answers that count
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
            DFlashError: `SGLANG_DFLASH_ORDER` names no order, or `SGLANG_DFLASH_STEP_ROUNDS` no number of rounds.
        """
        self._pace, self._named, self._number = pace, _named(device), _numbered()
        self._ended: deque[tuple[int, int]] = deque(maxlen=_KEPT)
        self._takes: float | None = None
        self._prompts, self._launched = False, 1
        self._rounds, self._left = 1, 0  # of a step, and for how many steps more

    def launched(self, takes: float | None, prompts: bool = False, rounds: int = 1) -> None:
        """Something is launched.

        Args:
            takes: milliseconds of it on the device, of each round if it is rounds; None if nobody knows.
            prompts: whether it is a round with prompts.
            rounds: how many.
        """
        self._takes, self._prompts, self._launched = takes, prompts, rounds

    def ended(self, rounds: int, tokens: int) -> None:
        """A request has ended, after so many rounds and tokens."""
        self._ended.append((rounds, tokens))

    def looks_first(self) -> bool:
        """Whether the result of what was launched last is looked at before anything is chosen."""
        if self._named is not None:
            return self._named()
        if self._takes is None or not self._ended:
            return False
        rounds = self._launched
        host = self._pace.of_several(rounds, self._prompts)
        number = sum(rounds for rounds, _ in self._ended) / len(self._ended)
        steps = 1 + (number + (rounds - 1) / 2) / rounds
        return steps * _waits(host, rounds * self._takes) < host

    def rounds(self, promised: Callable[[int], Promise | None]) -> int:
        """How many the next step has if it has no prompts, and if nothing else is against it.

        Args:
            promised: what rounds come to in steps of so many.
        """
        if self._number is not None:
            return self._number()
        if not self._ended:
            return 1
        if not self._left:
            self._rounds, self._left = self._best(promised), _LASTS
        self._left -= 1
        return self._rounds

    def _best(self, promised: Callable[[int], Promise | None]) -> int:
        if (one := promised(1)) is None:
            return 1
        found = {1: _GAIN * self._answer(1, one)}
        for rounds in range(2, MOST_ROUNDS + 1):
            promise = promised(rounds)
            if rounds * promise.step <= _LONGEST:
                found[rounds] = self._answer(rounds, promise)
        return min(found, key=found.__getitem__)

    def _answer(self, rounds: int, promise: Promise) -> float:
        """Milliseconds of a usual answer in steps of so many rounds, in the better order."""
        tokens = sum(tokens for _, tokens in self._ended) / len(self._ended)
        number = tokens / promise.tokens + (rounds - 1) / 2
        steps = self._pace.of_each(rounds)
        host = float(steps.mean()) if len(steps) else 0.0
        first = (number + rounds) * (host + _waits(host, promise.device))
        return min(first, (number + 2 * rounds) * promise.step)


def _waits(host: float, device: float) -> float:
    """Milliseconds that the host waits in a step for results that it looks at first."""
    return max(0.0, device - _BEHIND * host)


def _named(device: str) -> Callable[[], bool] | None:
    """What says the order where nothing is to be found out."""
    name = os.environ.get(ORDER) or (FIRST if device == "cpu" else None)
    if name == RANDOM:
        draws = random.Random(0)
        return lambda: draws.random() < 0.5
    if name not in (None, AHEAD, FIRST):
        raise DFlashError(
            f"{ORDER} is {name!r}: set it to {AHEAD}, {FIRST} or {RANDOM}, or not at all."
        )
    return None if name is None else lambda: name == FIRST


def _numbered() -> Callable[[], int] | None:
    """The same of the number of rounds."""
    number = os.environ.get(ROUNDS) or None
    if number == RANDOM:
        draws = random.Random(0)
        return lambda: draws.randint(1, MOST_ROUNDS)
    if number not in (None, *map(str, range(1, MOST_ROUNDS + 1))):
        raise DFlashError(
            f"{ROUNDS} is {number!r}: set it to 1, 2, 3, {MOST_ROUNDS} or {RANDOM}, or not at all."
        )
    return None if number is None else lambda: int(number)


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
