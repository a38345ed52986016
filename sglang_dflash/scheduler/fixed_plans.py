"""Plans of rounds for which nothing is learned: all rows of whole blocks, and what tests ask for."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING

import numpy as np

from sglang_dflash.scheduler.choices import NARROW, PLAIN, RAGGED, WHOLE, Load, Plan, Promise

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

    from sglang_dflash.round.costs import Costs

# Tests set them: each round then has some number of rows, or blocks of a width of a list such as 4,9,16.
RANDOM_ROWS, RANDOM_WIDTHS = "SGLANG_DFLASH_RANDOM_ROWS", "SGLANG_DFLASH_RANDOM_WIDTHS"


def widths(args: ServerArgs) -> list[int]:
    """Widths that blocks may have, none above the block size; slots are reserved for the widest."""
    block_size = args.speculative_num_draft_tokens
    named = os.environ.get(RANDOM_WIDTHS)
    return [min(int(width), block_size) for width in named.split(",")] if named else [block_size]


class WholeBlocks:
    """Every round verifies all that it drafts."""

    def __init__(self, width: int):
        self._plan = Plan(width)

    def plan(self, load: Load) -> Plan:
        """What a round would be."""
        return self._plan

    def next(self, load: Load) -> Plan:
        """What the next round is."""
        return self.plan(load)

    def promise(self, load: Load) -> Promise | None:
        """What is to be had of rounds in such steps, without prompts; None if nobody knows."""
        return None

    def besides(self, plan: Plan, load: Load) -> float:
        """Milliseconds of a round beside those of the target's pass alone, as far as they are known."""
        return 0.0

    def milliseconds(self, plan: Plan, load: Load) -> float | None:
        """Of a round on the device, and of prompts in its pass, if that is known."""
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

    def next(self, load: Load) -> Plan:
        return Plan(self._random.choice(self._widths))


class RandomRows(WholeBlocks):
    """Rounds of random numbers of rows; all ranks draw the same."""

    def __init__(self, width: int, costs: Costs):
        """
        Args:
            costs: tell what there is to choose from.
        """
        super().__init__(width)
        self._narrow = {width: stairs.sizes[0] for width, stairs in costs.uniform.items()}
        self._width, self._random = width, random.Random(0)
        self._shares = bool(costs.ragged.sizes)
        self._reasons = (WHOLE, RAGGED, NARROW, PLAIN) if self._shares else (WHOLE, NARROW, PLAIN)

    def next(self, load: Load) -> Plan:
        requests, width = load.requests, self._width
        reason = self._random.choice(self._reasons)
        if reason == PLAIN:
            return Plan(1, reason=PLAIN)
        if reason == WHOLE:
            return self._plan
        if reason == NARROW:
            fitting = [w for w, least in self._narrow.items() if requests >= least]
            width = self._random.choice(fitting or [width])
            reason = NARROW if fitting else RAGGED
            if fitting and (not self._shares or self._random.random() < 0.5):
                return Plan(width, reason=NARROW)
        return Plan(width, self._random.randint(requests, requests * width), reason)
