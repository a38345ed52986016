"""The GSM8K sweep: cells, resuming, tables, comparison, refusals."""

from __future__ import annotations

import csv
import json
import signal
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from benchmark import servers
from benchmark.bench_gsm8k_sweep import main
from benchmark.errors import CannotMeasure
from benchmark.gsm8k import (
    arguments,
    cells,
    client,
    figures,
    measure,
    questions,
    report,
    rows,
)
from benchmark.gsm8k import server as gsm8k_server
from benchmark.gsm8k.cells import Cell
from benchmark.machine import Machine
from benchmark.shapes import ROOT
from tests.unit.test_gsm8k_questions import PROBLEM, write

CPU, TWO_GPUS = Machine(), Machine(2, (9, 0))


def parsed(*more: str) -> Any:
    given = ["--target-model", "t", "--draft-model", "d", "--output-file", "/nowhere/x", *more]
    given[5] = str(ROOT / "there is no such output.jsonl")
    return arguments.parse(given)


def test_published_defaults() -> None:
    options = arguments.parse([])
    assert options.concurrencies == [1, 2, 4, 8, 16, 32]
    assert (options.questions_per_concurrency_base, options.max_questions_per_config) == (128, 1024)
    assert cells.sampling(options) == {
        "max_new_tokens": 2048,
        "temperature": 0,
        "top_p": 1,
        "top_k": 1,
    }
    planned, skipped = cells.plan(options, Machine(8, (9, 0)))
    assert not skipped and len(planned) == 2 * 4 * 3 * 6
    assert [cells.questions(options, cell) for cell in planned[:6]] == [128, 256, 512, *3 * [1024]]


def test_what_does_not_fit_the_machine_is_skipped_with_a_line() -> None:
    options = parsed("--tp-sizes", "1,2,4", "--concurrencies", "1,8", "--workers", "v2")
    planned, skipped = cells.plan(options, TWO_GPUS)
    assert skipped == ["tp=4 skipped: this machine has 2 GPUs"]
    assert [str(group[0]) for group in cells.servers(planned)] == [
        f"{backend} tp={tp} {arm} conc=1"
        for backend in ("flashinfer", "fa3")
        for tp in (1, 2)
        for arm in ("baseline", "v2")
    ]
    planned, skipped = cells.plan(options, CPU)
    assert {cell.backend for cell in planned} == {"torch_native"} and len(skipped) == 2
    assert Machine(1, (10, 0)).attention_backends() == ["flashinfer"]


def test_servers_differ_in_speculation_only() -> None:
    options = parsed(
        *("--page-size", "16", "--disable-radix-cache", "--concurrencies", "1,8"),
        *("--speculative-dflash-draft-window-size", "64", "--", "--random-seed", "5"),
        *("--speculative-num-draft-tokens", "8"),
    )
    baseline, v2 = (
        gsm8k_server.command(options, TWO_GPUS, Cell("fa3", 2, arm, 1))
        for arm in ("baseline", "v2")
    )
    assert v2[: len(baseline)] == baseline
    assert " ".join(v2[len(baseline) :]) == (
        "--speculative-algorithm DFLASH --speculative-draft-model-path d "
        "--speculative-dflash-draft-window-size 64 --speculative-num-draft-tokens 8"
    )
    for text in ("--tp-size 2", "--page-size 16", "--max-running-requests 8", "--random-seed 5"):
        assert text in " ".join(baseline)
    variables = [gsm8k_server.system(options, arm).environment for arm in ("v1", "v2")]
    assert [each.get("SGLANG_ENABLE_DFLASH_SPEC_V2") for each in variables] == [None, "1"]
    # Neither model is a folder, so servers must be able to download them.
    assert variables[0]["HF_HUB_OFFLINE"] == "0"


def settings(options: Any, cell: Cell) -> dict[str, Any]:
    return cells.settings(options, cell, CPU, {"data": "p", "data_sha256": "0", "instruction": ""})


def key(cell: Cell, *more: str) -> str:
    return cells.key(cell, settings(parsed(*more), cell))


def test_cells_are_the_same_if_all_that_matters_is() -> None:
    baseline, v1 = (Cell("fa3", 1, arm, 8) for arm in ("baseline", "v1"))
    assert key(v1) != key(baseline) != key(Cell("fa3", 1, "baseline", 1))
    assert key(v1, "--concurrencies", "8", "--logs", str(ROOT), "--timeout-s", "9") == key(v1)
    for changed in (("--temperature", "1"), ("--page-size", "16"), ("--", "--random-seed", "5")):
        assert key(baseline, *changed) != key(baseline)
    for changed in (("--draft-model", "e"), ("--", "--speculative-num-draft-tokens", "8")):
        assert key(v1, *changed) != key(v1)
        assert key(baseline, *changed) == key(baseline)  # plain decoding knows no drafter


