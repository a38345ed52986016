"""Plans of rounds for which nothing is learned: all rows of whole blocks, and what tests ask for."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING

import numpy as np

from sglang_dflash.scheduler.choices import NARROW, PLAIN, RAGGED, WHOLE, Plan, Promise

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

    def plan(
        self,
        requests: int,
        keys: int = 0,
        prompt_rows: int = 0,
        adapted: bool = False,
        rounds: int = 1,
    ) -> Plan:
        """What a round would be.

        Args:
            keys: of all its requests together.
            prompt_rows: rows of prompts in the same pass.
            adapted: whether any of its requests has a LoRA adapter.
            rounds: of its step.
        """
        return self._plan

    def next(
        self,
        requests: int,
        keys: int = 0,
        prompt_rows: int = 0,
        adapted: bool = False,
        rounds: int = 1,
    ) -> Plan:
        """What the next round is; see `plan`."""
        return self.plan(requests, keys, prompt_rows, adapted, rounds)

    def promise(self, rounds: int, requests: int, keys: int, adapted: bool) -> Promise | None:
        """What is to be had of rounds in steps of so many without prompts; None if nobody knows. See `plan`."""
        return None

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

    def next(self, requests: int, *rest: object, **more: object) -> Plan:
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

    def next(self, requests: int, *rest: object, **more: object) -> Plan:
        reason, width = self._random.choice(self._reasons), self._width
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
