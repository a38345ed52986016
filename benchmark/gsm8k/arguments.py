"""The command line, with names and defaults as published."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmark.shapes import ROOT

WORKERS = ("v1", "v2")
BUNDLED = ROOT / "checkpoints" / "tiny"


def numbers(text: str) -> list[int]:
    values = [int(part) for part in text.split(",") if part]
    if not values or min(values) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a list of positive numbers such as 1,8")
    return values


def names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def workers(text: str) -> list[str]:
    chosen = names(text)
    if not chosen or not set(chosen) <= set(WORKERS):
        raise argparse.ArgumentTypeError(f"{text} is not a list of {', '.join(WORKERS)}")
    return chosen


def sweep_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmark/bench_gsm8k_sweep.py",
        description=__doc__,
        epilog="Arguments after -- go to every server. `compare A B` compares two outputs.",
    )
    add = parser.add_argument
    add("--target-model", default=str(BUNDLED / "target"), help="default: the bundled target")
    add("--draft-model", default=str(BUNDLED / "drafter"), help="default: the bundled drafter")
    add("--tp-sizes", type=numbers, default=[1, 2, 4, 8], metavar="N,…")
    add("--concurrencies", type=numbers, default=[1, 2, 4, 8, 16, 32], metavar="N,…")
    add("--workers", type=workers, default=["v1"], metavar="v1,v2", help="v2 overlaps")
    _add_questions(parser)
    _add_requests(parser)
    _add_servers(parser)
    _add_output(parser)
    return parser


def _add_questions(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("questions").add_argument
    add("--questions-per-concurrency-base", type=int, default=128, metavar="N")
    add("--max-questions-per-config", type=int, default=1024, metavar="N")
    add(
        "--dataset-path",
        type=Path,
        help="a GSM8K JSONL (question, answer); default: GSM8K through the library datasets, or the "
        "bundled problems where no hub can be reached",
    )


def _add_requests(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("requests").add_argument
    add("--max-new-tokens", type=int, default=2048)
    add("--temperature", type=float, default=0.0)
    add("--top-p", type=float, default=1.0)
    add("--top-k", type=int, default=1)
    add("--batch-requests", action="store_true", help="a POST a batch, instead of one a question")
    add("--repeats", type=int, default=1, help="measurements of each cell")


def _add_servers(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("servers").add_argument
    add("--attention-backends", type=names, metavar="A,…", help="default: fa3; CPU: torch_native")
    add("--speculative-draft-attention-backend")
    add("--speculative-dflash-draft-window-size", type=int)
    add("--page-size", type=int)
    add("--skip-baseline", action="store_true")
    add("--disable-radix-cache", action="store_true")
    add("--timeout-s", type=float, default=3600, help="for a start, and for a cell")
    add("--base-url", help="a server that runs already; it alone is measured")


def _add_output(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("output").add_argument
    add("--output-file", type=Path, default=Path("gsm8k.jsonl"), help="JSON lines, a row a cell")
    add("--resume", action="store_true", help="leave out the cells that the output has already")
    add("--summary", type=Path, help="also write PATH.md and PATH.csv; default: beside the output")
    add("--plot", type=Path, metavar="DIR", help="draw the results (needs matplotlib)")
    add("--logs", type=Path, help="folder of the servers' logs; default: beside the output")
    add("--dump-prompts", type=Path, help="write the questions as sglang.bench_serving reads them")
    add("--dry-run", action="store_true", help="say what would be measured")
    add("--disable-tqdm", action="store_true")


def compare_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmark/bench_gsm8k_sweep.py compare",
        description="Two outputs side by side; exit status 1 if a cell of the second is worse.",
    )
    parser.add_argument("files", type=Path, nargs=2, metavar="FILE")
    parser.add_argument(
        "--tolerance", type=float, default=0.05, help="relative loss that is still good"
    )
    return parser
