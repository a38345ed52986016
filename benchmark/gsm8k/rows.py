"""Results of the sweep: JSON lines, one a cell."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmark import jsonl
from benchmark.errors import CannotMeasure
from benchmark.gsm8k.cells import Cell
from benchmark.jsonl import Row, append, good

__all__ = ["Row", "append", "cell_of", "good", "latest", "read", "resume", "shared_settings"]
_FIELDS = ("key", "backend", "tp", "arm", "concurrency", "settings", "provenance")


def read(path: Path) -> list[Row]:
    """All rows of a file; see `benchmark.jsonl.read`."""
    return jsonl.read(path, _FIELDS, "this sweep")


def resume(path: Path) -> dict[str, Row]:
    """Rows by key of the cells that are finished; a line that was torn is cut off."""
    jsonl.cut_off(path)
    return {row["key"]: row for row in read(path) if good(row)} if path.exists() else {}


def cell_of(row: Row) -> Cell:
    return Cell(row["backend"], row["tp"], row["arm"], row["concurrency"])


def latest(found: Sequence[Row]) -> list[Row]:
    """One row a cell: the last one that succeeded, or else the last."""
    chosen: dict[Cell, Row] = {}
    for row in found:
        cell = cell_of(row)
        if cell not in chosen or good(row) or not good(chosen[cell]):
            chosen[cell] = row
    return list(chosen.values())


def shared_settings(found: Sequence[Row]) -> dict[str, Any]:
    """The settings of all rows, those of speculation included.

    Raises:
        CannotMeasure: there are no rows, or cells with different settings among them.
    """
    if not found:
        raise CannotMeasure("there are no results: measure something first.")
    shared: dict[str, Any] = {}
    for row in found:
        for name, value in row["settings"].items():
            if shared.setdefault(name, value) != value:
                raise CannotMeasure(
                    f"results with different settings cannot stand in one table ({name}: "
                    f"{shared[name]} and {value}): keep them in files of their own."
                )
    return shared
