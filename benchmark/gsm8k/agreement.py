"""Whether the sweep and `sglang.bench_serving` measure the same: one server, the same prompts."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmark import tables
from benchmark.gsm8k.arguments import PROG, at_least, number
from benchmark.gsm8k.client import Load, ask
from benchmark.gsm8k.errors import CannotSweep
from benchmark.gsm8k.figures import sample
from benchmark.gsm8k.questions import Question, dump, load_problems, load_tokenizer, questions
from benchmark.gsm8k.server import Served

# This module's names of figures, and bench_serving's.
FIGURES = {
    "output_tok_s": "output_throughput",
    "completion_tokens": "total_output_tokens",
    "prompt_tokens": "total_input_tokens",
    "ttft_ms": "median_ttft_ms",
    "inter_token_ms": "median_itl_ms",
    "latency_ms": "median_e2e_latency_ms",
}


def parser() -> argparse.ArgumentParser:
    whole = argparse.ArgumentParser(
        prog=f"{PROG} agreement",
        description="Measures a server that runs already by this sweep and by sglang.bench_serving "
        "in turn, on the same prompts, greedily. Exit status 1 if output tok/s differ by more than "
        "the tolerance.",
    )
    add = whole.add_argument
    add("--base-url", required=True, metavar="URL")
    add("--dataset-path", type=Path, metavar="FILE", help="as of the sweep")
    add("--concurrency", type=at_least(1), default=8, help="%(default)s")
    add("--questions", type=at_least(1), default=128, help="%(default)s")
    add("--max-new-tokens", type=at_least(4), default=2048, help="%(default)s")
    add("--repeats", type=at_least(1), default=3, help="of each, in turn; %(default)s")
    add("--tolerance", type=number(0, 1), default=0.03, help="%(default)s")
    add("--timeout-s", type=number(0, 86400, above=True), default=3600.0, help="%(default)s")
    return whole


def main(given: Sequence[str]) -> int:
    options = parser().parse_args(given)
    served = Served(options.base_url.rstrip("/"))
    tokenizer = served.info()["tokenizer_path"]
    asked = questions(load_problems(options.dataset_path), load_tokenizer(tokenizer), False)
    asked = asked[: options.questions]
    ours: list[dict] = []
    theirs: list[dict] = []
    # The first pair warms the server up; then each is first in turn, as machines drift.
    for turn in range(options.repeats + 1):
        measured: dict[str, dict] = {}
        for who in ("sweep", "bench_serving")[:: 1 if turn % 2 else -1]:
            if who == "sweep":
                measured[who] = _ours(options, served, asked)
            else:
                measured[who] = _theirs(options, asked, tokenizer)
        rates = [f"{who} {found['output_tok_s']:,.1f} tok/s" for who, found in measured.items()]
        print(f"{turn or 'warm-up'}: {', '.join(rates)}", flush=True)
        if turn:
            ours.append(measured["sweep"])
            theirs.append(measured["bench_serving"])
    return _verdict(ours, theirs, options.tolerance)


def _ours(options: argparse.Namespace, served: Served, asked: Sequence[Question]) -> dict:
    greedy = {"temperature": 0.0, "max_new_tokens": options.max_new_tokens}
    load = Load(served.url, greedy, options.concurrency, False, options.timeout_s)
    served.flush()
    found = sample(asked, *ask(load, [question.ids for question in asked]))
    return {name: v["p50"] if isinstance(v := found[name], dict) else v for name in FIGURES}


def _theirs(options: argparse.Namespace, asked: Sequence[Question], tokenizer: str) -> dict:
    with tempfile.TemporaryDirectory(prefix="agreement-") as folder:
        prompts, results = Path(folder, "prompts.jsonl"), Path(folder, "results.jsonl")
        dump(asked, prompts)
        command = [sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang"]
        command += ["--base-url", options.base_url.rstrip("/"), "--disable-tqdm", "--flush-cache"]
        command += ["--model", tokenizer, "--tokenizer", tokenizer, "--disable-ignore-eos"]
        command += ["--dataset-name", "custom", "--dataset-path", str(prompts)]
        command += ["--num-prompts", str(len(asked)), "--max-concurrency", str(options.concurrency)]
        command += ["--sharegpt-output-len", str(options.max_new_tokens)]
        command += ["--warmup-requests", str(options.concurrency), "--output-file", str(results)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=options.timeout_s
            )
        except subprocess.TimeoutExpired:
            raise CannotSweep(
                f"sglang.bench_serving took more than {options.timeout_s:g} s: raise --timeout-s."
            ) from None
        if done.returncode or not results.exists():
            raise CannotSweep(f"sglang.bench_serving failed:\n{done.stdout}{done.stderr}")
        found = json.loads(results.read_text().splitlines()[-1])
    if found["completed"] != len(asked):
        raise CannotSweep(
            f"sglang.bench_serving completed {found['completed']} of {len(asked)} requests: see the "
            "server's log."
        )
    return {name: found[its] for name, its in FIGURES.items()}


def _verdict(ours: list[dict], theirs: list[dict], tolerance: float) -> int:
    table = [["median of repeats", "this sweep", "bench_serving", "ratio"]]
    ratios = {}
    for name in FIGURES:
        pair = [statistics.median(each[name] for each in side) for side in (ours, theirs)]
        ratios[name] = pair[0] / pair[1]
        table.append([name, *(f"{value:,.2f}" for value in pair), f"{ratios[name]:.4f}"])
    print("\n" + tables.as_text(table))
    off = abs(ratios["output_tok_s"] - 1)
    print(f"output tok/s differ by {off:.1%}; {tolerance:.0%} are allowed")
    return int(off > tolerance)
