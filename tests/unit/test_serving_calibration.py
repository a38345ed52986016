"""How right a server was about its drafts, from what it counts."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from benchmark import jsonl
from benchmark.errors import CannotMeasure
from benchmark.traffic.calibration import draw, errors, positions


def page(*counts: tuple[str, int, float]) -> str:
    lines = [
        f'sglang:dflash_{name}_at_position_total{{model_name="m",position="{at}",tp_rank="0"}} {n}'
        for name, at, n in counts
    ]
    return "\n".join(["# HELP something", "sglang:dflash_rounds_total{} 7", *lines, ""])


BEFORE = page(("tried", 1, 100.0), ("survived", 1, 50.0), ("expected", 1, 10.0))
AFTER = page(
    *(("tried", 1, 1100.0), ("survived", 1, 850.0), ("expected", 1, 830.0)),
    *(("tried", 2, 500.0), ("survived", 2, 400.0), ("expected", 2, 385.0)),
    *(("tried", 3, 100.0), ("survived", 3, 10.0), ("expected", 3, 20.0)),
    *(("drafted", 4, 9.0), ("accepted", 4, 3.0)),
)


def test_what_lies_between_two_pages() -> None:
    found = positions(BEFORE, AFTER)
    assert [(each.position, each.tried) for each in found] == [(1, 1000), (2, 500), (3, 100)]
    assert [each.error for each in found] == pytest.approx([0.02, -0.03, 0.1])


def test_errors() -> None:
    """Positions that hardly any draft comes to count for what they are."""
    mean, greatest = errors(positions(BEFORE, AFTER))
    assert mean == pytest.approx((0.02 * 1000 + 0.03 * 500 + 0.1 * 100) / 1600)
    assert greatest == pytest.approx(0.03)


def test_a_server_that_expects_nothing() -> None:
    with pytest.raises(CannotMeasure, match="expects nothing of its drafts"):
        positions(AFTER, AFTER)


def test_rows(tmp_path: Path) -> None:
    jsonl.write(tmp_path / "new" / "rows.jsonl", map(asdict, positions(BEFORE, AFTER)))
    found = jsonl.read(tmp_path / "new" / "rows.jsonl", ("position", "tried"), "this benchmark")
    assert [row["expected"] for row in found] == [820, 385, 20]


def test_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(positions(BEFORE, AFTER), tmp_path / "it.png", "chat, greedy")
    assert (tmp_path / "it.png").stat().st_size > 1000
