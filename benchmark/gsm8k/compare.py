"""Two outputs of the sweep side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Figures of which less is worse.
_FIGURES = (
    ("output_tok_s", "output tok/s"),
    ("accuracy", "accuracy"),
    ("accept_length", "accept length"),
)
Place = tuple[str, int, str, int]


def place(row: dict[str, Any]) -> Place:
    return row["backend"], row["tp"], row["arm"], row["concurrency"]


def compare(
    before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]], tolerance: float
) -> tuple[list[str], list[str]]:
    """Lines of a table, and sentences about the cells that are worse or missing in the second.

    Args:
        tolerance: a figure may be less by this part of itself.
    """
    lines = [f"{'cell':<44}{'figure':<16}{'first':>12}{'second':>12}{'ratio':>8}"]
    worse = []
    second = {place(row): row for row in after}
    for row in before:
        name = "{}, tp {}, {}, concurrency {}".format(*place(row))
        other = second.get(place(row))
        if row.get("error"):
            lines.append(f"{name:<44}not measured in the first")
            continue
        if other is None or other.get("error"):
            worse.append(f"{name} is not in the second.")
            continue
        for figure, title in _FIGURES:
            a, b = row.get(figure), other.get(figure)
            if a is None or b is None:
                continue
            ratio = b / a if a else float("inf")
            lines.append(f"{name:<44}{title:<16}{a:>12,.3f}{b:>12,.3f}{ratio:>8.3f}")
            if b < a * (1 - tolerance):
                worse.append(f"{name}: {title} {b:,.3f} is less than {a:,.3f} by {1 - ratio:.1%}.")
    known = set(map(place, before))
    for row in after:
        if place(row) not in known:
            lines.append("{}, tp {}, {}, concurrency {}: only in the second".format(*place(row)))
    return lines, worse
