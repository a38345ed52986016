"""Requests for which output has come go on a few at a time.

A round has output for all of its requests. If all of them went on at once, nobody else would until each had written its
part of an answer, and whoever asks or ends takes several turns of the event loop. So a turn is for a few, besides those
whose answer begins or ends. But how long a turn lasts depends on what else is done in it, so that a few in each may be
fewer than a round has output for: who has waited for long goes on, however many they are.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import ReqState

FEW = 2  # that go on in one turn of the event loop; a part of an answer takes some 0.1 ms
LONG = 0.01  # seconds; who has waited for so many needs no place. Parts that come meanwhile are sent as one


class Turns:
    """Who goes on when, in one event loop.

    Args:
        now: seconds, from any time on.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        # Who waits for a place, and since when; who came first is first.
        self._since: OrderedDict[Turn, float] = OrderedDict()
        self._free = FEW  # places in the present turn of the event loop
        self._next: asyncio.Handle | None = None

    def take(self, turn: Turn, loop: asyncio.AbstractEventLoop) -> None:
        """Someone wants to go on: at once, if there is a place or none is needed. Who waits already keeps its place."""
        if turn.urgent:
            turn.go_on()
            return
        self._since.setdefault(turn, self._now())
        if self._next is None:
            self._next = loop.call_soon(self._begin, loop)
        if self._free:
            self._let_go()

    def leave(self, turn: Turn) -> None:
        """Someone has gone on, or never will."""
        self._since.pop(turn, None)

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """A turn of the event loop."""
        self._free, self._next = FEW, None
        if self._since:
            self._next = loop.call_soon(self._begin, loop)
            self._let_go()

    def _let_go(self) -> None:
        long_ago = self._now() - LONG
        while self._since:
            turn, since = next(iter(self._since.items()))
            if not self._free and since > long_ago:
                break
            del self._since[turn]
            if turn.go_on() and self._free:
                self._free -= 1


class Turn:
    """Stands for the `asyncio.Event` of a request's output, for which only the request's own task waits.

    That there is output its state says, so that there is nothing to clear.
    """

    def __init__(self, turns: Turns, state: ReqState):
        # The state holds this; if this held the state, each request would wait for a garbage collection.
        self._turns, self._state = turns, weakref.proxy(state)
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
            self._turns.leave(self)
        self._begun = self._begun or bool(self._state.out_list)

    def go_on(self) -> bool:
        """The wait is over; whether there was one."""
        if waits := self._waits():
            self._waiter.set_result(None)
        return waits

    def _waits(self) -> bool:
        return self._waiter is not None and not self._waiter.done()
