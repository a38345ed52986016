"""Plots of the GSM8K sweep."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmark.bench_gsm8k_sweep import main
from benchmark.gsm8k import plot
from tests.unit.test_gsm8k_questions import write
from tests.unit.test_gsm8k_sweep import ROWS, row


def test_plots_name_models_and_machine() -> None:
    pytest.importorskip("matplotlib")
    on_cpu = [{**each, "provenance": {**each["provenance"], "gpu": {}}} for each in ROWS[:2]]
    on_cpu[0]["provenance"]["machine"] = on_cpu[1]["provenance"]["machine"] = {"cpus": 2}
    for found, machine in ((ROWS, "H200"), (on_cpu, "CPU, 2 cores")):
        drawn = plot.pictures(found)
        assert set(drawn) >= {"throughput", "latency"}
        for picture in drawn.values():
            first, second = picture.get_suptitle().splitlines()
            assert first.startswith("target t") and ("drafter d" in first) == (found is ROWS)
            assert second == f"{machine}; SGLang 0.5.10"


def test_ticks_of_plots_are_round_numbers() -> None:
    """Not powers of two, as 16,384 tokens a second, and with thousands apart."""
    pytest.importorskip("matplotlib")
    rates = (row("baseline", 1, 600.0), row("v1", 1, 4000.0), row("v1", 8, 32_000.0))
    drawn = plot.pictures(rates)
    ticks = {name: ticks_of(picture) for name, picture in drawn.items()}
    assert ticks["throughput"][1] == ["500", "1,000", "2,000", "5,000", "10,000", "20,000"]
    assert ticks["throughput"][0] == ["1", "8"]
    assert "30,000" in ticks["latency"][0] and len(ticks["latency"][0]) <= 8
    # The columns of a picture share an axis, which is labelled once.
    other = {**ROWS[0], "backend": "triton"}
    left, right = plot.pictures([ROWS[0], other])["throughput"].axes
    assert left.get_ylabel() and not right.get_ylabel()


def ticks_of(picture: Any) -> tuple[list[str], list[str]]:
    """Labels on the x axis and on the y axis, those that can be seen."""
    picture.canvas.draw()
    (axes,) = picture.axes
    return tuple(
        [
            label.get_text()
            for place, label in zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=True)
            if low <= place <= high
        ]
        for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim()))
    )


def test_plots(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch) -> None:
    results = write(tmp_path / "out.jsonl", *ROWS)
    if importlib.util.find_spec("matplotlib") is not None:
        assert main(["report", str(results), "--plot", str(tmp_path / "plots")]) == 0
        names = ("throughput", "speedup", "accept_histogram", "latency")
        for name in names:
            assert (tmp_path / "plots" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        main(["report", str(write(tmp_path / "b", *ROWS[:2])), "--plot", str(tmp_path / "more")])
        assert {path.stem for path in (tmp_path / "more").iterdir()} == {"throughput", "latency"}
    find: Callable = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name)
    )
    assert main(["report", str(results), "--plot", str(tmp_path)]) == 2
    assert "needs matplotlib, which is not installed" in capsys.readouterr().err
