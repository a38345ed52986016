"""Results on disk: JSON lines, one a cell, each there for good as soon as its cell has ended."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmark.errors import CannotMeasure

Row = dict[str, Any]


def append(path: Path, row: Row) -> None:
    """Writes a row to the disk itself, so that no later fault can take it away."""
    with path.open("ab") as out:
        out.write(json.dumps(row).encode() + b"\n")
        out.flush()
        os.fsync(out.fileno())


def write(path: Path, rows: Iterable[Row]) -> None:
    """Writes a file of rows anew, and its folder where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read(path: Path, fields: Iterable[str], whose: str) -> list[Row]:
    """All rows of a file.

    Args:
        fields: that every row has.
        whose: the benchmark, as in "this sweep".

    Raises:
        CannotMeasure: no such file, or a line that is not a row.
    """
    name = f"name the output of {whose.replace('this', 'a')}."
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CannotMeasure(f"{path} cannot be read ({error}): {name}") from None
    found = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict) or any(field not in row for field in fields):
            raise CannotMeasure(f"line {number} of {path} is not a result of {whose}: {name}")
        found.append(row)
    return found


def cut_off(path: Path) -> None:
    """Removes a last line without an end, which was being written when the machine stopped."""
    if path.exists():
        whole = path.read_bytes()
        kept = whole.rfind(b"\n") + 1
        if kept < len(whole):
            os.truncate(path, kept)


def good(row: Row) -> bool:
    """Whether the cell was measured."""
    return not row.get("error")
