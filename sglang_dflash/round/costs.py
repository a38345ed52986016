"""What rounds take, measured when their graphs are captured."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from sglang.srt.distributed import get_tp_group

_TIMES = 3  # of which the shortest counts


def milliseconds(runs: Sequence[Callable[[], object]]) -> list[float]:
    """How long things take on the device, one after the other; the same on all ranks."""
    times = torch.tensor([_time(run) for run in runs], device="cuda")
    group = get_tp_group()
    if group.world_size > 1:
        times = group.all_reduce(times) / group.world_size
    return times.tolist()


def _time(run: Callable[[], object]) -> float:
    run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    shortest = float("inf")
    for _ in range(_TIMES):
        begin.record()
        run()
        end.record()
        end.synchronize()
        shortest = min(shortest, begin.elapsed_time(end))
    return shortest


@dataclass(frozen=True)
class Staircase:
    """Times of sizes, and of all between them: what the next larger one takes.

    What was measured of a larger size counts for no less than that of a smaller one.
    """

    sizes: Sequence[int]
    times: Sequence[float]

    def __post_init__(self) -> None:
        object.__setattr__(self, "times", list(accumulate(self.times, max)))

    def __str__(self) -> str:
        steps = zip(self.sizes, self.times, strict=True)
        return ", ".join(f"{size}: {time:.2f}" for size, time in steps) + " ms"

    def at(self, size: int) -> float:
        """Milliseconds; beyond the largest in proportion."""
        if size > self.sizes[-1]:
            return self.times[-1] * size / self.sizes[-1]
        return self.times[bisect.bisect_left(self.sizes, size)]


@dataclass(frozen=True)
class Costs:
    """Milliseconds of the parts of a round, with contexts that are next to nothing.

    Attributes:
        draft, whole, plain: by requests: the drafter's pass; verification of whole blocks, and what follows; the same
            of bonus tokens alone.
        ragged, head: by rows: verification of so many, and the likeliest tokens after them.
        context: by keys of all requests together.
    """

    draft: Staircase
    whole: Staircase
    plain: Staircase
    ragged: Staircase
    head: Staircase
    context: float
    sizes: Sequence[int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", self.ragged.sizes)

    def as_dict(self) -> dict[str, dict[int, float] | float]:
        """For `/server_info`, rounded to a microsecond."""
        tables = {
            name: getattr(self, name) for name in ("draft", "whole", "plain", "ragged", "head")
        }
        found: dict[str, dict[int, float] | float] = {
            name: {n: round(t, 3) for n, t in zip(table.sizes, table.times, strict=True)}
            for name, table in tables.items()
        }
        return found | {"context_per_1000": round(1000 * self.context, 4)}
