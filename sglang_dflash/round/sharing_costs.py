"""What rounds whose requests have different numbers of rows take beyond the passes that they are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from sglang_dflash.gpu.pass_sizes import NARROW, dear_sizes
from sglang_dflash.round.costs import FAR, Costs, Curve, milliseconds

if TYPE_CHECKING:
    from sglang_dflash.round.graphs import RoundGraphs
    from sglang_dflash.round.prompt_graphs import PromptGraphs

_ROWS = 2  # of each request, at least
T = TypeVar("T")


class Launch(Protocol):
    """Launches a round, as `RoundRunner` does."""

    def __call__(
        self, rows: torch.Tensor, start_bounds: torch.Tensor, width: int, *, total: int | None
    ) -> Callable[[], object]: ...


class Kind(NamedTuple):
    """Rounds of so many requests that verify so many rows of their blocks; None for all."""

    width: int
    requests: int
    total: int | None


class SharingTimes:
    """Times of rounds as they are run."""

    def __init__(self, rounds: RoundGraphs, passes: PromptGraphs, launch: Launch):
        self._rounds, self._passes, self._launch = rounds, passes, launch
        self._state = rounds.parts.state
        self.quiet = True

    def added_to(self, costs: Costs) -> Costs:
        """What sharing rows out adds, by requests, for blocks of up to some widths.

        Passes are timed with all their rows of one request, so what is added here is attention of many, and all that is
        launched between the graphs of such a round: it is run as it will be.

        Args:
            costs: of its parts.
        """
        sharing, behind = {}, {}
        for width in _widths(self._rounds):
            narrow = width in self._rounds.narrow
            sizes = dear_sizes(self._rounds.sizes, width) if narrow else self._rounds.sizes
            if not sizes:
                continue
            kinds = [Kind(width, n, _total(self._passes.sizes, n, width)) for n in _every(2, sizes)]
            near = self._milliseconds(kinds, 0)
            added = [time - _parts(costs, kind) for time, kind in zip(near, kinds, strict=True)]
            sharing[width] = Curve([kind.requests for kind in kinds], added)
            if self._rounds.parts.context_len >= 2 * FAR:
                behind[width] = self._behind_contexts(_every(3, kinds), _every(3, near))
        return replace(costs, sharing=sharing, behind_contexts=behind)

    def _behind_contexts(self, kinds: Sequence[Kind], near: Sequence[float]) -> Curve:
        """What contexts add to such rounds beyond what they add to those of all rows.

        Args:
            near: milliseconds without contexts.
        """
        whole = [kind._replace(total=None) for kind in kinds]
        added = np.subtract(self._milliseconds(kinds, FAR), near)
        usual = np.subtract(self._milliseconds(whole, FAR), self._milliseconds(whole, 0))
        return Curve([kind.requests for kind in kinds], (added - usual).tolist())

    def _milliseconds(self, kinds: Sequence[Kind], keys: int) -> list[float]:
        """Of rounds whose requests have contexts of so many keys, all in the slot of padding."""
        padding = self._state.padding_row
        self._state.lengths[padding] = keys
        times = milliseconds([partial(self._run, keys, *kind) for kind in kinds])
        self._state.lengths[padding] = 0
        self.quiet = self.quiet and times.quiet
        return times.shortest

    def _run(self, keys: int, width: int, requests: int, total: int | None) -> None:
        # Of requests that only pad a batch nothing is left.
        rows = self._state.lengths.new_full((requests,), self._state.padding_row)
        bounds = torch.full((requests,), keys, dtype=torch.int64)
        self._launch(rows, bounds, width, total=total)()


def _widths(rounds: RoundGraphs) -> list[int]:
    """Of whole blocks, and the widest of those whose attention may have a kernel of its own."""
    few = [width for width in rounds.narrow if width <= NARROW]
    return sorted({rounds.widths[-1], *few[:1]})


def _total(sizes: list[int], requests: int, width: int) -> int:
    """Rows of a pass that is full, if there is one of which each request has enough."""
    total = next((size for size in sizes if size >= _ROWS * requests), sizes[-1])
    return max(requests, min(total, requests * width))


def _parts(costs: Costs, kind: Kind) -> float:
    draft = costs.narrow.get(kind.width, costs.draft).at(kind.requests)
    return draft + costs.passes(kind.requests).at(kind.total) + costs.head.at(kind.total)


def _every(nth: int, sizes: Sequence[T]) -> list[T]:
    """The last and every so many before it, which tell enough."""
    return list(sizes[::-nth][::-1])
