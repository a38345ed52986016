"""Requests for which output has come go on a few at a time.

A round has output for all of its requests. If all of them went on at once, nobody else would until each had written its
part of an answer, and whoever asks or ends takes several turns of the event loop. So a turn is for a few, and for those
first whose answer begins or ends.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import ReqState

FEW = 2  # that go on in one turn of the event loop; a part of an answer takes some 0.1 ms


class Turns:
    """Who goes on when, in one event loop."""

    def __init__(self) -> None:
        self._soon: deque[Turn] = deque()
        self._later: deque[Turn] = deque()
        self._free = FEW  # places in the present turn of the event loop
        self._next: asyncio.Handle | None = None

    def take(self, turn: Turn, loop: asyncio.AbstractEventLoop) -> None:
        """Someone wants to go on; at once, if there is a place."""
        (self._soon if turn.urgent else self._later).append(turn)
        if self._next is None:
            self._next = loop.call_soon(self._begin, loop)
        self._let_go()

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """A turn of the event loop."""
        self._free, self._next = FEW, None
        if self._soon or self._later:
            self._next = loop.call_soon(self._begin, loop)
            self._let_go()

    def _let_go(self) -> None:
        while self._free and (queue := self._soon or self._later):
            self._free -= queue.popleft().go_on()


class Turn:
    """Stands for the `asyncio.Event` of a request's output, for which only the request's own task waits.

    That there is output its state says, so that there is nothing to clear.
    """

    def __init__(self, turns: Turns, state: ReqState):
        self._turns, self._state = turns, state
        self._waiter: asyncio.Future[None] | None = None
        self._begun = False

    @property
    def urgent(self) -> bool:
        """Whether its answer begins or ends."""
        return self._state.finished or not self._begun

    def set(self) -> None:
        """Output has come."""
        if self._waits():
            self._turns.take(self, self._waiter.get_loop())

    def clear(self) -> None:
        pass

    async def wait(self) -> None:
        """Until there is output and a place, or the clock strikes."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
        self._begun = self._begun or bool(self._state.out_list)

    def go_on(self) -> bool:
        """The wait is over; whether there was one."""
        if waits := self._waits():
            self._waiter.set_result(None)
        return waits

    def _waits(self) -> bool:
        return self._waiter is not None and not self._waiter.done()
