"""The tables of this benchmark, as text and as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmark import tables
from benchmark.errors import CannotMeasure
from benchmark.jsonl import Row, good
from benchmark.traffic.arrivals import Closed, Load
from benchmark.traffic.figures import differing
from benchmark.traffic.rows import load_of
from benchmark.traffic.systems import OWN_NAMES
from benchmark.traffic.workloads import FILES, KINDS

Table = list[list[str]]
Place = tuple[str, str]  # workload and kind
PLAIN = "plain"
MARK = "≠"
# Above this the client may have been what was measured.
BUSY = 0.8


class Found:
    """Rows by what was asked, system and load.

    Attributes:
        systems: in the order in which they were first measured.
        rows: of each (workload, kind), system and load, every repeat.
    """

    def __init__(self, rows: Sequence[Row]):
        if not rows:
            raise CannotMeasure("there are no results: measure something first.")
        check_alike(rows)
        # Turns begin with another system each time, so the order is that of the first place.
        self.systems = list(dict.fromkeys(row["system"] for row in rows))
        self.rows: dict[Place, dict[str, dict[Load, list[Row]]]] = {}
        for row in sorted(rows, key=_order):
            of_place = self.rows.setdefault((row["workload"], row["kind"]), {})
            of_place.setdefault(row["system"], {}).setdefault(load_of(row), []).append(row)

    def loads(self, place: Place) -> list[Load]:
        return list(dict.fromkeys(load for by in self.rows[place].values() for load in by))

    def at(self, place: Place, system: str, load: Load) -> list[Row]:
        """Repeats that were measured."""
        return [row for row in self.all_at(place, system, load) if good(row)]

    def all_at(self, place: Place, system: str, load: Load) -> list[Row]:
        return self.rows[place].get(system, {}).get(load, [])

    def value(self, place: Place, system: str, load: Load, *names: str) -> float | None:
        """Median over the repeats of a figure, or of a part of it."""
        values = [part(row, *names) for row in self.at(place, system, load)]
        there = [value for value in values if value is not None]
        return statistics.median(there) if there else None

    def reference(self) -> str:
        """Whose answers are those to compare with."""
        return PLAIN if PLAIN in self.systems else self.systems[0]

    def differing(self, place: Place, system: str, load: Load) -> tuple[int, int]:
        """(greedy answers that differ from the reference's at the same load, how many both gave)."""
        different = both = 0
        its = self.at(place, self.reference(), load)
        for row in self.at(place, system, load) if its else ():
            pair = differing(row["answers"], its[0]["answers"])
            different, both = different + pair[0], both + pair[1]
        return different, both


# Settings in which all rows must agree, those of a workload, those of a system.
_OF_ALL = ("target_model", "device", "tp_size", "sampling", "keep_cache")
_OF_WORKLOADS = ("data_sha256", "max_tokens")
_OF_SYSTEMS = ("draft_model", "block_size", "attention_backend", "server_args")


def check_alike(rows: Sequence[Row]) -> None:
    """
    Raises:
        CannotMeasure: rows that cannot stand in one table are among them.
    """
    seen: dict[tuple[str, str], Any] = {}
    for row in rows:
        scopes = {"": _OF_ALL, row["workload"]: _OF_WORKLOADS, row["system"]: _OF_SYSTEMS}
        for scope, names in scopes.items():
            for name in names:
                value = row["settings"].get(name)
                if (other := seen.setdefault((scope, name), value)) != value:
                    of = f" of {scope}" * bool(scope)
                    raise CannotMeasure(
                        f"results with different settings cannot stand in one table ({name}{of}: "
                        f"{other} and {value}): report them apart, or give systems names of their own."
                    )


def part(row: Row, *names: str) -> Any:
    value: Any = row
    for name in names:
        value = value and value.get(name)
    return value


def _order(row: Row) -> tuple:
    load = load_of(row)
    closed = isinstance(load, Closed)
    size = load.clients if closed else load.rate
    return list(FILES).index(row["workload"]), KINDS.index(row["kind"]), not closed, size


def throughput(found: Found, place: Place) -> Table:
    """Output tokens/s, a line a system; marked where greedy answers differ."""
    loads = found.loads(place)
    table = [["output tok/s", *map(str, loads)]]
    for system in found.systems:
        table.append([system, *(_rate(found, place, system, load) for load in loads)])
    own = [name for name in reversed(OWN_NAMES) if name in found.systems and name != PLAIN]
    if own and set(found.systems) - set(OWN_NAMES):
        line = (_over_peers(found, place, own[0], load) for load in loads)
        table.append([f"{own[0]} / the best of the others", *line])
    return table


def _over_peers(found: Found, place: Place, own: str, load: Load) -> str:
    """Output tokens/s over those of the fastest system that is not this project's."""
    peers = (name for name in found.systems if name not in OWN_NAMES)
    theirs = [found.value(place, name, load, "output_tok_s") for name in peers]
    best = max((value for value in theirs if value), default=None)
    mine = found.value(place, own, load, "output_tok_s")
    return f"{mine / best:.2f}" if mine and best else "–"


def _rate(found: Found, place: Place, system: str, load: Load) -> str:
    value = found.value(place, system, load, "output_tok_s")
    if value is None:
        return "failed" if found.all_at(place, system, load) else "–"
    different, _ = found.differing(place, system, load)
    return f"{value:,.0f}" + f" {MARK}{different}" * bool(different)


# A column's figures, each a path into a row, and how they are shown.
_P50, _P99 = "p50", "p99"
_COLUMNS: dict[str, tuple[tuple[tuple[str, ...], ...], str]] = {
    "tok/s": ((("output_tok_s",),), ",.0f"),
    "steady": ((("steady_tok_s",),), ",.0f"),
    "requests/s": ((("requests_s",),), ",.2f"),
    "accept length": ((("accept_length",),), ".2f"),
    "TTFT": ((("ttft_ms", _P50), ("ttft_ms", _P99)), ",.0f"),
    "TPOT": ((("tpot_ms", _P50), ("tpot_ms", _P99)), ",.2f"),
    "gap": ((("gap_ms", _P50), ("gap_ms", _P99)), ",.1f"),
    "latency": ((("latency_ms", _P50), ("latency_ms", _P99)), ",.0f"),
    "in goal": ((("within_goal",),), ".0%"),
    "requests": ((("requests",),), ",.0f"),
}


def everything(found: Found) -> Table:
    """A line a cell, medians over repeats; times are p50 / p99, in milliseconds."""
    table = [["workload", "kind", "load", "system", *_COLUMNS, "answers that differ"]]
    for place in found.rows:
        for load in found.loads(place):
            for system in found.systems:
                if found.all_at(place, system, load):
                    table.append([*place, str(load), system, *_line(found, place, system, load)])
    return table


def _line(found: Found, place: Place, system: str, load: Load) -> list[str]:
    if not found.at(place, system, load):
        return ["failed", *[""] * len(_COLUMNS)]
    line = []
    for paths, form in _COLUMNS.values():
        values = [found.value(place, system, load, *path) for path in paths]
        line.append(" / ".join(_shown(value, form) for value in values))
    different, both = found.differing(place, system, load)
    mark = f"{MARK} " * bool(different)
    nothing = not both or system == found.reference()
    return [*line, "–" if nothing else f"{mark}{different} of {both}"]


def _shown(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def notes(rows: Sequence[Row]) -> list[str]:
    """What a reader must know of these cells."""
    measured = [row for row in rows if good(row)]
    lines = [f"{len(rows) - len(measured)} of {len(rows)} cells failed:"] * (
        len(measured) < len(rows)
    )
    lines += dict.fromkeys(
        f"- {row['system']}: {row['error'].splitlines()[0]}" for row in rows if not good(row)
    )
    busy = [row for row in measured if row["client_busiest"] > BUSY]
    if busy:
        names = ", ".join(f"{r['workload']} {r['kind']} {load_of(r)} {r['system']}" for r in busy)
        lines.append(
            f"the client was busy more than {BUSY:.0%} of the time, so more is possible: {names}"
        )
    odd = [row for row in measured if not _counted_alike(row)]
    lines += [
        f"{row['workload']} {row['kind']} {load_of(row)} {row['system']}: the answers have "
        f"{row['completion_tokens']} tokens, and the server counted {row['server_tokens']:.0f}"
        for row in odd
    ]
    pools = {row["system"]: row["provenance"].get("kv_tokens") for row in measured}
    lines += [
        f"{name} has {kv['has']:,} slots in its KV pool instead of {kv['wanted']:,}, so requests may wait"
        for name, kv in pools.items()
        if kv and kv["has"] and kv["has"] < 0.98 * kv["wanted"]
    ]
    unflushed = sorted({row["system"] for row in measured if row["flushed"] is False})
    if unflushed:
        lines.append(f"prefix caches could not be emptied before cells of {', '.join(unflushed)}")
    return lines


def _counted_alike(row: Row) -> bool:
    theirs = row["server_tokens"]
    return theirs is None or abs(theirs - row["completion_tokens"]) <= 0.005 * theirs


def header(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Where and how it was measured."""
    measured = [row for row in rows if good(row)]
    origins = [row["provenance"] for row in measured]
    gpus = _each(
        f"{o['machine']['gpus_used']} x {o['gpu']['name']}, driver {o['gpu'].get('driver_version')}"
        if o["gpu"]
        else f"CPU, {o['machine']['cpus']} processors"
        for o in origins
    )
    systems = {
        row["system"]: ", ".join(f"{k} {v}" for k, v in row["provenance"]["versions"].items())
        for row in measured
    }
    busiest = max((row["client_busiest"] for row in measured), default=0.0)
    dates = sorted(o["date"] for o in origins)
    lines = [
        ("machine", gpus),
        ("target", _each(row["settings"]["target_model"] for row in measured)),
        ("drafter", _each(row["settings"]["draft_model"] for row in measured)),
        ("sampled", _each(_fields(row["settings"]["sampling"]) for row in measured)),
        ("goal", _each(_fields(row["settings"]["goal"]) for row in measured)),
        ("a cell", _each(_length(row["settings"]) for row in measured)),
        ("clients", f"the busiest process took at most {busiest:.0%} of a processor"),
        ("commit", _each(o["commit"][:12] for o in origins)),
        ("measured", " to ".join(dict.fromkeys([*dates[:1], *dates[-1:]]))),
    ]
    return [line for line in lines if line[1]] + list(systems.items())


def _each(values: Iterable[Any]) -> str:
    """Different values in their order."""
    return "; ".join(dict.fromkeys(str(value) for value in values if value))


def _fields(found: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in found.items())


def _length(settings: dict[str, Any]) -> str:
    text = f"{settings['seconds']:g} s, at least {settings['least_per_client']} requests a client"
    return text + f", at most {settings['requests']}" * bool(settings["requests"])


def text(rows: Sequence[Row]) -> str:
    """The summary for a terminal."""
    return _whole(rows, lambda title: f"\n{title}", tables.as_text)


def markdown(rows: Sequence[Row]) -> str:
    return (
        "# Serving\n\n" + _whole(rows, lambda title: f"\n## {title}\n", tables.as_markdown) + "\n"
    )


def _whole(rows: Sequence[Row], title: Callable[[str], str], shown: Callable[[Table], str]) -> str:
    found = Found(rows)
    parts = [shown([["", ""], *map(list, header(rows))])]
    for place in found.rows:
        parts += [title(", ".join(place)), shown(throughput(found, place))]
    parts += [title("Every cell; times are p50 / p99 in ms"), shown(everything(found))]
    parts += ["", *notes(rows)]
    return "\n".join(parts).rstrip()


def write(rows: Sequence[Row], output: Path) -> Path:
    """Markdown beside the output."""
    path = output.with_suffix(".md")
    path.write_text(markdown(rows))
    return path
