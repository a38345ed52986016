"""How many rows the next round verifies, and whether it drafts at all.

The host decides how many, without waiting: from what was expected of the last round whose result it has seen, and
from what rounds take. Who gets them the device decides, from the drafts themselves (`round/ragged.py`). All ranks see
the same results and the same times, so they decide alike.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from sglang_dflash.scheduler.choices import (
    NARROW,
    PLAIN,
    PROBE,
    Choices,
    Load,
    Plan,
    Promise,
    choices_of,
    draft_time,
    time_of_all,
)
from sglang_dflash.scheduler.fixed_plans import (
    RANDOM_ROWS,
    RandomRows,
    RandomWidths,
    WholeBlocks,
)

if TYPE_CHECKING:
    from sglang_dflash.round.costs import Costs
    from sglang_dflash.scheduler.pace import Pace

logger = logging.getLogger(__name__)

# Whole blocks are verified unless something else promises so much more.
_WORTH = 1.01
# Rounds without drafts after which one drafts, to see whether it pays again: at first, and at most.
_SOON, _LATE = 8, 64
# Where whole blocks are all that can be tried: at most, for each round without drafts that such a one lasts as long as.
_FOR_EACH = 33
# Blocks from which is concluded what the next ones are worth: one alone may be a bad one.
_ENOUGH = 64
# Rounds of narrower blocks after which one drafts wider ones, to see what is behind: at first, and at most.
_WIDEN, _RARELY = 16, 128
_NEW = 0.3  # what a round counts beside those before it, of how chances fall from draft to draft
_SECONDS = 60.0  # after which the log says it again that nothing is drafted


class BestRows(WholeBlocks):
    """As many rows as promise most tokens for their time."""

    def __init__(self, width: int, costs: Costs, pace: Pace | None = None):
        """
        Args:
            pace: of the host; None if a round takes what the device takes for it.
        """
        super().__init__(width)
        self._width, self._pace = width, pace
        self.take(costs)
        self._seen: deque[np.ndarray] = deque()  # chances of the last rounds
        self._requests = 0
        self._gains: _Gains | None = None  # of those rounds, once it is asked for
        # Mean chances at a position by those at the one before, as of the last round that drafted both.
        self._falls: np.ndarray | None = None
        self._narrowed, self._widen = 0, _WIDEN
        self._without, self._patience, self._said = 0, _SOON, -math.inf

    def take(self, costs: Costs) -> None:
        self._costs = costs
        self._choices: dict[tuple[int, int], Choices] = {}
        # What choices promise by what was seen last, by their identity.
        self._tokens: dict[int, np.ndarray] = {}

    def note(self, chances: np.ndarray) -> None:
        self._seen.append(self._widened(chances))
        requests = sum(map(len, self._seen))
        while requests - len(self._seen[0]) >= _ENOUGH:
            requests -= len(self._seen.popleft())
        self._requests, self._gains = requests, None
        self._tokens.clear()

    def _widened(self, chances: np.ndarray) -> np.ndarray:
        """Chances of whole blocks, where narrower ones were drafted: behind these they fall as they last did."""
        drafts, means = chances.shape[1], chances.sum(axis=0) / len(chances)
        falls = means[1:] / np.maximum(means[:-1], 1e-9)
        if self._falls is None:
            self._falls = np.zeros(self._width - 2)
            self._falls[: drafts - 1] = falls
        known = self._falls[: drafts - 1]
        known += _NEW * (falls - known)
        behind = chances[:, -1:] * self._falls[drafts - 1 :].cumprod()
        return np.concatenate([chances, behind], axis=1)

    def _gains_of(self) -> _Gains:
        """Of the blocks of the last rounds."""
        if self._gains is None:
            seen = self._seen[0] if len(self._seen) == 1 else np.concatenate(self._seen)
            widths = self._width, *self._costs.narrow, *self._costs.uniform
            self._gains = _Gains.of(seen, dict.fromkeys(widths))
        return self._gains

    def plan(self, load: Load) -> Plan:
        choices = self._choices_of(load)
        if not self._requests:
            return choices.plan(0)
        worth, tokens = self._worth(choices, load)
        best = int(worth.argmax())
        gains = worth[best] - worth[0] > (_WORTH - 1) * tokens[0]
        pays = gains or choices.plan(0).total is not None
        return choices.plan(best if pays else 0)

    def promise(self, load: Load) -> Promise | None:
        if not self._requests:
            return None
        choices = self._choices_of(load)
        tokens, times = self._promised(choices, load)
        best = int((tokens / times).argmax())
        device = choices.times[best] + self._of_requests(load)
        return Promise(tokens[best] / load.requests, device, times[best])

    def milliseconds(self, plan: Plan, load: Load) -> float | None:
        return self._time(plan, load) + self._of_requests(load)

    def _of_requests(self, load: Load) -> float:
        """Milliseconds that a round takes for its requests' contexts and adapters, whatever it drafts and verifies."""
        return self._costs.context * load.keys + self._costs.adapters * load.adapted

    def _worth(self, choices: Choices, load: Load) -> tuple[np.ndarray, np.ndarray]:
        """What each choice promises beyond what its time is worth, and its tokens."""
        tokens, times = self._promised(choices, load)
        # Time with prompts is not theirs alone: it costs what the requests' own rounds would make of it.
        usual = (tokens, times)
        if load.prompt_rows:
            alone = load._replace(prompt_rows=0)
            usual = self._promised(self._choices_of(alone), alone)
        return tokens - (usual[0] / usual[1]).max() * times, tokens

    def _promised(self, choices: Choices, load: Load) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and milliseconds of each choice; no step takes less than the host does for it."""
        requests, times = load.requests, choices.times + self._of_requests(load)
        if (tokens := self._tokens.get(id(choices))) is None:
            scale = requests / self._requests
            drafts = (choices.rows - requests) / scale
            tokens = requests + scale * self._gains_of().at(choices.widths, drafts)
            self._tokens[id(choices)] = tokens
        if self._pace is None:
            return tokens, times
        return tokens, self._pace.of_steps(times, load.prompt_rows > 0, load.rounds)

    def _wider(self, plan: Plan, load: Load) -> Plan:
        """The best of those whose blocks are the next wider ones, if there is room for any."""
        choices = self._choices_of(load)
        worth, _ = self._worth(choices, load)
        wider = choices.widths[choices.widths > plan.width]
        if not len(wider):
            return plan
        best = np.where(choices.widths == wider.min(), worth, -np.inf).argmax()
        return choices.plan(int(best))

    def next(self, load: Load) -> Plan:
        plan = self.plan(load)
        if plan.reason != PLAIN:
            self._without, self._patience = 0, _SOON
            if plan.reason != NARROW:
                self._narrowed, self._widen = 0, _WIDEN
                return plan
            self._narrowed += 1
            if self._narrowed < self._widen:
                return plan
            self._narrowed, self._widen = 0, min(2 * self._widen, _RARELY)
            return self._wider(plan, load)
        self._say(load.requests)
        self._without += 1
        if self._without < self._patience:
            return plan
        self._seen.clear()  # what this one finds counts, not what was before
        choices = self._choices_of(load)
        least = choices.least(load.requests)
        longer = choices.times[least] / choices.times[-1]
        late = _LATE if self._costs.ragged.sizes else max(_LATE, math.ceil(_FOR_EACH * longer))
        self._without, self._patience = 0, min(2 * self._patience, late)
        return replace(choices.plan(least), reason=PROBE)

    def _say(self, requests: int) -> None:
        now = time.monotonic()
        if now - self._said >= _SECONDS:
            logger.info(
                "DFLASH decodes plainly: at %d requests, drafts do not pay at present.", requests
            )
            self._said = now

    def _choices_of(self, load: Load) -> Choices:
        """All that a round can be, whole blocks first if they fit beside the prompts."""
        # Where there are no passes for both, prompts run by themselves.
        at = load.requests, load.prompt_rows if self._costs.ragged.sizes else 0
        if at not in self._choices:
            if len(self._choices) > 10_000:
                self._choices.clear()
                self._tokens.clear()
            self._choices[at] = choices_of(self._costs, self._width, *at)
        return self._choices[at]

    def _time(self, plan: Plan, load: Load) -> float:
        """Milliseconds of a round, contexts and adapters aside."""
        if plan.total is None:
            time = time_of_all(self._costs, plan.width, load.requests, load.prompt_rows)
            if time is not None:
                return time
        passes = self._costs.passes(load.requests + (load.prompt_rows > 0))
        rows = plan.rows(load.requests) + load.prompt_rows
        return passes.at(rows) + self._beside_pass(plan, load.requests)

    def besides(self, plan: Plan, load: Load) -> float:
        """Of one that is a pass over rows."""
        return self._beside_pass(plan, load.requests) + self._costs.adapters * load.adapted

    def _beside_pass(self, plan: Plan, requests: int) -> float:
        alone = draft_time(self._costs, plan.width, requests)
        alone += self._costs.head.at(plan.rows(requests))
        return alone + self._costs.shared(plan.width, requests)


@dataclass(frozen=True)
class _Gains:
    """Tokens that the 0, 1, 2 … likeliest drafts of blocks were worth, by the blocks' width.

    Attributes:
        values: of all widths, one behind the other.
        begins: where those of a width begin, by the width; of width 1 there are none.
        drafts: how many there are of each width, by the width.
    """

    values: np.ndarray
    begins: np.ndarray
    drafts: np.ndarray

    @classmethod
    def of(cls, chances: np.ndarray, widths: Collection[int]) -> _Gains:
        """
        Args:
            chances: [blocks, drafts] of whole blocks.
            widths: each once.
        """
        begins = np.zeros(max(widths) + 1, dtype=np.int64)
        drafts = np.zeros_like(begins)
        falling, parts, at = -chances, [np.zeros(2)], 2
        for width in widths:
            best = np.sort(falling[:, : width - 1], axis=None).cumsum(dtype=np.float64)
            parts += [np.zeros(1), best, best[-1:]]  # more drafts than all are worth no more
            begins[width], drafts[width] = at, len(best)
            at += len(best) + 2
        return cls(-np.concatenate(parts), begins, drafts)

    def at(self, widths: np.ndarray, drafts: np.ndarray) -> np.ndarray:
        """What so many of all drafts were worth, in blocks of these widths, if they are the likeliest: [n] each."""
        drafts = np.minimum(drafts, self.drafts[widths])
        whole = drafts.astype(np.int64)
        at = self.begins[widths] + whole
        below = self.values[at]
        return below + (drafts - whole) * (self.values[at + 1] - below)


def planner(width: int, widths: list[int], costs: Costs | None, pace: Pace) -> WholeBlocks:
    """What plans a worker's rounds.

    Args:
        width: of the drafter's block.
        widths: that tests want rounds to have.
        costs: what rounds take; None where all rows are verified.
        pace: of the host.
    """
    if len(widths) > 1:
        return RandomWidths(widths)
    if costs is None:
        return WholeBlocks(widths[0])
    if os.environ.get(RANDOM_ROWS):
        return RandomRows(width, costs)
    return BestRows(width, costs, pace)
