"""What rounds take whose requests all have as many rows, measured on their graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_dflash.round.costs import Costs, Staircase, orderly
from sglang_dflash.serving.memory import pool_bytes

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang_dflash.round.graphs import RoundGraphs


def costs_of_blocks(
    rounds: RoundGraphs, target: ModelRunner, least: float | None = None
) -> tuple[Costs, bool]:
    """What rounds take that verify all rows or draft nothing, and whether nobody else used the GPU meanwhile.

    Args:
        least: milliseconds of a pass of the target over the fewest rows; None for those of a round that drafts nothing.
    """
    times, quiet = rounds.times()
    narrow = [width for width in rounds.narrow if width in times]
    draft, whole = times[rounds.widths[-1]]
    plain = together(*times[rounds.widths[0]])
    # The fewest rows take as long as it takes to read the weights.
    weights = sum(p.numel() * p.itemsize for p in target.model.parameters())
    pool = target.token_to_kv_pool
    key_bytes = pool_bytes(pool) / (pool.size + pool.page_size)
    nothing = Staircase((), ())
    costs = Costs(
        draft=draft,
        whole=whole,
        plain=plain,
        ragged=nothing,
        head=nothing,
        context=key_bytes * (plain.times[0] if least is None else least) / weights,
        narrow={width: times[width][0] for width in narrow},
        uniform={width: together(*times[width]) for width in (*narrow, *rounds.widths[-2:0:-1])},
    )
    return costs, quiet and all(map(orderly, zip(plain.times, whole.times, strict=True)))


def together(first: Staircase, rest: Staircase) -> Staircase:
    """What both parts of rounds take."""
    return Staircase(first.sizes, [a + b for a, b in zip(first.times, rest.times, strict=True)])
