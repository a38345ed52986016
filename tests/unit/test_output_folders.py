"""Every tool that writes a file makes the file's folder, before the work rather than after it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmark import measure, rounds
from benchmark.bench_gsm8k_sweep import main as sweep
from benchmark.machine import Machine
from benchmark.shapes import ROOT
from benchmark.traffic.arguments import parse as parse_serving
from sglang_dflash.losslessness.__main__ import main as losslessness
from sglang_dflash.soak.__main__ import parse as parse_soak

NOBODY = "http://127.0.0.1:9"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One that is not there, nor is its parent."""
    return tmp_path / "new" / "er"


def test_losslessness(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "prompts").write_text("x")
    given = ["--prompts", str(tmp_path / "prompts"), "--speculative-url", NOBODY]
    for option in ("--json", "--plot"):
        path = folder / option / "x.png"
        assert losslessness([*given, "--plain-url", NOBODY, option, str(path)]) == 2  # no servers
        assert path.parent.is_dir()
    given = [*given[:2], "--model-path", "x", "--draft-model-path", "y", "--logs", "/proc/no"]
    assert losslessness(given) == 2
    assert capsys.readouterr().err.endswith(
        "error: the folder /proc/no cannot be made (No such file or directory): name another one.\n"
    )


def test_soak(folder: Path, capsys: pytest.CaptureFixture) -> None:
    assert parse_soak([NOBODY, "--output", str(folder / "x.json")]).output.parent.is_dir()
    with pytest.raises(SystemExit, match="2"):
        parse_soak([NOBODY, "--output", "/proc/no/x.json"])
    assert "argument --output: the folder /proc/no cannot be made" in capsys.readouterr().err


def test_sweep(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "here", lambda: Machine())
    output, dumped = folder / "out.jsonl", folder / "prompts" / "x.jsonl"
    given = ["--output-file", str(output), "--dump-prompts", str(dumped)]
    assert sweep([*given, "--dry-run"]) == 0
    assert not folder.exists()
    assert sweep([*given, "--base-url", NOBODY]) == 2  # for want of a server
    assert output.parent.is_dir() and dumped.parent.is_dir()


def test_serving(folder: Path) -> None:
    parse_serving(["--output-file", str(folder / "out.jsonl")])
    assert folder.is_dir()


def test_rounds(folder: Path, tmp_path: Path) -> None:
    given = ["measure", "--shape", "tiny", "--output", str(folder / "out.jsonl")]
    measure._plan(rounds.parser().parse_args(given), tmp_path)
    assert folder.is_dir()
    results = ROOT / "benchmark" / "results" / "h200-qwen3-8b.jsonl"
    report = folder / "report" / "x.md"
    assert rounds.main(["report", str(results), "--write", str(report)]) == 0
    assert report.is_file()
