"""How long the host takes for a step of a scheduler that overlaps.

While the device runs a round, the host looks at the result of the one before, chooses what comes next and launches it.
Where that takes longer than the device's share, a step takes as long as the host does, and rows that the device runs
meanwhile are free: `scheduler/plan.py` has to know.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from sglang.srt.distributed import get_tp_group

from sglang_dflash.device_waits import WAITS

_KEPT = 32  # steps that count
_OUTLIER = 2.0  # medians that a step counts at most: many prompts at once, collections of garbage, a slow log
_FURTHER = 0.25  # of a step that a further round in it takes, until it was measured
# Rounds after which all ranks take what the first one has measured, so that all plan alike; a rank alone is sooner.
_SHARED_EVERY, _TAKEN_EVERY = 32, 8


class Group(Protocol):
    """Ranks that plan alike, as SGLang has them."""

    world_size: int

    def broadcast_object(self, obj: object, src: int) -> object: ...


class Pace:
    """Milliseconds of the host for the last steps, what it waits for the device aside.

    Attributes:
        alone, with_prompts: [steps] each, of steps without and with prompts in their round, what further rounds in them
            take aside. The same on all ranks.
        further: [steps], of each further round of those that had any. The same on all ranks.
        in_a_row: whether a round that is launched with nothing in flight follows the last one all the same, because the
            host has looked at that one's result first.
    """

    def __init__(self, group: Group | None = None):
        """
        Args:
            group: the ranks that plan alike; None for SGLang's.
        """
        self.alone = self.with_prompts = self.further = np.zeros(0)
        self.in_a_row = False
        self._group = group or get_tp_group()
        self._measured: list[deque[float]] = [deque(maxlen=_KEPT) for _ in range(3)]
        self._launched = self._pending = 0
        # When the last round was launched, what had been waited until then, and whether prompts were in it.
        self._last: tuple[float, float, bool] | None = None
        self._aside = 0.0  # seconds of further rounds since then

    def launch(self, prompts: bool | None) -> None:
        """A round is about to be launched.

        Args:
            prompts: whether prompts run in it; None if they run beside it in a pass of their own, whose time is not
                the host's.
        """
        now, waited = time.perf_counter(), WAITS.seconds
        # Else the scheduler did something else since, or nothing.
        if (self._pending or self.in_a_row) and self._last is not None:
            begin, before, had_prompts = self._last
            self._note(1e3 * (now - begin - (waited - before) - self._aside), had_prompts)
        self._last = None if prompts is None else (now, waited, prompts)
        self._aside = 0.0
        self._pending += 1
        self._launched += 1
        if self._group.world_size == 1:
            if self._launched % _TAKEN_EVERY == 0:
                self._take(self._measured)
        elif self._launched % _SHARED_EVERY == 0:
            self._take(self._group.broadcast_object(self._measured, src=0))

    def landed(self) -> None:
        """The host has looked at the result of what was launched together."""
        self._pending -= 1

    def more(self, seconds: float) -> None:
        """So long the host has just been at work for further rounds of a step."""
        self._aside += seconds

    def took_further(self, seconds: float) -> None:
        """The host needed so long for one further round, from its launch to its tokens."""
        self._measured[2].append(1e3 * seconds)

    def of(self, prompts: bool) -> float:
        """Milliseconds of steps with prompts or without, in the mean; 0 until one was measured."""
        steps = self.with_prompts if prompts else self.alone
        return float(steps.mean()) if len(steps) else 0.0

    def of_several(self, rounds: int, prompts: bool) -> float:
        """Milliseconds of a step of so many rounds, in the mean; 0 until one was measured."""
        one = self.of(prompts)
        return one + (rounds - 1) * self._further(one)

    def _further(self, one: float) -> float:
        """Milliseconds of each further round in a step, one round of which takes so long."""
        return float(self.further.mean()) if len(self.further) else _FURTHER * one

    def of_each(self, rounds: int) -> np.ndarray:
        """Milliseconds of the host for each round in steps of so many without prompts: [steps] float64, as measured."""
        one = self.of(False)
        saved = (one - self._further(one)) * (rounds - 1) / rounds
        return np.maximum(self.alone - max(0.0, saved), 0.0)

    def of_steps(self, device: np.ndarray, prompts: bool, rounds: int = 1) -> np.ndarray:
        """Milliseconds that rounds take in the mean, by the device's of them: [n] float64 → [n] float64.

        Some steps take the host longer than others. A device that takes as long as the host does in the mean is
        waited for in about half of them, so its time is not free.

        Args:
            rounds: of a step; one with prompts has one.
        """
        steps = self.with_prompts if prompts else self.of_each(rounds)
        return np.maximum(device[:, None], steps).mean(axis=1) if len(steps) else device

    def _take(self, measured: Sequence[Sequence[float]]) -> None:
        self.alone, self.with_prompts, self.further = map(_usual, measured)

    def _note(self, took: float, prompts: bool) -> None:
        self._measured[prompts].append(took)


def _usual(steps: Sequence[float]) -> np.ndarray:
    """Times without what is rare."""
    times = np.sort(np.array(steps, dtype=np.float64))
    return np.minimum(times, _OUTLIER * times[len(times) // 2]) if len(times) else times
