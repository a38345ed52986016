"""The GSM8K sweep: answers, cells, rows, tables, comparison, refusals."""

from __future__ import annotations

import csv
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from benchmark.bench_gsm8k_sweep import main
from benchmark.gsm8k import cells, summary
from benchmark.gsm8k.answers import final_number
from benchmark.gsm8k.arguments import sweep_parser
from benchmark.gsm8k.cells import Arm, Cell
from benchmark.gsm8k.client import Answer, accept_histogram, percentiles
from benchmark.gsm8k.questions import load_problems, questions
from benchmark.gsm8k.sweep import Sweep

PROBLEM = {"question": "One and one?", "answer": "1+1 = <<1+1=2>>2\n#### 2"}


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 42.", 42),
        ("3 + 4 = 7\n#### 7", 7),
        ("#### $1,234", 1234),
        ("#### -5 apples, not 6", -5),
        (r"so \boxed{18} dollars in 3 days", 18),
        (r"\boxed{\text{about } 3{,}5} then \boxed{12.50}", 12.5),
        (r"#### 3 but \boxed{4}", 4),
        (r"\boxed{none} of the 9", 9),
        ("1,000,000", 1_000_000),
        ("costs .5", 0.5),
        ("an open \\boxed{77", 77),
        ("nothing", None),
    ],
)
def test_final_number(text: str, number: float | None) -> None:
    assert final_number(text) == (None if number is None else Decimal(str(number)))


def test_same_number_in_other_words() -> None:
    assert final_number("#### 12.50") == final_number(r"\boxed{12.5}")


