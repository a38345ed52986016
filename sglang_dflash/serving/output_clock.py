"""One clock for all requests that wait for their output.

The release lets each wait end after some seconds, so that a request whose client has gone is noticed, and makes a task
and a timer for it: for each part of each answer. Here one timer wakes all for whom nothing has come.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from sglang_dflash.serving.turns import Turn, Turns

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import ReqState


class OutputClock:
    """
    Args:
        seconds: after which a wait is over at the latest.
        turns: who goes on when; by default of this clock alone.
    """

    def __init__(self, seconds: float, turns: Turns | None = None):
        self._seconds, self._turns = seconds, turns or Turns()
        self._waiting: dict[int, Turn] = {}
        self._due: asyncio.TimerHandle | None = None

    async def output_of(self, state: ReqState) -> None:
        """Waits until there is output of a request, for which nobody else waits, and it is its turn.

        Raises:
            TimeoutError: the clock struck first.
        """
        if not isinstance(state.event, Turn):
            state.event = Turn(self._turns, state)
        if state.out_list:
            return
        if self._due is None:
            self._due = asyncio.get_running_loop().call_later(self._seconds, self._strike)
        self._waiting[id(state)] = state.event
        try:
            await state.event.wait()
        finally:
            del self._waiting[id(state)]
        if not state.out_list:
            raise TimeoutError

    def _strike(self) -> None:
        """The next who waits starts the clock again."""
        self._due = None
        for turn in self._waiting.values():
            turn.go_on()
