"""Requests that come while a round runs: they are waited for as long as the device does not wait."""

from __future__ import annotations

import random
from collections import deque
from types import SimpleNamespace

import pytest
import zmq

from sglang_dflash.device_waits import WAITS, Awaited
from sglang_dflash.scheduler import arrivals, flight
from sglang_dflash.scheduler.arrivals import Arrivals
from sglang_dflash.scheduler.flight import Flight


class World:
    """A device that runs rounds one after the other, a queue of requests, and the time, which both share."""

    def __init__(self) -> None:
        self.now, self.free, self.idle = 0.0, 0.0, 0.0
        self.ends: deque[float] = deque()
        self.coming: deque[float] = deque()
        self.flight = Flight()
        self.scheduler = SimpleNamespace(
            recv_from_tokenizer=self,
            running_batch=SimpleNamespace(reqs=[]),
            waiting_queue=[],
            max_running_requests=4,
        )
        self.queue = Arrivals(self.scheduler, self.flight)

    def perf_counter(self) -> float:
        return self.now

    def host(self, milliseconds: float) -> None:
        self.now += milliseconds / 1e3

    def launch(self, expected: float | None, takes: float) -> None:
        self.flight.launch(expected)
        self.idle += max(0.0, self.now - self.free)
        self.free = max(self.free, self.now) + takes / 1e3
        self.ends.append(self.free)

    def land(self) -> None:
        """The host looks at the first round's result."""
        end = self.ends.popleft()
        Awaited(SimpleNamespace(synchronize=lambda: self._until(end))).synchronize()
        self.flight.landed()

    def _until(self, time: float) -> None:
        self.now = max(self.now, time)

    def recv_pyobj(self, flags: int) -> float:
        """As ZeroMQ: a request that is there."""
        assert flags == zmq.NOBLOCK
        if self.coming and self.coming[0] <= self.now:
            return self.coming.popleft()
        raise zmq.Again

    def poll(self, milliseconds: int) -> int:
        end = self.now + milliseconds / 1e3
        comes = bool(self.coming) and self.coming[0] <= end
        self._until(self.coming[0] if comes else end)
        return int(comes)

    def receive(self) -> list[float]:
        """As the release's scheduler does at the begin of a turn."""
        found = []
        while True:
            try:
                found.append(self.queue.recv_pyobj(zmq.NOBLOCK))
            except zmq.ZMQError:
                return found


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    for module in (flight, arrivals):
        monkeypatch.setattr(module, "time", world)
    monkeypatch.setattr("sglang_dflash.device_waits.time", world)
    return world


def turns(world: World, times: int, takes: float, needs: float = 6.0, noise: float = 0.0) -> float:
    """Turns of a scheduler that overlaps; the seconds that the device was idle in them."""
    before = world.idle
    for _ in range(times):
        world.receive()
        world.host(needs)
        world.launch(takes, takes * random.uniform(1 - noise, 1 + noise))
        if len(world.ends) > 1:
            world.land()
            world.host(2.0)
    return world.idle - before


def test_who_asks_again_within_the_round_is_in_the_next(world: World) -> None:
    """A round of 40 ms of which the host needs 8: who comes 20 ms after the last result is there before the choice."""
    turns(world, 30, 40.0)
    waited, began = WAITS.seconds, world.now
    world.coming.extend([began + 0.015, began + 0.02])
    assert world.receive() == [began + 0.015, began + 0.02]
    assert 0.02 < world.now - began < 0.034  # choosing takes 6 ms, and each of them some
    assert WAITS.seconds - waited == pytest.approx(world.now - began)  # the host did nothing
    world.host(6.0)
    idle = world.idle
    world.launch(40.0, 40.0)
    assert world.idle == idle


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("takes", [12.0, 25.0, 60.0])
def test_the_device_does_not_wait(world: World, takes: float, noise: float) -> None:
    """Also where rounds take a third more or less than they should: trust is lost at once and comes back slowly."""
    random.seed(0)
    turns(world, 20, takes, noise=noise)
    begin = world.now
    idle = turns(world, 400, takes, noise=noise)
    assert idle < 0.01 * (world.now - begin)


def test_rounds_that_take_longer_than_the_table_says(world: World) -> None:
    """As on a slower device than that on which it was measured."""
    for _ in range(60):
        world.receive()
        world.host(6.0)
        world.launch(40.0, 60.0)
        if len(world.ends) > 1:
            world.land()
            world.host(2.0)
    assert world.flight.seconds_to_wait() == pytest.approx(0.9 * 0.06 - 0.006 - 0.002, rel=0.1)


def test_nobody_is_waited_for(world: World) -> None:
    """In short rounds, where others wait already or there is no room, where no end is known, and when idle."""
    assert world.flight.seconds_to_wait() == 0.0
    for takes in (5.0, None):
        for _ in range(10):
            began = world.now
            assert world.receive() == [] and world.now == began
            world.host(1.0)
            world.launch(takes, 5.0 if takes else 60.0)
            if len(world.ends) > 1:
                world.land()
    turns(world, 10, 60.0)
    began = world.now
    world.scheduler.waiting_queue.append(object())
    assert world.receive() == [] and world.now == began
    world.scheduler.waiting_queue.clear()
    runs = SimpleNamespace(finished=lambda: False)
    world.scheduler.running_batch.reqs = [runs] * 4
    assert world.receive() == [] and world.now == began
    world.scheduler.running_batch.reqs[0] = SimpleNamespace(finished=lambda: True)
    world.receive()
    assert world.now > began + 0.02
    while world.ends:
        world.land()
    began = world.now
    world.receive()
    assert world.now == began


def test_a_host_that_is_slower_than_it_was(world: World) -> None:
    """It needs longer to choose, suddenly: the device waits once or twice, then no more."""
    turns(world, 100, 40.0)
    turns(world, 6, 40.0, needs=15.0)
    assert turns(world, 100, 40.0, needs=15.0) < 0.01 * 100 * 0.04
