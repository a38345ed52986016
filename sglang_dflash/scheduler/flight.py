"""When the round that is in flight will end, as far as the host can know.

It began when the one before it ended, which the host sees if it has to wait for that one's result, and takes what such
rounds take by the table of costs, corrected by how long the last ones took.
"""

from __future__ import annotations

import time
from collections import deque

from sglang_dflash.device_waits import WAITS

_SEEN = 1e-4  # seconds: who waits as long sees when the device gets there
_NEW = 0.1  # what a round counts beside those before it
# The same of what the host needs, where it is more than before and where it is less.
_LONGER, _SHORTER = 0.5, 0.02
_CAUTION = 0.1  # of a round, by which it may end sooner than expected
# What becomes of the trust in all this: where the device had to wait for a host that had waited for requests; where it
# had not; where nobody was waited for, so that they are again some time.
_LESS, _MORE, _ANEW = 0.5, 1.05, 1.005


class Flight:
    """Rounds between their launch and their result. Times are those of `time.perf_counter`, in seconds."""

    def __init__(self) -> None:
        # What rounds in flight take, the first one first; None where nobody knows.
        self._expected: deque[float | None] = deque()
        self._began: float | None = None  # when the first one did; None where that was not seen
        self._slowness, self._needed, self._trust = 1.0, 0.0, 1.0
        self._chosen_since: float | None = None
        self._waited = False

    def launch(self, expected: float | None) -> None:
        """A round is launched.

        Args:
            expected: milliseconds that it takes by the table of costs; None if that says nothing of it.
        """
        if self._chosen_since is not None:
            took = time.perf_counter() - self._chosen_since
            self._needed += (_LONGER if took > self._needed else _SHORTER) * (took - self._needed)
            self._chosen_since = None
        if not self._expected:
            self._began = None  # the device was idle, or ran something else
        self._expected.append(None if expected is None else expected / 1e3)

    def landed(self) -> None:
        """The host has the result of the first round in flight, for which it has just waited."""
        expected, began = self._expected.popleft(), self._began
        seen = expected is not None and WAITS.last > _SEEN
        self._began = WAITS.ended if seen else None
        if seen and began is not None:
            slowness = min((WAITS.ended - began) / expected, 2 * self._slowness)
            self._slowness += _NEW * (slowness - self._slowness)
        if seen or self._waited:
            factor = _LESS if not seen else _MORE if self._waited else _ANEW
            self._trust = min(1.0, self._trust * factor)
            self._waited = False

    def choose(self) -> None:
        """The host begins to choose and to prepare what is launched next."""
        self._chosen_since = time.perf_counter()

    def seconds_to_wait(self) -> float:
        """How long the host may wait before it must choose, so that the device does not wait for what comes then."""
        if self._began is None or not self._expected or not self._expected[0]:
            return 0.0
        takes = self._expected[0] * self._slowness * (1 - _CAUTION)
        left = self._began + takes - self._needed - time.perf_counter()
        return max(0.0, self._trust * left)

    def waits(self) -> None:
        """It does."""
        self._waited = True
