"""What rounds whose requests have different numbers of rows take beyond the passes that they are made of."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch

from sglang_dflash.gpu.pass_sizes import NARROW, dear_sizes
from sglang_dflash.round.costs import Costs, Curve, milliseconds

if TYPE_CHECKING:
    from sglang_dflash.round.graphs import RoundGraphs
    from sglang_dflash.round.prompt_graphs import PromptGraphs

_ROWS = 2  # of each request, at least


class Launch(Protocol):
    """Launches a round, as `RoundRunner` does."""

    def __call__(
        self, rows: torch.Tensor, start_bounds: torch.Tensor, width: int, *, total: int
    ) -> Callable[[], object]: ...


def costs_of_sharing(
    rounds: RoundGraphs, passes: PromptGraphs, launch: Launch, costs: Costs
) -> tuple[dict[int, Curve], bool]:
    """By requests, for blocks of up to some widths; and whether it was quiet.

    Passes are timed with all their rows of one request, so what is added here is attention of many, and all that is
    launched between the graphs of such a round: it is run as it will be.

    Args:
        costs: of its parts.
    """
    state, found, all_quiet = rounds.parts.state, {}, True

    def run(width: int, requests: int, total: int) -> None:
        # Of requests that only pad a batch nothing is left.
        rows = state.lengths.new_full((requests,), state.padding_row)
        launch(rows, torch.zeros(requests, dtype=torch.int64), width, total=total)()

    for width in _widths(rounds):
        sizes = dear_sizes(rounds.sizes, width) if width in rounds.narrow else rounds.sizes
        if not sizes:
            continue
        sizes = sizes[::-2][::-1]  # every other one tells enough
        kinds = [(width, n, _total(passes.sizes, n, width)) for n in sizes]
        times = milliseconds([partial(run, *kind) for kind in kinds])
        parts = [_parts(costs, *kind) for kind in kinds]
        added = [time - part for time, part in zip(times.shortest, parts, strict=True)]
        found[width], all_quiet = Curve(sizes, added), all_quiet and times.quiet
    return found, all_quiet


def _widths(rounds: RoundGraphs) -> list[int]:
    """Of whole blocks, and the widest of those whose attention may have a kernel of its own."""
    few = [width for width in rounds.narrow if width <= NARROW]
    return sorted({rounds.widths[-1], *few[:1]})


def _total(sizes: list[int], requests: int, width: int) -> int:
    """Rows of a pass that is full, if there is one of which each request has enough."""
    total = next((size for size in sizes if size >= _ROWS * requests), sizes[-1])
    return max(requests, min(total, requests * width))


def _parts(costs: Costs, width: int, requests: int, total: int) -> float:
    draft = costs.narrow.get(width, costs.draft).at(requests)
    return draft + costs.passes(requests).at(total) + costs.head.at(total)
