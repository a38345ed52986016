"""Results on disk: JSON lines, one a cell, each there for good as soon as its cell has ended."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmark.gsm8k.cells import Cell
from benchmark.gsm8k.errors import CannotSweep

Row = dict[str, Any]
_FIELDS = ("key", "backend", "tp", "arm", "concurrency", "settings", "provenance")


def append(path: Path, row: Row) -> None:
    """Writes a row to the disk itself, so that no later fault can take it away."""
    with path.open("ab") as out:
        out.write(json.dumps(row).encode() + b"\n")
        out.flush()
        os.fsync(out.fileno())


def read(path: Path) -> list[Row]:
    """All rows of a file.

    Raises:
        CannotSweep: no such file, or a line that is not a row.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise CannotSweep(f"{path} cannot be read ({error}): name the output of a sweep.") from None
    return [_checked(line, f"line {n} of {path}") for n, line in enumerate(text.splitlines(), 1)]


def _checked(line: str, where: str) -> Row:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict) or any(name not in row for name in _FIELDS):
        raise CannotSweep(f"{where} is not a result of this sweep: name the output of a sweep.")
    return row


def resume(path: Path) -> dict[str, Row]:
    """Rows by key of the cells that are finished.

    A last line without an end was being written when the machine stopped: it is cut off.
    """
    if not path.exists():
        return {}
    whole = path.read_bytes()
    kept = whole.rfind(b"\n") + 1
    if kept < len(whole):
        os.truncate(path, kept)
    return {row["key"]: row for row in read(path) if good(row)}


def cell_of(row: Row) -> Cell:
    return Cell(row["backend"], row["tp"], row["arm"], row["concurrency"])


def good(row: Row) -> bool:
    """Whether the cell was measured."""
    return not row.get("error")


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
        CannotSweep: there are no rows, or cells with different settings among them.
    """
    if not found:
        raise CannotSweep("there are no results: measure something first.")
    shared: dict[str, Any] = {}
    for row in found:
        for name, value in row["settings"].items():
            if shared.setdefault(name, value) != value:
                raise CannotSweep(
                    f"results with different settings cannot stand in one table ({name}: "
                    f"{shared[name]} and {value}): keep them in files of their own."
                )
    return shared
