"""What a round can be, and what each of that takes.

Looked at in every step of the scheduler, and anew for each number of requests and of rows of prompts, so it is made of
arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from sglang_dflash.round.costs import Costs

# Why a round has the rows that it has.
WHOLE, RAGGED, NARROW, PLAIN, PROBE = "whole", "ragged", "narrow", "plain", "probe"

_ALL = 0  # as a total: all rows


class Load(NamedTuple):
    """What a round is over.

    Attributes:
        requests: how many.
        keys: of all of them together.
        prompt_rows: rows of prompts in the same pass.
        adapted: whether any request has a LoRA adapter.
        rounds: of its step.
    """

    requests: int
    keys: int = 0
    prompt_rows: int = 0
    adapted: bool = False
    rounds: int = 1


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


class Promise(NamedTuple):
    """What rounds are expected to come to.

    Attributes:
        tokens: of each request, from one.
        device: milliseconds of one on the device.
        step: the same of one round's part of a step, whoever takes longer, the device or the host.
    """

    tokens: float
    device: float
    step: float


@dataclass(frozen=True)
class Choices:
    """Rounds of so many requests beside so many rows of prompts: whole blocks first if there is room, plain last.

    Attributes:
        block: width of whole blocks.
        widths: of the blocks of each choice, [choices] int64.
        totals: rows that are verified, 0 for all, likewise.
        rows: the same, counted.
        times: milliseconds, contexts aside, [choices] float64.
    """

    block: int
    widths: np.ndarray
    totals: np.ndarray
    rows: np.ndarray
    times: np.ndarray

    def plan(self, index: int) -> Plan:
        width, total = int(self.widths[index]), int(self.totals[index])
        if width == 1:
            return Plan(1, reason=PLAIN)
        reason = NARROW if width < self.block else WHOLE if total == _ALL else RAGGED
        return Plan(width, None if total == _ALL else total, reason)

    def least(self, requests: int) -> int:
        """The one with drafts that verifies fewest rows, but some draft of each request if any does, and the fastest
        of such; plain if nothing is drafted."""
        drafts = self.widths > 1
        if not drafts.any():
            return len(self.widths) - 1
        few = drafts & (self.rows >= 2 * requests)
        left = np.flatnonzero(few if few.any() else drafts)
        return int(left[np.lexsort((self.times[left], self.rows[left]))[0]])


def choices_of(costs: Costs, block: int, requests: int, prompt_rows: int) -> Choices:
    """All that a round of so many requests can be.

    Args:
        block: width of whole blocks.
        prompt_rows: rows of prompts in the same pass; 0 where there are no passes for both.
    """
    if requests > costs.whole.sizes[-1]:
        # No graph holds them: they run kernel by kernel, with all rows.
        return _made(costs, block, requests, prompt_rows, [(block, np.array([_ALL]))])
    sizes = np.array(costs.ragged.sizes, dtype=np.int64)
    rooms = sizes - prompt_rows
    rooms = rooms[rooms > requests]
    whole = requests * block
    kinds: list[tuple[int, np.ndarray]] = []
    if not prompt_rows or whole + prompt_rows <= sizes[-1]:
        kinds.append((block, np.array([_ALL])))
    kinds.append((block, rooms[rooms < whole]))
    for width, stairs in costs.narrow.items():
        if requests >= stairs.sizes[0]:  # fewer are drafted whole in next to the same time
            kinds.append((width, np.unique(np.minimum(rooms, requests * width))))
    if not prompt_rows:
        kinds += [
            (width, np.array([_ALL]))
            for width, stairs in costs.uniform.items()
            if requests >= stairs.sizes[0]
        ]
    kinds.append((1, np.array([_ALL])))
    return _made(costs, block, requests, prompt_rows, kinds)


def _made(
    costs: Costs,
    block: int,
    requests: int,
    prompt_rows: int,
    kinds: list[tuple[int, np.ndarray]],
) -> Choices:
    lengths = [len(totals) for _, totals in kinds]
    widths = np.repeat(np.array([width for width, _ in kinds]), lengths)
    totals = np.concatenate([totals for _, totals in kinds])
    rows = np.where(totals == _ALL, requests * widths, totals)
    of_width = [
        draft_time(costs, width, requests) + costs.shared(width, requests) for width, _ in kinds
    ]
    times = np.repeat(np.array(of_width), lengths)
    if costs.ragged.sizes:
        passes = costs.passes(requests + (prompt_rows > 0))
        times += passes.of(rows + prompt_rows) + costs.head.of(rows)
    for index in np.flatnonzero(totals == _ALL).tolist():
        width = int(widths[index])
        if (time := time_of_all(costs, width, requests, prompt_rows)) is not None:
            times[index] = time
    return Choices(block, widths, totals, rows, times)


def time_of_all(costs: Costs, width: int, requests: int, prompt_rows: int) -> float | None:
    """Milliseconds of rounds that verify all rows, contexts aside; None if that is a pass over rows as any other."""
    if prompt_rows:
        return None
    if width in costs.uniform:
        return costs.uniform[width].at(requests)
    whole = costs.whole if width > 1 else costs.plain
    return draft_time(costs, width, requests) + whole.at(requests)


def draft_time(costs: Costs, width: int, requests: int) -> float:
    """Milliseconds of the drafter's pass."""
    return 0.0 if width == 1 else costs.narrow.get(width, costs.draft).at(requests)
