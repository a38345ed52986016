"""When the next round is launched: late enough for requests that arrive meanwhile, and before the GPU would wait.

A round that is launched while the one before it runs is decided then: a request that arrives a moment later is in the
one after it, a whole round late. So the scheduler rests until the GPU has just about as much left to do as a launch
takes, and only then looks who is there. How long rounds take is measured on the GPU, and launches on the host, so that
a launch that comes too late never makes the next one later.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

# Set, rounds are launched when they are due; else as soon as the result before them is there. Not shown to pay yet.
WHEN_DUE = "SGLANG_DFLASH_LAUNCH_WHEN_DUE"

_SPARE = 0.0004  # seconds by which a launch is over before it must be
_LATE = 16  # launches of which the longest but one is expected of the next
_RISE = 0.1  # of the way from what was expected of a round to a longer time that it took


@dataclass(frozen=True)
class _Launched:
    what: Hashable
    begin: torch.cuda.Event
    end: torch.cuda.Event
    at: float


class Pace:
    """Rests between rounds of a scheduler that overlaps."""

    def __init__(
        self,
        event: Callable[[], torch.cuda.Event],
        now: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ):
        """
        Args:
            event: makes an event of the device that times.
            now, sleep: a clock, in seconds.
        """
        self._event, self._now, self._sleep = event, now, sleep
        self._took: dict[Hashable, float] = {}  # seconds, by what was launched
        self._launches: deque[float] = deque(maxlen=_LATE)
        self._running: deque[_Launched] = deque()
        self._begin: torch.cuda.Event | None = None
        self._landed = self._woke = 0.0

    def launching(self) -> None:
        """Before a round's first kernel."""
        self._begin = self._event()
        self._begin.record()

    def launched(self, what: Hashable) -> None:
        """After its last.

        Args:
            what: rounds of one kind take as long as each other.
        """
        end = self._event()
        end.record()
        now = self._now()
        if self._landed < self._woke:  # else the launch waited for a result
            self._launches.append(now - self._woke)
        self._running.append(_Launched(what, self._begin, end, now))

    def landed(self) -> None:
        """The oldest result is on the host."""
        round, self._landed = self._running.popleft(), self._now()
        took = round.begin.elapsed_time(round.end) / 1000
        expected = self._took.get(round.what, took)
        self._took[round.what] = min(took, expected + _RISE * (took - expected))

    def rest(self) -> None:
        """Sleeps until the next round should be launched, if it is known when."""
        left = self._left()
        if left > 0:
            self._sleep(left)
        self._woke = self._now()

    @property
    def launch_seconds(self) -> float:
        """What a launch is expected to take, from looking for requests on; 0 before any was seen."""
        return sorted(self._launches)[-2:][0] if self._launches else 0.0

    def _left(self) -> float:
        if len(self._running) != 1 or not self._launches:
            return 0.0
        round = self._running[0]
        if round.what not in self._took:
            return 0.0
        begun = max(round.at, self._landed)
        return begun + self._took[round.what] - self.launch_seconds - _SPARE - self._now()


class NoPace:
    """Where rounds are launched as soon as they can be, or another rank rests for all."""

    launch_seconds = 0.0

    def launching(self) -> None: ...

    def launched(self, what: Hashable) -> None: ...

    def landed(self) -> None: ...

    def rest(self) -> None: ...


def pace_of(args: ServerArgs, tp_rank: int) -> Pace | NoPace:
    """Of one scheduler. The other ranks of a group wait for what the first one receives."""
    if os.environ.get(WHEN_DUE) and args.device == "cuda" and not tp_rank:
        return Pace(lambda: torch.cuda.Event(enable_timing=True))
    return NoPace()
