"""Two results side by side; what is worse is named."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmark import tables
from benchmark.errors import CannotMeasure
from benchmark.gsm8k import rows
from benchmark.gsm8k.cells import Cell
from benchmark.gsm8k.report import figure

# More of each is better.
FIGURES = {
    "output_tok_s": "output tok/s",
    "accuracy": "accuracy",
    "accept_length": "accept length",
}


@dataclass(frozen=True)
class Comparison:
    """What two files hold.

    Attributes:
        table: a line for each cell and figure that both have.
        worse: a sentence for each cell of the second that is worse than the tolerance allows.
        differences: a sentence for each setting in which they differ.
    """

    table: list[list[str]]
    worse: list[str]
    differences: list[str]

    def text(self, tolerance: float) -> str:
        parts = [f"settings differ: {line}" for line in self.differences]
        parts.append(tables.as_text(self.table))
        parts += [f"WORSE: {line}" for line in self.worse]
        if not self.worse:
            parts.append(f"no cell of B is more than {tolerance:.0%} worse than in A")
        return "\n".join(parts)


def compare(first: Path, second: Path, tolerance: float) -> Comparison:
    """The second file against the first.

    Args:
        tolerance: part of a figure that may be lost.

    Raises:
        CannotMeasure: a file cannot be read, or they have no cell in common.
    """
    found = [rows.latest(rows.read(path)) for path in (first, second)]
    mine, its = ({rows.cell_of(row): row for row in each} for each in found)
    if not mine.keys() & its.keys():
        raise CannotMeasure(
            f"{first} and {second} have no cell in common: nothing can be compared."
        )
    table = [["backend", "tp", "arm", "conc", "figure", "A", "B", "B / A"]]
    worse: list[str] = []
    for cell, row in mine.items():
        _compare_cell(cell, row, its.get(cell), tolerance, table, worse)
    differences = _differences(*(rows.shared_settings(each) for each in found))
    only = [str(cell) for cell in its if cell not in mine]
    differences += [f"{name} is only in B" for name in only]
    return Comparison(table, worse, differences)


def _compare_cell(
    cell: Cell,
    mine: rows.Row,
    its: rows.Row | None,
    tolerance: float,
    table: list[list[str]],
    worse: list[str],
) -> None:
    if rows.good(mine) and (its is None or not rows.good(its)):
        worse.append(f"{cell} {'is missing' if its is None else 'failed'} in B")
        return
    for name, title in FIGURES.items():
        was, now = figure(mine, name), figure(its, name)
        if was is None and now is None:
            continue
        ratio = now / was if was and now is not None else None
        shown = ["-" if value is None else f"{value:,.3f}" for value in (was, now, ratio)]
        table.append([cell.backend, str(cell.tp), cell.arm, str(cell.concurrency), title, *shown])
        if was is not None and (now is None or now < was * (1 - tolerance)):
            lost = "it is missing" if now is None else f"{was:,.3f} → {now:,.3f}"
            worse.append(f"{cell}: {title} {lost}")


def _differences(mine: dict[str, Any], its: dict[str, Any]) -> list[str]:
    return [
        f"{name}: {mine.get(name)} → {its.get(name)}"
        for name in dict.fromkeys([*mine, *its])
        if mine.get(name) != its.get(name)
    ]
