"""Requests that come while a round runs are in the next one.

The release chooses what is launched behind a round as soon as the result of the one before is seen. Of many requests
some end with each round; whoever asks again at once comes too late for that by some milliseconds, and waits for a whole
round more, though the device needs nothing new for as long. So the scheduler waits for requests until it must choose.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import zmq

from sglang_dflash.device_waits import WAITS

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

    from sglang_dflash.scheduler.flight import Flight

# Seconds that the host needs more for each request that has come; some 0.5 ms were measured.
_EACH = 1e-3
_LEAST = 5e-3  # that is waited at all: a short round gives nobody the time to ask again


class Arrivals:
    """Stands for the queue in which requests come."""

    def __init__(self, scheduler: Scheduler, flight: Flight):
        self._scheduler, self._flight = scheduler, flight
        self._queue = scheduler.recv_from_tokenizer
        self._came = 0  # since the scheduler looks for requests

    def recv_pyobj(self, flags: int) -> Any:
        """The next request.

        Args:
            flags: `zmq.NOBLOCK`, as the scheduler always has it.

        Raises:
            zmq.Again: there is none, and it is time to choose.
        """
        try:
            request = self._queue.recv_pyobj(flags)
        except zmq.Again:
            if not self._one_comes():
                self._came = 0
                self._flight.choose()
                raise
            request = self._queue.recv_pyobj(flags)
        self._came += 1
        return request

    def _one_comes(self) -> bool:
        """Waits for a request as long as that costs nothing."""
        seconds = self._flight.seconds_to_wait() - _EACH * self._came
        if seconds < _LEAST or not self._is_welcome():
            return False
        self._flight.waits()
        begin = time.perf_counter()
        comes = self._queue.poll(int(1e3 * seconds)) != 0
        WAITS.count(time.perf_counter() - begin)
        return comes

    def _is_welcome(self) -> bool:
        """Whether a request that comes would be launched: no others wait, and there is room."""
        scheduler = self._scheduler
        running = sum(not req.finished() for req in scheduler.running_batch.reqs)
        room = running + self._came < scheduler.max_running_requests
        return room and not scheduler.waiting_queue


def wait_for_requests(scheduler: Scheduler) -> None:
    """On the rank that takes requests of a scheduler that overlaps; others wait for it in any case."""
    if scheduler.recv_from_tokenizer is not None and scheduler.enable_overlap:
        scheduler.recv_from_tokenizer = Arrivals(scheduler, scheduler.draft_worker.flight)
