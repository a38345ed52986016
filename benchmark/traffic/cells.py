"""Which cells there are, in which order, and what makes two the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmark.errors import CannotMeasure
from benchmark.traffic.arrivals import Closed, Load, Open
from benchmark.traffic.workloads import FILES, KINDS


@dataclass(frozen=True)
class Place:
    """What is asked of all systems in turn.

    Attributes:
        kind: "greedy", "sampled", or "mixed", which is half and half.
    """

    workload: str
    kind: str
    load: Load
    repeat: int = 0

    def __str__(self) -> str:
        return f"{self.workload} {self.kind} {self.load}" + f" #{self.repeat + 1}" * (
            self.repeat > 0
        )


@dataclass(frozen=True)
class Cell:
    """One system in a place: a row of the results."""

    place: Place
    system: str

    def __str__(self) -> str:
        return f"{self.place} {self.system}"

    def fields(self) -> dict[str, Any]:
        load = self.place.load
        closed = isinstance(load, Closed)
        return {
            "system": self.system,
            "workload": self.place.workload,
            "kind": self.place.kind,
            "clients": load.clients if closed else None,
            "rate": None if closed else load.rate,
            "repeat": self.place.repeat,
        }


def parse_places(text: str) -> list[Place]:
    """Places of WORKLOAD/KIND/LOAD,LOAD…; a load is a number of clients, or a rate such as 8/s.

    Raises:
        CannotMeasure: not of that form.
    """
    workload, _, rest = text.partition("/")
    kind, _, loads = rest.partition("/")
    if workload not in FILES:
        raise CannotMeasure(f"{workload} in {text} is not one of {', '.join(FILES)}: name one.")
    if kind not in KINDS:
        raise CannotMeasure(f"{kind or 'nothing'} in {text} is not one of {', '.join(KINDS)}.")
    return [Place(workload, kind, parse_load(part, text)) for part in loads.split(",")]


def parse_load(part: str, text: str) -> Load:
    try:
        if part.endswith("/s") and float(part[:-2]) > 0:
            return Open(float(part[:-2]))
        if int(part) > 0:
            return Closed(int(part))
    except ValueError:
        pass
    raise CannotMeasure(
        f"{part or 'nothing'} in {text} is no load: give a number of clients, or a rate such as 8/s."
    )


def in_turns(places: Sequence[Place], systems: Sequence[str], repeats: int) -> list[Cell]:
    """All cells in the order in which they are measured.

    Every system has its turn in a place before the next place comes, and another begins each time,
    so that a machine that drifts treats all alike. Repeats come after all places.
    """
    cells = []
    for repeat in range(repeats):
        for number, place in enumerate(places):
            first = (number + repeat) % len(systems)
            again = Place(place.workload, place.kind, place.load, repeat)
            cells += [Cell(again, name) for name in [*systems[first:], *systems[:first]]]
    return cells


def key(cell: Cell, settings: dict[str, Any]) -> str:
    """Equal for cells that are the same measurement."""
    text = json.dumps([cell.fields(), settings], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