def answer(text: str, tokens: int, steps: int = 0, **more: Any) -> client.Answer:
    meta = {"completion_tokens": tokens, "prompt_tokens": 5, "finish_reason": {"type": "stop"}}
    meta |= {"spec_verify_ct": steps} if steps else {}
    return client.Answer(text, meta | more, [(0.1, 1), (0.2, 5), (0.25, 6)], 0.3)


ASKED = [questions.Question([1], "q", Decimal(2)), questions.Question([2], "r", Decimal(3))]


def test_figures() -> None:
    """Tokens of one chunk share the wait for it; accept length as a mean and over all tokens."""
    speculated = [
        answer("#### 2", 40, 4, spec_accept_histogram=[1, 2, 1]),
        answer("4", 20, 10, spec_accept_histogram=[10], finish_reason={"type": "length"}),
    ]
    found = figures.sample(ASKED, speculated, 2.0)
    assert (found["output_tok_s"], found["accuracy"], found["cut"]) == (30, 0.5, 1)
    assert found["accept_length"] == (10 + 2) / 2
    assert found["accept_length_of_tokens"] == 60 / 14
    assert found["accept_histogram"] == [11, 2, 1]
    assert found["ttft_ms"] == {"p50": 100, "p99": 100}
    assert speculated[0].inter_token_ms() == pytest.approx([25, 25, 25, 25, 50])
    plain = figures.sample(ASKED, [answer("2", 40), answer("none", 20)], 4.0)
    assert plain["accept_length"] is None and plain["accept_histogram"] == []
    assert (plain["without_number"], plain["verify_steps"]) == (1, 0)
    assert plain["answers_sha256"] != found["answers_sha256"]


def test_repeats() -> None:
    samples = [figures.sample(ASKED, [answer("2", 40, 4), answer("3", 20, 4)], s) for s in (2, 3)]
    found = figures.over_repeats(samples)
    assert (found["output_tok_s"], found["output_tok_s_spread"]) == (25, 5)
    assert (found["right"], found["questions"], found["verify_steps"]) == (4, 2, 16)
    assert figures.over_repeats(samples[:1])["output_tok_s_spread"] is None


def row(arm: str, concurrency: int, rate: float, **more: Any) -> dict[str, Any]:
    """What a sweep writes of a cell."""
    cell = Cell("fa3", 1, arm, concurrency)
    steps = 0 if arm == "baseline" else 3
    answers = [answer("2", 12, steps, spec_accept_histogram=[0, 1, 2]), answer("0", 12, steps)]
    samples = [figures.sample(ASKED, answers, 24 / rate)]
    gpu = {"name": "H200", "driver_version": "580"}
    origin = {"commit": "abc", "changed_files": 0, "versions": {"sglang": "0.5.10"}, "gpu": gpu}
    origin |= {"machine": {"gpus_used": 1}, "date": "2030-01-02", "models": {}}
    found = settings(parsed(), cell)
    whole = {"key": cells.key(cell, found), **vars(cell), "settings": found, "error": None}
    return whole | figures.over_repeats(samples) | {"samples": samples, "provenance": origin} | more


FAILED = {"error": "the server did not start: it ended with status 1\nlog"}
ROWS = [
    *(row("baseline", 1, 100.0), row("baseline", 8, 800.0)),
    *(row("v1", 1, 300.0), row("v1", 8, 1600.0)),
    *(row("v2", 1, 330.0), {**row("v2", 8, 1.0), **FAILED}),
]


def test_finished_cells_are_not_measured_again(tmp_path: Path) -> None:
    """Failed cells are, and so is one whose row was being written when the machine stopped."""
    path = tmp_path / "out.jsonl"
    for each in ROWS[3:]:
        rows.append(path, each)
    with path.open("a") as out:
        out.write(json.dumps(ROWS[0])[:50])
    assert list(rows.resume(path)) == [ROWS[3]["key"], ROWS[4]["key"]]
    rows.append(path, ROWS[5] | {"error": None})
    assert [each["key"] for each in rows.read(path)] == [r["key"] for r in [*ROWS[3:], ROWS[5]]]
    assert rows.latest(rows.read(path))[2]["error"] is None
    assert rows.resume(tmp_path / "none.jsonl") == {}


