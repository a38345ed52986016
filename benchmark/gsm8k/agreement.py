"""Whether the sweep and `sglang.bench_serving` measure the same."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmark import agreement
from benchmark.gsm8k.arguments import PROG
from benchmark.gsm8k.client import Load, ask
from benchmark.gsm8k.figures import sample
from benchmark.gsm8k.questions import Question, load_problems, questions
from benchmark.gsm8k.server import Served
from benchmark.prompts import load_tokenizer

# This package's names of figures, and bench_serving's.
FIGURES = {
    "output_tok_s": "output_throughput",
    "completion_tokens": "total_output_tokens",
    "prompt_tokens": "total_input_tokens",
    "ttft_ms": "median_ttft_ms",
    "inter_token_ms": "median_itl_ms",
    "latency_ms": "median_e2e_latency_ms",
}


def parser() -> argparse.ArgumentParser:
    whole = agreement.parser(PROG, "this sweep")
    whole.add_argument("--dataset-path", type=Path, metavar="FILE", help="as of the sweep")
    return whole


def main(given: Sequence[str]) -> int:
    options = parser().parse_args(given)
    served = Served(options.base_url.rstrip("/"))
    tokenizer = served.info()["tokenizer_path"]
    asked = questions(load_problems(options.dataset_path), load_tokenizer(tokenizer), False)
    asked = asked[: options.questions]
    return agreement.compare(
        options,
        "this sweep",
        lambda: _ours(options, served, asked),
        [question.text for question in asked],
        tokenizer,
        FIGURES,
    )


def _ours(options: argparse.Namespace, served: Served, asked: Sequence[Question]) -> dict:
    greedy = {"temperature": 0.0, "max_new_tokens": options.max_new_tokens}
    load = Load(served.url, greedy, options.concurrency, False, options.timeout_s)
    served.flush()
    found = sample(asked, *ask(load, [question.ids for question in asked]))
    return {name: v["p50"] if isinstance(v := found[name], dict) else v for name in FIGURES}
