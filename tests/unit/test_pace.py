"""When the next round is launched, on a clock of the test's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_dflash.scheduler.pace import _SPARE, WHEN_DUE, NoPace, Pace, pace_of


class Machine:
    """A host and a device that runs one round after the other."""

    def __init__(self, launch: float):
        self.time = self.free = self.idle = 0.0
        self.launch, self.waiting = launch, 0.0
        self.pace = Pace(self.event, lambda: self.time, self.sleep)

    def event(self) -> SimpleNamespace:
        made = SimpleNamespace()

        def record() -> None:
            made.at = max(self.free, self.time)

        made.record = record
        made.elapsed_time = lambda end: 1000 * (end.at - made.at)
        return made

    def sleep(self, seconds: float) -> None:
        self.waiting = seconds
        self.time += seconds

    def step(self, seconds: float, what: str = "round", ends: float = 0.0) -> float:
        """Launches a round that takes so long, then waits for the one before; how long it rested.

        Args:
            ends: when the one before is over.
        """
        self.waiting = 0.0
        self.pace.rest()
        self.time += self.launch
        self.pace.launching()
        if self.free:
            self.idle += max(0.0, self.time - self.free)
        self.free = max(self.free, self.time) + seconds
        self.pace.launched(what)
        if ends:
            self.time = max(self.time, ends)
            self.pace.landed()
        return self.waiting

    def run(self, lengths: list[float]) -> list[float]:
        """Rounds of these lengths one after the other; how long each launch rested before."""
        rested = [self.step(lengths[0])]
        for length in lengths[1:]:
            rested.append(self.step(length, ends=self.free))
        return rested


def test_rests_until_a_launch_is_due() -> None:
    machine = Machine(launch=0.001)
    rested = machine.run([0.007] * 20)
    assert rested[:2] == [0.0, 0.0]  # nothing was timed yet
    assert rested[3:] == pytest.approx([0.007 - 0.001 - _SPARE] * 17)
    assert machine.idle == 0.0


def test_launches_that_take_longer_than_rounds() -> None:
    machine = Machine(launch=0.009)
    assert machine.run([0.007] * 20) == [0.0] * 20


def test_a_slow_launch_is_counted_with() -> None:
    """One that came too late makes the next ones earlier, not later."""
    machine = Machine(launch=0.001)
    machine.run([0.007] * 20)
    machine.launch = 0.003
    late = [machine.step(0.007, ends=machine.free) for _ in range(4)]
    assert 0 < machine.idle < 0.005
    idle, early = machine.idle, [machine.step(0.007, ends=machine.free) for _ in range(20)]
    assert machine.idle == idle and late[0] > early[0] == pytest.approx(0.007 - 0.003 - _SPARE)


def test_longer_rounds_are_believed_slowly_and_shorter_ones_at_once() -> None:
    machine = Machine(launch=0.001)
    machine.run([0.007] * 10)
    machine.step(0.020, ends=machine.free)  # one that something held up
    machine.step(0.007, ends=machine.free)
    held_up = machine.step(0.007, ends=machine.free)
    assert 0.0056 < held_up < 0.0072
    machine.step(0.004, ends=machine.free)
    machine.step(0.004, ends=machine.free)
    assert machine.step(0.004, ends=machine.free) == pytest.approx(0.004 - 0.001 - _SPARE)


def test_what_was_not_timed_is_not_waited_for() -> None:
    machine = Machine(launch=0.001)
    machine.run([0.007] * 10)
    machine.step(0.007, what="other", ends=machine.free)
    assert machine.step(0.007, ends=machine.free) == 0.0


def test_who_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, cpu = SimpleNamespace(device="cuda"), SimpleNamespace(device="cpu")
    monkeypatch.delenv(WHEN_DUE, raising=False)
    assert isinstance(pace_of(cuda, 0), NoPace)
    monkeypatch.setenv(WHEN_DUE, "1")
    assert isinstance(pace_of(cuda, 0), Pace)
    assert isinstance(pace_of(cuda, 1), NoPace) and isinstance(pace_of(cpu, 0), NoPace)
