"""The summary: a header of settings, then tables in the published form; as text, Markdown, CSV."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmark import tables
from benchmark.gsm8k.cells import ARMS, BASELINE, Cell
from benchmark.gsm8k.rows import Row, cell_of, good, shared_settings

Table = list[list[str]]
Found = dict[Cell, Row]


def header(found: Sequence[Row]) -> list[tuple[str, str]]:
    """The settings of all cells, and where and when they were measured."""
    settings = shared_settings(found)
    cells = [cell_of(row) for row in found]
    lines = {
        "attention_backends": _each((cell.backend for cell in cells), ", "),
        "tp_sizes": _each((cell.tp for cell in cells), ", "),
        "concurrencies": _each((cell.concurrency for cell in cells), ", "),
        "arms": _each((cell.arm for cell in cells), ", "),
    }
    for name, value in settings.items():
        if value is None or value is False or value in ("", []):
            continue  # of what is mostly left alone, only what was set
        lines[name] = " ".join(value) if isinstance(value, list) else str(value).strip()
    return [*lines.items(), *_origin([row["provenance"] for row in found if good(row)])]


def _each(values: Iterable[Any], between: str = "; ") -> str:
    """Different values in their order."""
    return between.join(dict.fromkeys(str(value) for value in values if value)) or "-"


def _origin(origins: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    gpus = [
        f"{o['machine'].get('gpus_used')} x {o['gpu']['name']}, driver {o['gpu'].get('driver_version')}"
        if o["gpu"]
        else f"CPU, {o['machine']['cpus']} cores"
        for o in origins
    ]
    versions = [", ".join(f"{k} {v}" for k, v in o["versions"].items()) for o in origins]
    changed = [
        f" and {o['changed_files']} changed files" * bool(o["changed_files"]) for o in origins
    ]
    commits = [o["commit"][:12] + more for o, more in zip(origins, changed, strict=True)]
    models = [
        f"{name} {model['revision'][:19]}"
        for o in origins
        for name, model in o.get("models", {}).items()
    ]
    dates = sorted(o["date"] for o in origins)
    return [
        ("machine", _each(gpus)),
        ("versions", _each(versions)),
        ("revisions", _each(models)),
        ("commit", _each(commits)),
        ("measured", " to ".join(dict.fromkeys([*dates[:1], *dates[-1:]])) or "-"),
    ]


def caption(found: Sequence[Row]) -> tuple[str, str]:
    """Two lines for a picture: the models and their questions, and the machine."""
    settings = shared_settings(found)
    models = f"target {settings['target_model']}"
    if "draft_model" in settings:
        models += f", drafter {settings['draft_model']}"
    origins = [row["provenance"] for row in found if good(row)]
    machines = _each(
        (o["gpu"]["name"] if o["gpu"] else f"CPU, {o['machine']['cpus']} cores" for o in origins),
        ", ",
    )
    releases = _each((f"SGLang {o['versions']['sglang']}" for o in origins), ", ")
    return f"{models}; {settings['data']}", f"{machines}; {releases}"


def all_tables(found: Sequence[Row]) -> list[tuple[str, list[tuple[str, Table]]]]:
    """Titled tables of each attention backend."""
    backends = dict.fromkeys(cell_of(row).backend for row in found)
    return [(backend, _tables_of(found, backend)) for backend in backends]


def _tables_of(found: Sequence[Row], backend: str) -> list[tuple[str, Table]]:
    by_cell = {cell_of(row): row for row in found if cell_of(row).backend == backend}
    there = {cell.arm for cell in by_cell}
    workers = [arm for arm in ARMS if arm in there and arm != BASELINE]
    made: list[tuple[str, Table]] = []
    if BASELINE in there:
        made.append(_table(by_cell, "Baseline output tok/s", _figure("output_tok_s", 2), BASELINE))
        made.append(_table(by_cell, "Baseline accuracy", _figure("accuracy", 3), BASELINE))
    for title, value in (
        ("DFLASH output tok/s", _figure("output_tok_s", 2)),
        ("DFLASH accuracy", _figure("accuracy", 3)),
        ("Speedup (DFLASH / baseline)", _over(BASELINE)),
        ("DFLASH acceptance length", _figure("accept_length", 3)),
        ("DFLASH tokens per verify step", _figure("accept_length_of_tokens", 3)),
    ):
        for arm in workers if "baseline" not in title or BASELINE in there else ():
            made.append(_table(by_cell, title + f", {arm}" * (len(workers) > 1), value, arm))
    if {"v1", "v2"} <= there:
        made.append(_table(by_cell, "v2 / v1", _over("v1"), "v2"))
    return made


def _table(
    found: Found, title: str, value: Callable[[Found, Cell], str], arm: str
) -> tuple[str, Table]:
    """Rows are TP sizes, columns concurrencies."""
    sizes = sorted({cell.tp for cell in found})
    backend = next(iter(found)).backend
    concurrencies = sorted({cell.concurrency for cell in found})
    table = [["tp \\ conc", *map(str, concurrencies)]]
    for tp in sizes:
        row = [value(found, Cell(backend, tp, arm, concurrency)) for concurrency in concurrencies]
        table.append([str(tp), *row])
    return title, table


def figure(row: Row | None, name: str) -> Any:
    """A figure of a cell that was measured."""
    return row.get(name) if row is not None and good(row) else None


def _figure(name: str, digits: int) -> Callable[[Found, Cell], str]:
    def value(found: Found, cell: Cell) -> str:
        row = found.get(cell)
        at, spread = figure(row, name), figure(row, f"{name}_spread")
        if at is None:
            return "failed" if row and not good(row) else "-"
        return f"{at:,.{digits}f}" + (f" ± {spread:.{digits}f}" if spread is not None else "")

    return value


def _over(other: str) -> Callable[[Found, Cell], str]:
    """Output tokens per second over those of another arm."""

    def value(found: Found, cell: Cell) -> str:
        mine = figure(found.get(cell), "output_tok_s")
        its = figure(
            found.get(Cell(cell.backend, cell.tp, other, cell.concurrency)), "output_tok_s"
        )
        return f"{mine / its:.3f}" if mine and its else "-"

    return value


def text(found: Sequence[Row]) -> str:
    """The whole summary for a terminal."""
    lines = header(found)
    width = max(len(name) for name, _ in lines)
    parts = ["=== GSM8K sweep ===", *(f"{name.ljust(width)}  {value}" for name, value in lines)]
    for backend, titled in all_tables(found):
        parts.append(f"\n=== Backend: {backend} ===")
        for title, table in titled:
            parts.append(f"\n{title}\n{tables.as_text(table)}")
    return "\n".join([*parts, *failures(found)])


def markdown(found: Sequence[Row]) -> str:
    parts = ["# GSM8K sweep\n"]
    parts += [tables.as_markdown([["", ""], *([n, f"`{v}`"] for n, v in header(found))]) + "\n"]
    for backend, titled in all_tables(found):
        parts.append(f"## Backend: {backend}\n")
        for title, table in titled:
            parts.append(f"### {title}\n\n{tables.as_markdown(table)}\n")
    return "\n".join([*parts, *failures(found)]).rstrip() + "\n"


def failures(found: Sequence[Row]) -> list[str]:
    failed = [row for row in found if not good(row)]
    lines = [f"- {cell_of(row)}: {row['error'].splitlines()[0]}" for row in failed]
    return [f"\n{len(failed)} cells failed:\n", *lines] if failed else []


def write_csv(found: Sequence[Row], path: Path) -> None:
    """A line a cell, with every figure."""
    lines = [_flat(row) for row in found]
    columns = dict.fromkeys(name for line in lines for name in line)
    with path.open("w", newline="") as out:
        writer = csv.DictWriter(out, list(columns), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def _flat(row: Row) -> dict[str, Any]:
    line: dict[str, Any] = {**asdict(cell_of(row)), "error": row.get("error")}
    for name, value in row.items():
        if isinstance(value, int | float):
            line[name] = value
        elif name.endswith("_ms") and value:
            line |= {f"{name}_{p}": ms for p, ms in value.items()}
    return line


def write(found: Sequence[Row], output: Path) -> tuple[Path, Path]:
    """Markdown and CSV beside the output."""
    as_markdown, as_csv = output.with_suffix(".md"), output.with_suffix(".csv")
    as_markdown.write_text(markdown(found))
    write_csv(found, as_csv)
    return as_markdown, as_csv