def test_a_server_that_dies_fails_its_cell_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Another one serves what is left; one that never starts fails all of its cells."""
    options = parsed("--concurrencies", "1,2,4", "--workers", "v1", "--skip-baseline")
    options.output_file = tmp_path / "out.jsonl"
    planned, _ = cells.plan(options, CPU)
    data = {"data": "p", "data_sha256": "0", "instruction": ""}
    sweep = measure.Sweep(options, CPU, planned, [], data)
    started = []

    def started_server(system: Any, device: str, given: list, log: Path, seconds: float) -> Any:
        started.append(log.name)
        log.parent.mkdir(exist_ok=True)
        log.touch()
        if len(started) == 3:
            raise servers.ServerFailed("v1: it ended with status 1")
        from contextlib import nullcontext

        return nullcontext(servers.Server(None, 9, log, given))  # nobody listens at port 9

    monkeypatch.setattr(servers, "running", started_server)
    measure.measure(sweep)
    assert started == [f"torch_native-tp1-v1{n}.log" for n in ("", ".2", ".3")]
    errors = [each["error"] for each in rows.read(options.output_file)]
    assert len(errors) == 3 and all(error.startswith("the server") for error in errors[:2])
    assert "the server did not start: v1: it ended with status 1" == errors[2]
    assert capsys.readouterr().out.count("FAILED") == 3


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT as in a terminal; a shell starts what it puts in the background without it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_signals_wait_while_a_server_starts_or_ends() -> None:
    """Otherwise a Ctrl-C at that moment would leave the server behind."""
    done = []
    with pytest.raises(KeyboardInterrupt), servers.held_back():
        signal.raise_signal(signal.SIGINT)
        done.append("started")
    assert done == ["started"]


def test_tables() -> None:
    [(backend, titled)] = report.all_tables(ROWS)
    tables = dict(titled)
    assert backend == "fa3"
    assert tables["Baseline output tok/s"] == [["tp \\ conc", "1", "8"], ["1", "100.00", "800.00"]]
    assert tables["Speedup (DFLASH / baseline), v1"][1] == ["1", "3.000", "2.000"]
    assert tables["v2 / v1"][1] == ["1", "1.100", "-"]
    assert tables["DFLASH acceptance length, v2"][1] == ["1", "4.000", "failed"]
    assert [title for title, _ in report.all_tables(ROWS[:4])[0][1]] == [
        "Baseline output tok/s",
        "Baseline accuracy",
        "DFLASH output tok/s",
        "DFLASH accuracy",
        "Speedup (DFLASH / baseline)",
        "DFLASH acceptance length",
        "DFLASH tokens per verify step",
    ]
    alone = report.all_tables(ROWS[2:4])[0][1]
    assert "Speedup (DFLASH / baseline)" not in dict(alone)


def test_summary(tmp_path: Path) -> None:
    as_markdown, as_csv = report.write(ROWS, tmp_path / "out.jsonl")
    for expected in ("| 1 | 3.000 | 2.000 |", "`1 x H200, driver 580`", "| temperature | `0.0` |"):
        assert expected in as_markdown.read_text()
    assert "v2 conc=8: the server did not start: it ended with status 1" in report.text(ROWS)
    lines = list(csv.DictReader(as_csv.open()))
    assert len(lines) == 6 and lines[5]["error"].startswith("the server did not start")
    assert lines[2]["accept_length"] == "4.0" and lines[2]["ttft_ms_p99"] == "100.0"
    assert lines[0]["accept_length"] == "" and lines[0]["output_tok_s"] == "100.0"


def test_what_is_not_comparable_stands_in_no_table(capsys: pytest.CaptureFixture) -> None:
    other = {**ROWS[1], "settings": {**ROWS[1]["settings"], "page_size": 16}}
    with pytest.raises(CannotMeasure, match="page_size: None and 16"):
        report.text([ROWS[0], other])


@pytest.mark.parametrize(("rate", "status"), [(97.0, 0), (90.0, 1), (300.0, 0)])
def test_compare(tmp_path: Path, capsys: pytest.CaptureFixture, rate: float, status: int) -> None:
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for file, value in zip(files, (100.0, rate), strict=True):
        write(file, row("baseline", 1, value))
    assert main(["compare", *map(str, files), "--tolerance", "0.05"]) == status
    output = capsys.readouterr().out
    assert f"{rate / 100:.3f}" in output
    assert ("WORSE: fa3 tp=1 baseline conc=1: output tok/s 100.000 → 90.000" in output) == status


def test_compare_of_cells_that_are_not_there(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    a, b = write(tmp_path / "a", *ROWS), write(tmp_path / "b", *ROWS[:4])
    assert main(["compare", str(a), str(b)]) == 1
    assert "WORSE: fa3 tp=1 v2 conc=1 is missing in B" in capsys.readouterr().out
    assert main(["compare", str(b), str(a)]) == 0
    assert "fa3 tp=1 v2 conc=1 is only in B" in capsys.readouterr().out
    failed = write(tmp_path / "c", ROWS[0] | FAILED)
    assert main(["compare", str(b), str(failed)]) == 1
    assert "WORSE: fa3 tp=1 baseline conc=1 failed in B" in capsys.readouterr().out
    assert main(
        ["compare", str(write(tmp_path / "d", ROWS[0])), str(write(tmp_path / "e", ROWS[2]))]
    )
    assert "have no cell in common" in capsys.readouterr().err


def test_lower_accuracy_is_worse(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    a = write(tmp_path / "a", row("v1", 1, 9.0))
    b = write(tmp_path / "b", row("v1", 1, 9.0, accuracy=0.4, accept_length=3.9))
    assert main(["compare", str(a), str(b)]) == 1
    worse = [line for line in capsys.readouterr().out.splitlines() if line.startswith("WORSE")]
    assert worse == ["WORSE: fa3 tp=1 v1 conc=1: accuracy 0.500 → 0.400"]


REFUSALS: list[tuple[list[str], str]] = [
    (["--dataset-path", "nowhere.jsonl"], "--dataset-path nowhere.jsonl cannot be read"),
    (["--dataset-path", "{wrong}"], "line 1 of"),
    (["--dataset-path", "{wrong}", "--top-k", "0"], "--top-k 0 is no number of tokens"),
    (["--base-url", "http://127.0.0.1:9"], "http://127.0.0.1:9 does not answer"),
    (["--base-url", "http://x", "--tp-sizes", "2"], "--tp-sizes cannot be given to a server"),
    (["--base-url", "http://x", "--workers", "v1,v2"], "--base-url is one server"),
    (["--base-url", "http://x", "--", "--a"], "server arguments cannot be given to a server"),
    (["--", "--tp-size=2"], "--tp-size cannot follow --"),
    (["--tp-sizes", "64"], "no cell is left"),
    (["--output-file", "/proc/no/x"], "--output-file: the folder /proc/no cannot be made"),
    (["--output-file", "{wrong}"], "has results already: go on with --resume"),
    (["--output-file", "{wrong}", "--resume", "--dataset-path", "{good}"], "is not a result"),
    (["--plot", "{wrong}"], "--plot"),
    (["compare", "{wrong}", "nowhere"], "line 1 of"),
    (["report", "nowhere"], "nowhere cannot be read"),
]


@pytest.mark.parametrize(("given", "sentence"), REFUSALS, ids=[s for _, s in REFUSALS])
def test_refusals(
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    given: list[str],
    sentence: str,
) -> None:
    monkeypatch.setattr(Machine, "here", lambda: CPU)
    wrong = write(tmp_path / "wrong.jsonl", {"question": "no answer"})
    good = write(tmp_path / "good.jsonl", PROBLEM)
    given = [each.format(wrong=wrong, good=good) for each in given]
    if given[0] not in ("compare", "report"):
        models = ["--target-model", str(ROOT / "checkpoints/tiny/target")]
        models += ["--draft-model", str(ROOT / "checkpoints/tiny/drafter")]
        models = [] if "--base-url" in given else models
        given = [*models, "--output-file", str(tmp_path / "out.jsonl"), *given]
    assert main(given) == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    "given",
    [
        ["--concurrencies", "1,x"],
        ["--concurrencies", "0"],
        ["--workers", "v3"],
        ["--timeout-s", "0"],
        ["--temperature", "nan"],
        ["--top-p", "1.5"],
        ["--repeats", "0"],
        ["--attention-backends", ","],
    ],
)
def test_values_that_cannot_be(given: list[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main([*given, "--dry-run"])
    assert refused.value.code == 2


def test_dry_run(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Machine, "here", lambda: TWO_GPUS)
    given = ["--output-file", str(tmp_path / "out.jsonl"), "--tp-sizes", "1,4", "--dry-run"]
    given += ["--concurrencies", "1,8", "--workers", "v2", "--attention-backends", "fa3"]
    assert main(given) == 0
    baseline, worker = capsys.readouterr().out.split("SGLANG_ENABLE_SPEC_V2=1")
    assert "tp=4 skipped: this machine has 2 GPUs" in baseline
    assert "fa3 tp=1 baseline conc=8 questions=1024" in baseline and "DFLASH" not in baseline
    assert "--model-path Qwen/Qwen3-8B" in baseline
    assert "--speculative-draft-model-path z-lab/Qwen3-8B-DFlash-b16" in worker
    assert worker.endswith("4 cells, 1 measurements each\n")
    assert list(tmp_path.iterdir()) == []
