"""What rounds take, measured when their graphs are captured, and remembered for the next start."""

from __future__ import annotations

import bisect
import json
import logging
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError
from sglang.srt.distributed import get_tp_group

from sglang_dflash.gpu.tilings import cache_folder

logger = logging.getLogger(__name__)

# Of `Costs`, what JSON can hold.
Told = dict[str, float | dict[int, float] | dict[int, dict[int, float]]]

_TIMES = 3  # of which the shortest counts
_QUIET = 1.25  # times of one thing, the longest over the shortest, where nobody else uses the GPU
_NOISE = 0.1  # milliseconds by which times of next to nothing differ


@dataclass(frozen=True)
class Times:
    """
    Attributes:
        shortest: milliseconds of each thing, the same on all ranks.
        quiet: whether those that were measured again took about as long.
    """

    shortest: list[float]
    quiet: bool


def milliseconds(runs: Sequence[Callable[[], object]]) -> Times:
    """How long things take on the device, one after the other."""
    measured = torch.tensor([_time(run) for run in runs], device="cuda")  # [runs, times]
    group = get_tp_group()
    if group.world_size > 1:
        measured = group.all_reduce(measured) / group.world_size
    shortest, longest = measured.amin(dim=1), measured.amax(dim=1)
    sums = shortest.sum().item(), longest.sum().item()
    if not (quiet := sums[1] < _QUIET * sums[0]):
        logger.info("DFLASH measured %.2f ms in all, and up to %.2f of the same", *sums)
    return Times(shortest.tolist(), quiet)


