"""How many rows the next round verifies, and whether it drafts at all.

The host decides how many, without waiting: from what was expected of the last round whose result it has seen, and
from what rounds take. Who gets them the device decides, from the drafts themselves (`round/ragged.py`). All ranks see
the same results and the same times, so they decide alike.
"""

from __future__ import annotations

import logging
import math
import os
import random
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

    from sglang_dflash.round.costs import Costs
    from sglang_dflash.scheduler.pace import Pace

logger = logging.getLogger(__name__)

# Why a round has the rows that it has.
WHOLE, RAGGED, NARROW, PLAIN, PROBE = "whole", "ragged", "narrow", "plain", "probe"

# Tests set them: each round then has some number of rows, or blocks of a width of a list such as 4,9,16.
RANDOM_ROWS, RANDOM_WIDTHS = "SGLANG_DFLASH_RANDOM_ROWS", "SGLANG_DFLASH_RANDOM_WIDTHS"

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


def widths(args: ServerArgs) -> list[int]:
    """Widths that blocks may have, none above the block size; slots are reserved for the widest."""
    block_size = args.speculative_num_draft_tokens
    named = os.environ.get(RANDOM_WIDTHS)
    return [min(int(width), block_size) for width in named.split(",")] if named else [block_size]


@dataclass(frozen=True)
class Plan:
    """
    Attributes:
        width: rows of the blocks that are drafted; 1 if nothing is.
        total: how many of all their rows are verified; None for all.
        reason: one of the above.
    """

    width: int
    total: int | None = None
    reason: str = WHOLE

    def rows(self, requests: int) -> int:
        """That a round of so many requests verifies."""
        return requests * self.width if self.total is None else self.total


class WholeBlocks:
    """Every round verifies all that it drafts."""

    def __init__(self, width: int):
        self._plan = Plan(width)

    def plan(
        self, requests: int, keys: int = 0, prompt_rows: int = 0, adapted: bool = False
    ) -> Plan:
        """What a round would be.

        Args:
            keys: of all its requests together.
            prompt_rows: rows of prompts in the same pass.
            adapted: whether any of its requests has a LoRA adapter.
        """
        return self._plan

    def next(
        self, requests: int, keys: int = 0, prompt_rows: int = 0, adapted: bool = False
    ) -> Plan:
        """What the next round is; see `plan`."""
        return self.plan(requests, keys, prompt_rows, adapted)

    def besides(self, plan: Plan, requests: int, adapted: bool = False) -> float:
        """Milliseconds of a round beside those of the target's pass alone, as far as they are known; see `plan`."""
        return 0.0

    def milliseconds(
        self, plan: Plan, requests: int, keys: int, prompt_rows: int, adapted: bool
    ) -> float | None:
        """Of a round on the device, and of prompts in its pass, if that is known; see `plan`."""
        return None

    def take(self, costs: Costs) -> None:
        """What rounds take, from now on."""

    def note(self, chances: np.ndarray) -> None:
        """What was expected of a round's drafts: [bs, drafts] float32, on the host; see `Estimate`."""


class RandomWidths(WholeBlocks):
    """Blocks of random widths; all ranks draw the same."""

    def __init__(self, widths: list[int]):
        super().__init__(max(widths))
        self._widths, self._random = widths, random.Random(0)

    def next(
        self, requests: int, keys: int = 0, prompt_rows: int = 0, adapted: bool = False
    ) -> Plan:
        return Plan(self._random.choice(self._widths))