def write_problems(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class Tokenizer:
    chat_template = "yes"

    @staticmethod
    def apply_chat_template(messages: list[dict], **_: Any) -> str:
        return f"<user>{messages[0]['content']}<assistant>"


def test_questions(tmp_path: Path) -> None:
    """Asked in the chat format, with an instruction where the model does not know the problems."""
    problems = load_problems(write_problems(tmp_path / "p.jsonl", PROBLEM))
    asked = questions(problems, Tokenizer(), 3)
    assert len(asked) == 3 and asked[0] == asked[2] and asked[0].answer == 2
    assert asked[0].prompt.startswith("<user>One and one?\nPlease reason")
    bundled = load_problems(Path("checkpoints/tiny/data/test.jsonl"))
    assert "Please reason" not in questions(bundled, Tokenizer(), 1)[0].prompt
    assert len(bundled.rows) == 1000 and problems.sha256 != bundled.sha256


def options(tmp_path: Path, *more: str) -> Any:
    data = tmp_path / "p.jsonl"
    if not data.exists():
        write_problems(data, PROBLEM)
    arguments = ["--dataset-path", str(data), "--output-file", str(tmp_path / "out.jsonl"), *more]
    args = sweep_parser().parse_args(arguments)
    args.server_args, args.logs = [], tmp_path
    return args


def test_published_defaults() -> None:
    args = sweep_parser().parse_args([])
    assert args.tp_sizes == [1, 2, 4, 8] and args.concurrencies == [1, 2, 4, 8, 16, 32]
    assert (args.questions_per_concurrency_base, args.max_questions_per_config) == (128, 1024)
    assert (args.max_new_tokens, args.temperature, args.top_p, args.top_k) == (2048, 0, 1, 1)
    assert [cells.question_count(args, c) for c in (1, 8, 32)] == [128, 1024, 1024]


def test_arms(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A TP size that the machine has not is skipped with a line."""
    args = options(tmp_path, "--tp-sizes", "1,2,4", "--workers", "v1,v2")
    found = cells.arms(args, ["fa3"], gpus=2)
    assert [str(arm) for arm in found] == [
        f"fa3, tp {tp}, {name}" for tp in (1, 2) for name in ("baseline", "v1", "v2")
    ]
    assert capsys.readouterr().err == "skipped: tp 4 (fa3), this machine has 2 GPUs\n"
    args.skip_baseline = True
    assert [arm.name for arm in cells.arms(args, ["a", "b"], gpus=0)] == ["v1", "v2"] * 2
    assert found[2].environment["SGLANG_ENABLE_SPEC_V2"] == "1" and not found[1].environment


def row(arm: str, concurrency: int, rate: float, **more: Any) -> dict[str, Any]:
    return {
        "key": f"{arm}-{concurrency}",
        "backend": "fa3",
        "tp": 1,
        "arm": arm,
        "concurrency": concurrency,
        "output_tok_s": rate,
        "output_tok_s_spread": None,
        "accuracy": 0.85,
        "accept_length": None if arm == "baseline" else 6.5,
        "ttft_ms": {"p50": 10.0, "p99": 20.0},
        "inter_token_ms": {"p50": 1.0, "p99": 2.0},
        "accept_histogram": [] if arm == "baseline" else [1, 2, 3],
        "settings": {"target_model": "target", "draft_model": "drafter", "temperature": 0},
        "provenance": {
            "gpu": {"name": "H200"},
            "versions": {"sglang": "0.5.10"},
            "commit": "abc",
            "machine": {"cpus": 2},
        },
    } | more


ROWS = [
    row("baseline", 1, 100.0),
    row("baseline", 8, 800.0),
    row("v1", 1, 300.0),
    row("v1", 8, 1600.0),
    row("v2", 1, 330.0),
    {**row("v2", 8, 0.0), "error": "the server ended"},
]


def test_resume(tmp_path: Path) -> None:
    """Measured cells are left out; failed ones and a line that was cut short are done again."""
    args = options(tmp_path, "--concurrencies", "1,8", "--tp-sizes", "1")
    arm = Arm("torch_native", 1, "v1")
    settings = Sweep(args).settings
    keys = [cells.key(settings, Cell(arm, c)) for c in (1, 8)]
    lines = [{"key": keys[0]}, {"key": keys[1], "error": "gone"}]
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"key": "cut sho'
    args.output_file.write_text(text)
    args.resume = True
    sweep = Sweep(args)
    assert [cell.concurrency for cell in sweep.cells(arm)] == [8]
    sweep._write({"key": keys[1]})
    assert Sweep(args).cells(arm) == []
    args.temperature = 0.5  # another sweep's cells are not this one's
    assert len(Sweep(args).cells(arm)) == 2


def test_tables() -> None:
    titles = {table.title: table.grid() for table in summary.tables(ROWS)}
    assert titles["Baseline output tok/s"] == [["tp \\ conc", "1", "8"], ["1", "100.0", "800.0"]]
    assert titles["Speedup (DFLASH v1 / baseline)"][1] == ["1", "3.000", "2.000"]
    assert titles["v2 / v1"] == [["tp \\ conc", "1"], ["1", "1.100"]]
    assert titles["DFLASH v2 acceptance length"][1] == ["1", "6.500"]
    alone = [table.title for table in summary.tables(ROWS[:4])]
    assert alone == [
        "Baseline output tok/s",
        "Baseline accuracy",
        "DFLASH output tok/s",
        "DFLASH accuracy",
        "Speedup (DFLASH / baseline)",
        "DFLASH acceptance length",
    ]
    assert "machine: H200" in summary.as_text(ROWS) and "| 1 | 3.000 | 2.000 |" in (
        summary.as_markdown(ROWS)
    )
    lines = list(csv.DictReader(summary.as_csv(ROWS).splitlines()))
    assert len(lines) == 6 and lines[5]["error"] == "the server ended"
    assert lines[2]["ttft_ms_p99"] == "20.0"


@pytest.mark.parametrize(("rate", "status"), [(97.0, 0), (90.0, 1), (300.0, 0)])
def test_compare(tmp_path: Path, capsys: pytest.CaptureFixture, rate: float, status: int) -> None:
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for file, value in zip(files, (100.0, rate), strict=True):
        write_problems(file, row("baseline", 1, value))
    assert main(["compare", *map(str, files), "--tolerance", "0.05"]) == status
    output = capsys.readouterr().out
    assert f"{rate / 100:.3f}" in output
    assert ("worse: fa3, tp 1, baseline, concurrency 1: output tok/s" in output) == bool(status)


def test_compare_of_a_missing_cell(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    a, b = write_problems(tmp_path / "a", *ROWS), write_problems(tmp_path / "b", *ROWS[:4])
    assert main(["compare", str(a), str(b)]) == 1
    assert "v2, concurrency 1 is not in the second" in capsys.readouterr().out
    assert main(["compare", str(b), str(a)]) == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--dataset-path", "nowhere.jsonl"], "--dataset-path nowhere.jsonl cannot be read"),
        (["--dataset-path", "{wrong}"], "line 1 of"),
        (["--base-url", "http://127.0.0.1:9"], "is no SGLang server"),
    ],
)
def test_refusals(
    tmp_path: Path, capsys: pytest.CaptureFixture, arguments: list[str], sentence: str
) -> None:
    wrong = write_problems(tmp_path / "wrong.jsonl", {"question": "no answer"})
    good = write_problems(tmp_path / "p.jsonl", PROBLEM)
    arguments = [argument.format(wrong=wrong) for argument in arguments]
    output = ["--output-file", str(tmp_path / "out.jsonl")]
    assert main(["--dataset-path", str(good), *output, *arguments]) == 1
    assert sentence in capsys.readouterr().err


def test_an_output_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    good, out = write_problems(tmp_path / "p", PROBLEM), write_problems(tmp_path / "out", *ROWS)
    assert main(["--dataset-path", str(good), "--output-file", str(out)]) == 1
    assert "has 6 rows already: add --resume" in capsys.readouterr().err


def test_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    good = write_problems(tmp_path / "p.jsonl", PROBLEM)
    arguments = ["--dataset-path", str(good), "--output-file", str(tmp_path / "out.jsonl")]
    arguments += ["--tp-sizes", "1", "--concurrencies", "1,8", "--workers", "v2", "--dry-run"]
    arguments += ["--speculative-dflash-draft-window-size", "64", "--", "--random-seed", "5"]
    assert main(arguments) == 0
    baseline, worker = capsys.readouterr().out.split("v2:")
    assert "concurrency 8: 1024 questions" in baseline and "DFLASH" not in baseline
    assert "SGLANG_ENABLE_SPEC_V2=1" in worker and "--random-seed 5" in worker
    assert "--speculative-dflash-draft-window-size 64" in worker
    assert not (tmp_path / "out.jsonl").exists()


def test_latencies() -> None:
    """Tokens of one chunk share the wait for it."""
    answer = Answer(arrivals=[(0.1, 1), (0.2, 5), (0.25, 6)])
    assert answer.first_token_ms() == 100
    assert answer.inter_token_ms() == pytest.approx([25, 25, 25, 25, 50])
    assert percentiles([]) is None and percentiles([1, 2, 3])["p50"] == 2
    answers = [Answer(meta={"spec_accept_histogram": h}) for h in ([1, 2], [0, 1, 4], None)]
    assert accept_histogram(answers) == [1, 3, 4]
