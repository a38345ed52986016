"""How long the host takes for a step: what it waits for the device, and what is no step, does not count."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest

from sglang_dflash.device_waits import WAITS, Awaited
from sglang_dflash.scheduler import pace as paces
from sglang_dflash.scheduler.pace import Pace

ALONE = SimpleNamespace(world_size=1)


class Clock:
    """Stands for the time, which passes only when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def passes(self, milliseconds: float) -> None:
        self.now += milliseconds / 1e3

    def event(self, milliseconds: float) -> Awaited:
        """Of a device that is not there for so long."""
        return Awaited(SimpleNamespace(synchronize=lambda: self.passes(milliseconds)))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(paces, "time", clock)
    monkeypatch.setattr("sglang_dflash.device_waits.time", clock)
    return clock


def steps(pace: Pace, clock: Clock, times: int, host: float, waits: float, prompts: bool) -> None:
    """Steps of a scheduler that overlaps, the last round of which stays in flight."""
    for _ in range(times):
        pace.launch(prompts)
        clock.passes(host)
        if pace._pending > 1:
            clock.event(waits).synchronize()
            pace.landed()


def test_waits_do_not_count(clock: Clock) -> None:
    before = WAITS.seconds
    pace = Pace(ALONE)
    steps(pace, clock, 50, 3.0, 8.0, False)
    assert pace.of(False) == pytest.approx(3.0) and pace.of(True) == 0.0
    assert WAITS.seconds - before == pytest.approx(49 * 8e-3)
    steps(pace, clock, 80, 7.0, 0.0, True)
    assert pace.of(False) == pytest.approx(3.0, rel=0.2) and pace.of(True) == pytest.approx(7.0)


def test_it_follows_and_forgives(clock: Clock) -> None:
    """A step that took very long counts as twice as long as usual."""
    pace = Pace(ALONE)
    steps(pace, clock, 50, 3.0, 8.0, False)
    steps(pace, clock, 1, 500.0, 8.0, False)
    steps(pace, clock, 1, 3.0, 8.0, False)
    assert 3.0 < pace.of(False) < 3.5
    steps(pace, clock, 100, 5.0, 0.0, False)
    assert pace.of(False) == pytest.approx(5.0, rel=0.01)


def test_a_first_step_that_took_very_long(clock: Clock) -> None:
    """As one does in which many prompts come at once."""
    pace = Pace(ALONE)
    steps(pace, clock, 1, 90.0, 8.0, True)
    steps(pace, clock, 9, 4.0, 8.0, True)
    assert 4.0 < pace.of(True) < 5.0


def test_what_is_no_step(clock: Clock) -> None:
    """An idle scheduler, and prompts that run in a pass of their own."""
    pace = Pace(ALONE)
    steps(pace, clock, 10, 3.0, 8.0, False)
    pace.landed()
    clock.passes(90.0)
    steps(pace, clock, 10, 3.0, 8.0, False)
    pace.launch(None)
    clock.passes(90.0)
    pace.landed()
    steps(pace, clock, 10, 3.0, 8.0, False)
    assert pace.of(False) == pytest.approx(3.0)


def test_a_device_that_is_as_slow_as_the_host(clock: Clock) -> None:
    """It is waited for where the host is fast, and waits where the host is slow."""
    pace = Pace(ALONE)
    device = np.array([2.0, 6.0, 9.0])
    assert pace.of_steps(device, False) == pytest.approx(device)
    for host in (4.0, 8.0) * 20:
        steps(pace, clock, 1, host, 0.0, False)
    assert pace.of_steps(device, False) == pytest.approx([6.0, 7.0, 9.0])
    assert pace.of_steps(device, True) == pytest.approx(device)


def test_ranks_take_the_time_of_the_first(clock: Clock) -> None:
    """At the same round, and nothing before it."""
    told = []

    def broadcast(measured: list[deque[float]], src: int) -> list[list[float]]:
        told.append(([list(steps) for steps in measured], src))
        return [[4.0, 5.0], [6.0], [1.0]]

    pace = Pace(SimpleNamespace(world_size=2, broadcast_object=broadcast))
    steps(pace, clock, 31, 3.0, 8.0, False)
    assert not told and pace.of(False) == 0.0
    steps(pace, clock, 1, 3.0, 8.0, False)
    [(measured, src)] = told
    assert measured == [pytest.approx([3.0] * 31), [], []] and src == 0
    assert (pace.of(False), pace.of(True)) == (4.5, 6.0)


def test_rounds_in_a_row(clock: Clock) -> None:
    """Where each result is looked at before the next round is launched, that one follows with nothing in flight."""
    pace = Pace(ALONE)
    for in_a_row in (False, True, True, False, False, False, False, True):
        pace.in_a_row = in_a_row
        pace.launch(False)
        clock.passes(3.0)
        clock.event(8.0).synchronize()
        pace.landed()
        if in_a_row:
            clock.passes(1.0)
    # Three of eight rounds followed another at once, after 3 ms, 4 and 3.
    assert pace.alone.tolist() == pytest.approx([3.0, 3.0, 4.0])


def test_further_rounds_of_a_step(clock: Clock) -> None:
    """What they take is none of what a step of one round takes; a quarter of that, until it was measured."""
    pace = Pace(ALONE)
    steps(pace, clock, 50, 4.0, 0.0, False)
    assert pace.of_several(1, False) == pytest.approx(4.0)
    assert pace.of_several(3, False) == pytest.approx(6.0)
    for _ in range(50):
        steps(pace, clock, 1, 4.0, 0.0, False)
        clock.passes(3.0)
        pace.more(3e-3)
        pace.took_further(1.5e-3)
    assert pace.of(False) == pytest.approx(4.0)
    assert pace.of_several(3, False) == pytest.approx(7.0)
    assert pace.of_each(1).mean() == pytest.approx(4.0)
    assert pace.of_each(3).mean() == pytest.approx(7.0 / 3)
    device = np.array([1.0, 2.5, 5.0])
    assert pace.of_steps(device, False, rounds=3) == pytest.approx([7 / 3, 2.5, 5.0])