class RandomRows(WholeBlocks):
    """Rounds of random numbers of rows; all ranks draw the same."""

    def __init__(self, width: int, costs: Costs):
        """
        Args:
            costs: tell what there is to choose from.
        """
        super().__init__(width)
        self._narrow = {width: stairs.sizes[0] for width, stairs in costs.narrow.items()}
        self._width, self._uniform, self._random = width, list(costs.uniform), random.Random(0)
        self._reasons = (
            (WHOLE, RAGGED, NARROW, PLAIN) if costs.ragged.sizes else (WHOLE, NARROW, PLAIN)
        )

    def next(
        self, requests: int, keys: int = 0, prompt_rows: int = 0, adapted: bool = False
    ) -> Plan:
        reason, width = self._random.choice(self._reasons), self._width
        if reason == PLAIN:
            return Plan(1, reason=PLAIN)
        if reason == WHOLE:
            return self._plan
        if self._uniform:
            return Plan(self._random.choice(self._uniform), reason=NARROW)
        if reason == NARROW:
            fitting = [w for w, least in self._narrow.items() if requests >= least]
            width = self._random.choice(fitting or [width])
            reason = NARROW if fitting else RAGGED
        return Plan(width, self._random.randint(requests, requests * width), reason)


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
        self._requests, self._gains = 0, {}
        # Mean chances at a position by those at the one before, as of the last round that drafted both.
        self._falls: np.ndarray | None = None
        self._narrowed, self._widen = 0, _WIDEN
        self._without, self._patience, self._said = 0, _SOON, -math.inf

    def take(self, costs: Costs) -> None:
        self._costs = costs
        self._choices: dict[tuple[int, int], _Choices] = {}

    def note(self, chances: np.ndarray) -> None:
        self._seen.append(self._widened(chances))
        requests = sum(map(len, self._seen))
        while requests - len(self._seen[0]) >= _ENOUGH:
            requests -= len(self._seen.popleft())
        self._requests = requests
        self._gains: dict[int, np.ndarray] = {}

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

    def _gains_of(self, width: int) -> np.ndarray:
        """Tokens that the 0, 1, 2 … likeliest drafts of all blocks of the last rounds were worth."""
        if width not in self._gains:
            best = np.concatenate([each[:, : width - 1] for each in self._seen])
            best = np.sort(best, axis=None)[::-1]
            self._gains[width] = np.concatenate([[0.0], best.cumsum()])
        return self._gains[width]

    def _promise(self, width: int, drafts: np.ndarray) -> np.ndarray:
        """Tokens that so many of all drafts of the last rounds' blocks were worth, if they are the likeliest."""
        gains = self._gains_of(width)
        return np.interp(drafts, np.arange(len(gains)), gains)

    def plan(
        self, requests: int, keys: int = 0, prompt_rows: int = 0, adapted: bool = False
    ) -> Plan:
        choices = self._choices_of(requests, prompt_rows)
        if not self._requests:
            return choices.plans[0]
        worth, tokens = self._worth(
            choices, requests, self._of_requests(keys, adapted), prompt_rows
        )
        best = int(worth.argmax())
        gains = worth[best] - worth[0] > (_WORTH - 1) * tokens[0]
        pays = gains or choices.plans[0].total is not None
        return choices.plans[best if pays else 0]

    def milliseconds(
        self, plan: Plan, requests: int, keys: int, prompt_rows: int, adapted: bool
    ) -> float | None:
        return self._time(plan, requests, prompt_rows) + self._of_requests(keys, adapted)

    def _of_requests(self, keys: int, adapted: bool) -> float:
        """Milliseconds that a round takes for its requests' contexts and adapters, whatever it drafts and verifies."""
        return self._costs.context * keys + self._costs.adapters * adapted

    def _worth(
        self, choices: _Choices, requests: int, more: float, prompt_rows: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """What each choice promises beyond what its time is worth, and its tokens.

        Args:
            more: milliseconds of each, as `_of_requests` gives them.
        """
        tokens, times = self._promised(choices, requests, more, prompt_rows > 0)
        # Time with prompts is not theirs alone: it costs what the requests' own rounds would make of it.
        usual = (tokens, times)
        if prompt_rows:
            usual = self._promised(self._choices_of(requests, 0), requests, more, False)
        return tokens - (usual[0] / usual[1]).max() * times, tokens

    def _promised(
        self, choices: _Choices, requests: int, more: float, prompts: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and milliseconds of each choice; none takes less than the host does for a step."""
        scale = requests / self._requests
        tokens = np.full(len(choices.plans), float(requests))
        for width, these, drafts in choices.drafting:
            tokens[these] += scale * self._promise(width, drafts / scale)
        host = 0.0 if self._pace is None else self._pace.of(prompts)
        return tokens, np.maximum(choices.times + more, host)

    def _wider(self, plan: Plan, requests: int, more: float, prompt_rows: int) -> Plan:
        """The best of those whose blocks are the next wider ones, if there is room for any."""
        choices = self._choices_of(requests, prompt_rows)
        worth, _ = self._worth(choices, requests, more, prompt_rows)
        wider = [width for width in choices.widths.tolist() if width > plan.width]
        if not wider:
            return plan
        best = np.where(choices.widths == min(wider), worth, -np.inf).argmax()
        return choices.plans[int(best)]

    def next(
        self, requests: int, keys: int = 0, prompt_rows: int = 0, adapted: bool = False
    ) -> Plan:
        plan = self.plan(requests, keys, prompt_rows, adapted)
        if plan.reason != PLAIN:
            self._without, self._patience = 0, _SOON
            if plan.reason != NARROW:
                self._narrowed, self._widen = 0, _WIDEN
                return plan
            self._narrowed += 1
            if self._narrowed < self._widen:
                return plan
            self._narrowed, self._widen = 0, min(2 * self._widen, _RARELY)
            return self._wider(plan, requests, self._of_requests(keys, adapted), prompt_rows)
        self._say(requests)
        self._without += 1
        if self._without < self._patience:
            return plan
        self._seen.clear()  # what this one finds counts, not what was before
        choices = self._choices_of(requests, prompt_rows)
        tries = [i for i, p in enumerate(choices.plans) if p.width > 1]
        few = [i for i in tries if choices.rows[i] >= 2 * requests] or tries
        plain = choices.plans.index(plan)
        least = min(few, key=lambda i: (choices.rows[i], choices.times[i]), default=plain)
        longer = choices.times[least] / choices.times[plain]
        late = _LATE if self._costs.ragged.sizes else max(_LATE, math.ceil(_FOR_EACH * longer))
        self._without, self._patience = 0, min(2 * self._patience, late)
        return Plan(choices.plans[least].width, choices.plans[least].total, PROBE)

    def _say(self, requests: int) -> None:
        now = time.monotonic()
        if now - self._said >= _SECONDS:
            logger.info(
                "DFLASH decodes plainly: at %d requests, drafts do not pay at present.", requests
            )
            self._said = now

    def _choices_of(self, requests: int, prompt_rows: int) -> _Choices:
        """All that a round can be, whole blocks first if they fit beside the prompts."""
        # Where there are no passes for both, prompts run by themselves.
        at = requests, prompt_rows if self._costs.ragged.sizes else 0
        if at not in self._choices:
            if len(self._choices) > 10_000:
                self._choices.clear()
            plans = self._plans(*at)
            widths = np.array([plan.width for plan in plans])
            rows = np.array([plan.rows(requests) for plan in plans])
            times = np.array([self._time(plan, *at) for plan in plans])
            drafting = [
                (width, these, rows[these] - requests)
                for width in sorted(set(widths.tolist()) - {1})
                for these in [np.flatnonzero(widths == width)]
            ]
            self._choices[at] = _Choices(plans, widths, rows, times, drafting)
        return self._choices[at]

    def _plans(self, requests: int, prompt_rows: int) -> list[Plan]:
        whole, sizes = requests * self._width, self._costs.ragged.sizes
        if requests > self._costs.whole.sizes[-1]:
            # No graph holds them: they run kernel by kernel, with all rows.
            return [self._plan]
        plans = []
        if not prompt_rows or whole + prompt_rows <= sizes[-1]:
            plans.append(self._plan)
        for size in sizes:
            if requests < size - prompt_rows < whole:
                plans.append(Plan(self._width, size - prompt_rows, RAGGED))
        for width, stairs in self._costs.narrow.items():
            if requests >= stairs.sizes[0]:  # fewer are drafted whole in next to the same time
                rooms = [size - prompt_rows for size in sizes if size - prompt_rows > requests]
                totals = dict.fromkeys(min(room, requests * width) for room in rooms)
                plans += [Plan(width, total, NARROW) for total in totals]
        plans += [Plan(width, reason=NARROW) for width in self._costs.uniform]
        plans.append(Plan(1, reason=PLAIN))
        return plans

    def _time(self, plan: Plan, requests: int, prompt_rows: int) -> float:
        """Milliseconds of a round, contexts aside."""
        costs, rows = self._costs, plan.rows(requests)
        if plan.total is None and plan.width in costs.uniform:
            return costs.uniform[plan.width].at(requests)
        if plan.total is None and not prompt_rows:
            whole = costs.whole if plan.width > 1 else costs.plain
            return self._draft_time(plan, requests) + whole.at(requests)
        return costs.ragged.at(rows + prompt_rows) + self.besides(plan, requests)

    def besides(self, plan: Plan, requests: int, adapted: bool = False) -> float:
        """Of one that is a pass over rows."""
        alone = self._draft_time(plan, requests) + self._costs.head.at(plan.rows(requests))
        return alone + self._costs.adapters * adapted

    def _draft_time(self, plan: Plan, requests: int) -> float:
        if plan.width == 1:
            return 0.0
        return self._costs.narrow.get(plan.width, self._costs.draft).at(requests)


class _Choices(NamedTuple):
    """What a round can be, how wide its blocks then are, how many rows it verifies, and its milliseconds.

    Attributes:
        drafting: by width above 1, which plans have such blocks, and how many drafts they verify.
    """

    plans: list[Plan]
    widths: np.ndarray
    rows: np.ndarray
    times: np.ndarray
    drafting: list[tuple[int, np.ndarray, np.ndarray]]


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
