"""Whether a benchmark and `sglang.bench_serving` measure the same: one server, the same prompts, in turn."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmark import tables
from benchmark.errors import CannotMeasure
from benchmark.options import at_least, number
from benchmark.prompts import dump


def parser(prog: str, whose: str) -> argparse.ArgumentParser:
    """Options that all benchmarks have in common here."""
    whole = argparse.ArgumentParser(
        prog=f"{prog} agreement",
        description=f"Measures a server that runs already by {whose} and by sglang.bench_serving in "
        "turn, on the same prompts, greedily. Exit status 1 if output tok/s differ by more than the "
        "tolerance.",
    )
    add = whole.add_argument
    add("--base-url", required=True, metavar="URL")
    add("--concurrency", type=at_least(1), default=8, help="%(default)s")
    add("--questions", type=at_least(1), default=128, help="%(default)s")
    add("--max-new-tokens", type=at_least(4), default=2048, help="%(default)s")
    add("--repeats", type=at_least(1), default=3, help="of each, in turn; %(default)s")
    add("--tolerance", type=number(0, 1), default=0.03, help="%(default)s")
    add("--timeout-s", type=number(0, 86400, above=True), default=3600.0, help="%(default)s")
    return whole


def compare(
    options: argparse.Namespace,
    name: str,
    ours: Callable[[], dict[str, float]],
    prompts: Sequence[str],
    tokenizer: str,
    figures: Mapping[str, str],
) -> int:
    """Measures in turn and prints the medians; the exit status.

    Args:
        name: of our side.
        ours: one measurement by this side, the figures by name.
        prompts: what it asks, as text, for the other side.
        figures: our names of figures, and bench_serving's. `output_tok_s` is one of them.
    """
    found: dict[str, list[dict]] = {name: [], "bench_serving": []}
    # The first pair warms the server up; then each is first in turn, as machines drift.
    for turn in range(options.repeats + 1):
        measured: dict[str, dict] = {}
        for who in list(found)[:: 1 if turn % 2 else -1]:
            if who == name:
                measured[who] = ours()
            else:
                theirs = bench_serving(options, prompts, tokenizer)
                measured[who] = {mine: theirs[its] for mine, its in figures.items()}
        rates = [f"{who} {found['output_tok_s']:,.1f} tok/s" for who, found in measured.items()]
        print(f"{turn or 'warm-up'}: {', '.join(rates)}", flush=True)
        for who in measured if turn else ():
            found[who].append(measured[who])
    return _verdict(found, list(figures), options.tolerance)


def bench_serving(options: argparse.Namespace, prompts: Sequence[str], tokenizer: str) -> dict:
    """What `sglang.bench_serving` of the release reports.

    Raises:
        CannotMeasure: it failed, or took too long.
    """
    with tempfile.TemporaryDirectory(prefix="agreement-") as folder:
        data, results = Path(folder, "prompts.jsonl"), Path(folder, "results.jsonl")
        dump([(prompt, "") for prompt in prompts], data)
        command = [sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang"]
        command += ["--base-url", options.base_url.rstrip("/"), "--disable-tqdm", "--flush-cache"]
        command += ["--model", tokenizer, "--tokenizer", tokenizer, "--disable-ignore-eos"]
        command += ["--dataset-name", "custom", "--dataset-path", str(data)]
        command += ["--num-prompts", str(len(prompts))]
        command += ["--max-concurrency", str(options.concurrency)]
        command += ["--sharegpt-output-len", str(options.max_new_tokens)]
        command += ["--warmup-requests", str(options.concurrency), "--output-file", str(results)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=options.timeout_s
            )
        except subprocess.TimeoutExpired:
            raise CannotMeasure(
                f"sglang.bench_serving took more than {options.timeout_s:g} s: raise --timeout-s."
            ) from None
        if done.returncode or not results.exists():
            raise CannotMeasure(f"sglang.bench_serving failed:\n{done.stdout}{done.stderr}")
        found = json.loads(results.read_text().splitlines()[-1])
    if found["completed"] != len(prompts):
        raise CannotMeasure(
            f"sglang.bench_serving completed {found['completed']} of {len(prompts)} requests: see the "
            "server's log."
        )
    return found


def _verdict(found: Mapping[str, list[dict]], figures: Sequence[str], tolerance: float) -> int:
    table = [["median of repeats", *found, "ratio"]]
    ratios = {}
    for name in figures:
        pair = [statistics.median(each[name] for each in side) for side in found.values()]
        ratios[name] = pair[0] / pair[1]
        table.append([name, *(f"{value:,.2f}" for value in pair), f"{ratios[name]:.4f}"])
    print("\n" + tables.as_text(table))
    off = abs(ratios["output_tok_s"] - 1)
    print(f"output tok/s differ by {off:.1%}; {tolerance:.0%} are allowed")
    return int(off > tolerance)
