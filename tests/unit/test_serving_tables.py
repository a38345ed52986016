"""Rows of the serving benchmark: resuming, tables, notes, pictures."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from benchmark.errors import CannotMeasure
from benchmark.traffic import cells, counters, figures, plot, report, rows
from benchmark.traffic.arrivals import Closed
from benchmark.traffic.cells import Cell, Place
from benchmark.traffic.clients import Heard
from tests.unit.test_serving_benchmark import answer


def row(system: str, clients: int, rate: float, digest: str = "aaaa" * 4, **more: Any) -> rows.Row:
    """What a run writes of a cell."""
    cell = Cell(Place("chat", "greedy", Closed(clients), more.pop("repeat", 0)), system)
    heard = Heard([answer(i, 0, 1) for i in range(4)], 0.1, 0.2, 0.0)
    steps = None if system == "plain" else 5
    counted = counters.Counters(steps, 44)
    found = figures.figures(heard, figures.Goal(500, 30), counted, clients)
    settings = {"target_model": "t", "draft_model": None if system == "plain" else "d"}
    settings |= {"sampling": {"temperature": 0.7}, "goal": {"ttft_ms": 500.0}, "seconds": 8.0}
    settings |= {"least_per_client": 2, "requests": None}
    origin = {"commit": "abc", "versions": {"sglang": "0"}, "gpu": {}, "machine": {"cpus": 2}}
    head = {"benchmark": "serving", "key": cells.key(cell, settings), **cell.fields()}
    body = {"error": None, **found, "output_tok_s": rate, "flushed": True, "answers": digest}
    return head | {"settings": settings} | body | {"provenance": origin | {"date": "1"}} | more


DIED = {"error": "the server died: it is gone", "settings": row("v1", 8, 1)["settings"]}
ROWS = [
    row("plain", 1, 100),
    row("v2", 1, 300),
    row("v2", 1, 500, repeat=1),
    row("plain", 8, 800),
    row("v2", 8, 1000, digest="aaaabbbbaaaa"),
    {**row("v1", 8, 1), **DIED, "provenance": {}},
]


def test_rows_are_resumed_and_the_failed_ones_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    assert rows.resume(path) == {}
    path.write_text("".join(json.dumps(each) + "\n" for each in ROWS) + json.dumps(ROWS[0])[:90])
    assert list(rows.resume(path)) == [each["key"] for each in ROWS[:5]]
    assert len(rows.read([path])) == 6  # the torn line is gone
    again = rows.latest([*ROWS, row("v1", 8, 7)])
    assert len(again) == 6 and again[-1]["output_tok_s"] == 7
    assert len({each["key"] for each in ROWS}) == 6


def test_tables(tmp_path: Path) -> None:
    found = report.Found(ROWS)
    assert report.throughput(found, ("chat", "greedy")) == [
        ["output tok/s", "c=1", "c=8"],
        ["plain", "100", "800"],
        ["v2", "400", "1,000 ≠1"],  # the median of two; an answer of three differs
        ["v1", "–", "failed"],
    ]
    whole = report.everything(found)
    assert [line[:4] for line in whole[1:3]] == [
        ["chat", "greedy", "c=1", "plain"],
        ["chat", "greedy", "c=1", "v2"],
    ]
    assert [line[-1] for line in whole[1:]] == ["–", "0 of 8", "–", "≠ 1 of 3", ""]
    by_name = dict(zip(whole[0], whole[2], strict=True))
    assert by_name["accept length"] == "8.00" and by_name["TTFT"] == "100 / 100"
    text = report.text(ROWS)
    assert "1 of 6 cells failed" in text and "- v1: the server died: it is gone" in text
    written = report.write(ROWS, tmp_path / "out.jsonl").read_text()
    assert "| v2 | 400 | 1,000 ≠1 |" in written
    with pytest.raises(CannotMeasure, match="no results"):
        report.text([])


def test_ratio_to_the_best_of_the_others() -> None:
    """Of the better worker, to whoever is fastest at that load; nothing where either is missing."""
    others = [row("vllm", 1, 320), row("sglang", 1, 200), row("sglang", 8, 500)]
    table = report.throughput(report.Found([*ROWS, *others]), ("chat", "greedy"))
    assert table[-1] == ["v2 / the best of the others", "1.25", "2.00"]
    table = report.throughput(report.Found([*ROWS, row("vllm", 16, 320)]), ("chat", "greedy"))
    assert table[-1] == ["v2 / the best of the others", "–", "–", "–"]


@pytest.mark.parametrize(
    ("name", "value"), [("tp_size", 2), ("max_tokens", 9), ("server_args", ["--page-size", "16"])]
)
def test_what_was_measured_otherwise_stands_in_another_table(name: str, value: Any) -> None:
    other = row("v2", 8, 9)
    other["settings"] = other["settings"] | {name: value}
    with pytest.raises(CannotMeasure, match=f"cannot stand in one table .{name}"):
        report.text([*ROWS, other])


def test_notes_say_what_a_reader_must_know() -> None:
    odd = [
        row("v2", 8, 9, client_busiest=0.9),
        row("v1", 8, 9, server_tokens=40.0, flushed=False),
    ]
    odd[1]["provenance"]["kv_tokens"] = {"wanted": 60000, "has": 20000}
    text = "\n".join(report.notes(odd))
    assert "busy more than 80%" in text and "chat greedy c=8 v2" in text
    assert "v1: the answers have 44 tokens, and the server counted 40" in text
    assert "v1 has 20,000 slots in its KV pool instead of 60,000" in text
    assert "could not be emptied before cells of v1" in text
    assert report.notes(ROWS[:5]) == []


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="the extra plot")
def test_pictures(tmp_path: Path) -> None:
    open_loop = [
        {**each, "clients": None, "rate": 2.0, "key": "x", "kind": "mixed"} for each in ROWS[:2]
    ]
    drawn = plot.draw([*ROWS, *open_loop], tmp_path / "plots")
    assert [path.name for path in drawn] == ["throughput.png", "frontier.png"]
    assert all(path.stat().st_size > 10_000 for path in drawn)