def _time(run: Callable[[], object]) -> list[float]:
    """One run behind the other, so that the host has launched each before the device is there, as it has rounds."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(_TIMES + 1)]
    for event in events:
        run()
        event.record()
    events[-1].synchronize()
    return [begin.elapsed_time(end) for begin, end in pairwise(events)]


@dataclass(frozen=True)
class Staircase:
    """Times of sizes, and of all between them: what the next larger one takes.

    No size counts for more than what was measured of a larger one: what else uses the GPU only makes times longer.
    """

    sizes: Sequence[int]
    times: Sequence[float]

    def __post_init__(self) -> None:
        object.__setattr__(self, "times", list(accumulate(reversed(self.times), min))[::-1])

    def __str__(self) -> str:
        steps = zip(self.sizes, self.times, strict=True)
        return ", ".join(f"{size}: {time:.2f}" for size, time in steps) + " ms"

    def as_dict(self) -> dict[int, float]:
        """To a microsecond."""
        steps = zip(self.sizes, self.times, strict=True)
        return {size: round(time, 3) for size, time in steps}

    @classmethod
    def from_dict(cls, found: dict[int, float]) -> Staircase:
        """What `as_dict` gave."""
        return cls(list(found), list(found.values()))

    def at(self, size: int) -> float:
        """Milliseconds; beyond the largest in proportion."""
        if size > self.sizes[-1]:
            return self.times[-1] * size / self.sizes[-1]
        return self.times[bisect.bisect_left(self.sizes, size)]

    def of(self, sizes: np.ndarray) -> np.ndarray:
        """The same for many: [n] int64 → [n] float64."""
        known, times = self._arrays
        step = np.searchsorted(known, sizes).clip(max=len(known) - 1)
        return times[step] * np.maximum(sizes / known[-1], 1.0)

    @cached_property
    def _arrays(self) -> tuple[np.ndarray, np.ndarray]:
        return np.array(self.sizes), np.array(self.times)


@dataclass(frozen=True)
class Curve:
    """Milliseconds at some sizes, rising, and in between in proportion; beyond them as at the nearest."""

    sizes: Sequence[int]
    times: Sequence[float]

    def at(self, size: int) -> float:
        return float(np.interp(size, self.sizes, self.times))

    def as_dict(self) -> dict[int, float]:
        """To a microsecond."""
        return {size: round(time, 3) for size, time in zip(self.sizes, self.times, strict=True)}

    @classmethod
    def from_dict(cls, found: dict[int, float]) -> Curve:
        """What `as_dict` gave."""
        return cls(list(found), list(found.values()))


def orderly(times: Sequence[float]) -> bool:
    """Whether nothing took much longer than something larger, as where all others waited for the GPU equally long.

    Args:
        times: of things that grow.
    """
    least = list(accumulate(reversed(times), min))[::-1]
    pairs = list(zip(times, least, strict=True))
    if all(time < _QUIET * least + _NOISE for time, least in pairs):
        return True
    logger.info(
        "DFLASH measured, in ms, in the order of sizes: %s", [round(time, 3) for time in times]
    )
    return False


@dataclass(frozen=True)
class Costs:
    """Milliseconds of the parts of a round, with contexts that are next to nothing.

    Attributes:
        draft, whole, plain: by requests: the drafter's pass; verification of whole blocks, and what follows; the same
            of bonus tokens alone.
        ragged, head: by rows: verification of so many, and the likeliest tokens after them; both empty where all
            requests have as many.
        sharing: what a round adds to both because requests have different numbers of rows, by them, and by the width
            of their blocks at most; less than nothing where attention of narrow blocks is faster than that of passes.
            Empty where it is not known.
        context: by keys of all requests together.
        by_requests: `ragged` of few requests, prompts beside blocks included, by the most that they are, the fewest
            first; of some sizes, the smallest.
        narrow: `draft` of narrower blocks, by their width, the widest first; from so many requests on as it has.
        uniform: all of a round of narrower blocks whose rows are all verified, likewise.
        adapters: what LoRA adapters of its requests add to a round.
    """

    draft: Staircase
    whole: Staircase
    plain: Staircase
    ragged: Staircase
    head: Staircase
    context: float
    by_requests: Mapping[int, Staircase] = field(default_factory=dict)
    narrow: Mapping[int, Staircase] = field(default_factory=dict)
    uniform: Mapping[int, Staircase] = field(default_factory=dict)
    sharing: Mapping[int, Curve] = field(default_factory=dict)
    adapters: float = 0.0

    def passes(self, requests: int) -> Staircase:
        """`ragged` of so many requests, prompts beside blocks included."""
        return next((passes for room, passes in self._of_few if requests <= room), self.ragged)

    @cached_property
    def _of_few(self) -> list[tuple[int, Staircase]]:
        sizes, times = self.ragged.sizes, self.ragged.times
        return [
            (room, Staircase(sizes, [*few.times, *times[len(few.times) :]]))
            for room, few in self.by_requests.items()
        ]

    def shared(self, width: int, requests: int) -> float:
        """`sharing` of so many requests with blocks of a width."""
        of_width = min((w for w in self.sharing if w >= width), default=None)
        return 0.0 if of_width is None else self.sharing[of_width].at(requests)

    def as_dict(self) -> Told:
        """For `/server_info` and the file, to a microsecond."""
        found: Told = {name: getattr(self, name).as_dict() for name in _TABLES}
        for name in _BY_NUMBER:
            by_number = getattr(self, name)
            found[name] = {number: stairs.as_dict() for number, stairs in by_number.items()}
        return found | {"context": round(self.context, 9), "adapters": round(self.adapters, 3)}

    @classmethod
    def from_dict(cls, found: Told) -> Costs:
        """What `as_dict` gave."""
        tables = {name: Staircase.from_dict(found[name]) for name in _TABLES}
        by_number = {
            name: {number: kind.from_dict(each) for number, each in found[name].items()}
            for name, kind in _BY_NUMBER.items()
        }
        numbers = {name: found[name] for name in _NUMBERS}
        return cls(**tables, **by_number, **numbers)


_TABLES = ("draft", "whole", "plain", "ragged", "head")
_BY_NUMBER = {"by_requests": Staircase, "narrow": Staircase, "uniform": Staircase, "sharing": Curve}
_NUMBERS = ("context", "adapters")
_FILE = TypeAdapter(dict[str, Told])


def remembered(name: str, measure: Callable[[], tuple[Costs, bool]]) -> tuple[Costs, bool]:
    """What rounds take: from the file if a start before has measured it, else measured and written there.

    Args:
        name: of all that it depends on.
        measure: gives it, and whether it is worth keeping; all ranks run it together.

    Returns:
        It, and whether it is worth keeping.
    """
    group, file = get_tp_group(), cache_folder() / "costs.json"
    known = _read(file).get(name) if group.is_first_rank else None
    if group.world_size > 1:
        known = group.broadcast_object(known, src=0)
    if known is not None:
        logger.info("DFLASH takes what rounds take from %s; delete it to measure it again", file)
        return Costs.from_dict(known), True
    costs, quiet = measure()
    if not quiet:
        logger.warning(
            "DFLASH measured what rounds take while something else used the GPU, and does not keep it: rounds may "
            "verify too many rows or too few. POST /flush_cache, or the next start, measures it again."
        )
    elif group.is_first_rank:
        _write(file, name, costs)
    return costs, quiet


def _read(file: Path) -> dict[str, Told]:
    try:
        found = _FILE.validate_json(file.read_bytes())
    except (OSError, ValidationError):
        return {}
    names = {each.name for each in fields(Costs)}
    return {name: costs for name, costs in found.items() if costs.keys() == names}


def _write(file: Path, name: str, costs: Costs) -> None:
    content = _read(file) | {name: costs.as_dict()}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as made:
            json.dump(content, made, indent=1)
        os.replace(made.name, file)
    except OSError as reason:
        logger.info("DFLASH does not keep what rounds take for the next start: %s", reason)
