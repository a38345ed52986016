"""`python -m benchmark.gsm8k.agreement URL`: the sweep's client against `sglang.bench_serving`.

Both ask one server the same questions at the same concurrency, in turns; the ratio of their output
tokens a second says whether one of them measures something else.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import requests
from transformers import AutoTokenizer

from benchmark.gsm8k import servers
from benchmark.gsm8k.client import Load, ask
from benchmark.gsm8k.errors import CannotSweep
from benchmark.gsm8k.questions import Question, dump, load_problems, questions

SECONDS = 600


def ours(url: str, asked: Sequence[Question], concurrency: int, new_tokens: int) -> float:
    """Output tokens a second as the sweep measures them."""
    sampling = {"temperature": 0, "max_new_tokens": new_tokens}
    load = Load(url, sampling, concurrency, batch=False, seconds=SECONDS)
    answers, seconds = ask(load, [question.prompt for question in asked])
    return sum(answer.tokens for answer in answers) / seconds


def theirs(
    url: str, model: str, asked: Sequence[Question], concurrency: int, new_tokens: int
) -> float:
    """Output tokens a second as `sglang.bench_serving` measures them."""
    with tempfile.TemporaryDirectory() as name:
        prompts, output = Path(name) / "prompts.jsonl", Path(name) / "output.jsonl"
        dump(asked, prompts)
        command = [sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang"]
        command += ["--base-url", url, "--model", model, "--disable-tqdm", "--disable-ignore-eos"]
        command += ["--dataset-name", "custom", "--dataset-path", str(prompts)]
        command += ["--num-prompts", str(len(asked)), "--max-concurrency", str(concurrency)]
        command += ["--sharegpt-output-len", str(new_tokens), "--output-file", str(output)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        if done.returncode:
            raise CannotSweep(f"sglang.bench_serving failed: {done.stderr[-400:]}")
        return json.loads(output.read_text().splitlines()[-1])["output_throughput"]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmark.gsm8k.agreement", description=__doc__
    )
    parser.add_argument("url", help="of the server, on this machine")
    parser.add_argument("--dataset-path", type=Path)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--questions", type=int, default=256)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tolerance", type=float, default=0.03)
    args = parser.parse_args()
    model = requests.get(f"{args.url}/get_model_info", timeout=60).json()["model_path"]
    tokenizer = AutoTokenizer.from_pretrained(model)
    asked = questions(load_problems(args.dataset_path), tokenizer, args.questions)
    rates: dict[str, list[float]] = {"sweep": [], "bench_serving": []}
    ours(args.url, asked, args.concurrency, args.max_new_tokens)  # warms up
    for _ in range(args.turns):
        servers.flush(args.url)
        rates["sweep"].append(ours(args.url, asked, args.concurrency, args.max_new_tokens))
        servers.flush(args.url)
        rates["bench_serving"].append(
            theirs(args.url, model, asked, args.concurrency, args.max_new_tokens)
        )
    mine, its = (statistics.median(rates[name]) for name in ("sweep", "bench_serving"))
    print(json.dumps(rates | {"ratio": round(mine / its, 4), "concurrency": args.concurrency}))
    return 0 if abs(mine / its - 1) <= args.tolerance else 1


if __name__ == "__main__":
    sys.exit(main())
