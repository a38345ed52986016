"""How far a comparison is, and about how long it will still take: on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from typing import TextIO

LINES_EVERY, TERMINAL_EVERY = 10.0, 0.5  # seconds


class Progress:
    """Phases of so many units (tokens that may be drawn), some planned and some that come up.

    Args:
        planned: units of the phases to come, by name.
    """

    def __init__(
        self,
        planned: Mapping[str, float] | None = None,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._planned = dict(planned or {})
        self._stream, self._clock = stream or sys.stderr, clock
        self._terminal = self._stream.isatty()
        self.every = TERMINAL_EVERY if self._terminal else LINES_EVERY
        self._shown = -float("inf")
        self._units = self._seconds = 0.0  # of phases that are over

    @contextmanager
    def phase(self, name: str, items: int, unit: float = 0.0) -> Iterator[Callable[[], None]]:
        """While a phase lasts; gives a function to be called after each item.

        Args:
            items: how many there are.
            unit: units of an item; 0 if its time says nothing about that of other phases.
        """
        self._planned.pop(name, None)
        self._name, self._items, self._unit, self._done = name, items, unit, 0
        self._began = self._clock()
        self.show(now=True)

        def done() -> None:
            self._done += 1
            self.show(now=self._done == 1)

        try:
            yield done
        finally:
            if self._terminal:
                print("\r\033[K", end="", file=self._stream, flush=True)
        if unit:
            self._units += items * unit
            self._seconds += self._clock() - self._began

    def show(self, now: bool = False) -> None:
        """Writes where things are, if the last time is a while ago, or now."""
        if not now and self._clock() - self._shown < self.every:
            return
        self._shown = self._clock()
        start, end = ("\r\033[K", "") if self._terminal else ("", "\n")
        print(f"{start}{self.line()}", end=end, file=self._stream, flush=True)

    def line(self) -> str:
        left = self.seconds_left()
        told = (
            "time left: known after the first" if left is None else f"about {duration(left)} left"
        )
        return f"{self._name}: {self._done} of {self._items}; {told}"

    def seconds_left(self) -> float | None:
        """Until the end of all phases that are planned; None while nothing was measured."""
        here = self._clock() - self._began
        units = self._units + self._done * self._unit
        pace = (self._seconds + here * bool(self._unit)) / units if units else None
        if self._done:
            left = here / self._done * (self._items - self._done)
        elif self._unit and pace is not None:
            left = pace * self._items * self._unit
        else:
            return None
        return left + (pace or 0.0) * sum(self._planned.values())


def duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def results(futures: list[Future], progress: Progress, name: str, unit: float) -> list:
    """Results in order; progress is shown while they come.

    Raises:
        Exception: the first that a future ends with.
    """
    waiting = set(futures)
    with progress.phase(name, len(futures), unit) as done:
        while waiting:
            ended, waiting = wait(waiting, progress.every, FIRST_COMPLETED)
            for future in ended:
                future.result()
                done()
            progress.show()
    return [future.result() for future in futures]
