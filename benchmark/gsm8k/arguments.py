"""The command line of the sweep: names and defaults as published, and what is refused."""

from __future__ import annotations

import argparse
import importlib.util
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmark.gsm8k.errors import CannotSweep

PROG = "benchmark/bench_gsm8k_sweep.py"
WORKERS = ("v1", "v2")
TARGET, DRAFTER = "Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16"
TP_SIZES = (1, 2, 4, 8)
TOLERANCE = 0.05
# What only a server that is started here can be given; all of these are None or False by default.
_OF_SERVERS = (
    "draft_model",
    "tp_sizes",
    "attention_backends",
    "speculative_draft_attention_backend",
    "speculative_dflash_draft_window_size",
    "page_size",
    "skip_baseline",
    "disable_radix_cache",
    "server_arguments",
)
# Server arguments that cells differ in, or that are chosen here.
_OURS = (
    *("--model-path", "--model", "--host", "--port", "--attention-backend", "--page-size"),
    *("--tp", "--tp-size", "--tensor-parallel-size", "--disable-radix-cache"),
    *("--speculative-algorithm", "--speculative-draft-model-path"),
    *("--speculative-draft-attention-backend", "--speculative-dflash-draft-window-size"),
)


def at_least(smallest: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        if int(text) < smallest:
            raise argparse.ArgumentTypeError(f"{text} is less than {smallest}")
        return int(text)

    return integer


def number(least: float, most: float, above: bool = False) -> Callable[[str], float]:
    """A number from `least` (or above it) to `most`."""

    def real(text: str) -> float:
        value = float(text)
        if not least <= value <= most or math.isinf(value) or (above and value == least):
            limit = "" if math.isinf(most) else f" and at most {most:g}"
            raise argparse.ArgumentTypeError(
                f"{text} is not {'above' if above else 'at least'} {least:g}{limit}"
            )
        return value

    return real


def numbers(text: str) -> list[int]:
    """Positive numbers, each once."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text} is not a list of positive numbers such as 1,8")
    return list(dict.fromkeys(int(part) for part in parts))


def names(text: str) -> list[str]:
    found = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not found:
        raise argparse.ArgumentTypeError("the list is empty")
    return found


def workers(text: str) -> list[str]:
    chosen = names(text)
    if not set(chosen) <= set(WORKERS):
        raise argparse.ArgumentTypeError(f"{text} is not a list of {', '.join(WORKERS)}")
    return chosen


def sweep_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROG,
        description="Plain decoding against DFLASH on GSM8K across TP sizes and concurrencies.",
        epilog="What follows -- goes to every server, arguments that begin with --speculative- to "
        "those with DFLASH. Other commands: report FILE prints results again, compare A B compares "
        "two, agreement compares with sglang.bench_serving; each has its own --help.",
    )
    add = parser.add_argument_group("cells").add_argument
    add("--target-model", metavar="MODEL", help=f"folder or name at the hub; {TARGET}")
    add("--draft-model", metavar="MODEL", help=f"the same of the drafter; {DRAFTER}")
    add("--tp-sizes", type=numbers, metavar="N,…", help="1,2,4,8; too large ones are skipped")
    add("--concurrencies", type=numbers, default=[1, 2, 4, 8, 16, 32], metavar="N,…")
    add("--attention-backends", type=names, metavar="A,…", help="flashinfer,fa3; CPU: torch_native")
    add("--workers", type=workers, metavar="v1,v2", help="without overlap, with; default: both")
    add("--skip-baseline", action="store_true", help="no plain decoding")
    add("--repeats", type=at_least(1), default=1, help="measurements of each cell; %(default)s")
    _add_questions(parser)
    _add_servers(parser)
    _add_output(parser)
    return parser


def _add_questions(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("questions").add_argument
    add(
        "--dataset-path",
        type=Path,
        metavar="FILE",
        help="GSM8K's JSON lines (question, answer); default: GSM8K through the library datasets, or "
        "the bundled problems where no hub can be reached",
    )
    count = at_least(1)
    add(
        "--questions-per-concurrency-base", type=count, default=128, metavar="N", help="%(default)s"
    )
    add("--max-questions-per-config", type=count, default=1024, metavar="N", help="%(default)s")
    add("--max-new-tokens", type=count, default=2048, metavar="N", help="%(default)s")
    add("--temperature", type=number(0, math.inf), default=0.0, help="%(default)s")
    add("--top-p", type=number(0, 1, above=True), default=1.0, help="%(default)s")
    add("--top-k", type=int, default=1, help="%(default)s; -1: all tokens")
    add("--enable-thinking", action="store_true", help="tell the chat template so")
    add(
        "--batch-requests",
        action="store_true",
        help="send as many questions as the concurrency in one request, and wait for all",
    )


def _add_servers(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("servers").add_argument
    add("--speculative-draft-attention-backend", metavar="A")
    add("--speculative-dflash-draft-window-size", type=at_least(1), metavar="TOKENS")
    add("--page-size", type=at_least(1), metavar="TOKENS")
    add("--disable-radix-cache", action="store_true")
    add("--base-url", metavar="URL", help="measure this server, which runs already, and no other")
    add(
        "--timeout-s",
        type=number(0, math.inf, above=True),
        default=3600.0,
        metavar="SECONDS",
        help="for the start of a server, and for one measurement; %(default)s",
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("output").add_argument
    add(
        "--output-file",
        type=Path,
        default=Path("gsm8k_sweep.jsonl"),
        metavar="FILE",
        help="JSON lines, a row a cell; the summary goes beside it as .md and .csv; %(default)s",
    )
    add("--resume", action="store_true", help="go on: measure only what FILE does not have yet")
    add("--logs", type=Path, metavar="DIR", help="of the servers; default: beside FILE, as .logs")
    add("--plot", type=Path, metavar="DIR", help="also draw it; needs matplotlib, the extra plot")
    add(
        "--dump-prompts",
        type=Path,
        metavar="FILE",
        help="also write the questions as sglang.bench_serving --dataset-name custom reads them",
    )
    add("--dry-run", action="store_true", help="say what would be measured by which commands")
    add("--disable-tqdm", action="store_true", help="no progress bars")
    add("--commit", help="the project's commit, where there is no git checkout")


def parse(given: Sequence[str]) -> argparse.Namespace:
    """Options of a sweep, checked.

    Raises:
        CannotSweep: options that do not go together, or that ask for what is not there.
    """
    own, server = list(given), []
    if "--" in own:
        own, server = own[: own.index("--")], own[own.index("--") + 1 :]
    options = sweep_parser().parse_args(own)
    options.server_arguments = server
    _check(options)
    return options


def _check(options: argparse.Namespace) -> None:
    if options.top_k != -1 and options.top_k < 1:
        raise CannotSweep(f"--top-k {options.top_k} is no number of tokens: give 1 or more, or -1.")
    if options.base_url is not None:
        _check_attached(options)
    for argument in options.server_arguments:
        flag = argument.split("=")[0]
        if flag in _OURS:
            raise CannotSweep(
                f"{flag} cannot follow --, because the sweep sets it itself: use the sweep's own "
                "flags before the --."
            )
    if options.plot is not None:
        check_plot(options.plot)
    if options.dry_run:
        return
    for flag in ("output_file", "dump_prompts"):
        if (path := getattr(options, flag)) is not None:
            _make_folder(f"--{flag.replace('_', '-')}", path.absolute().parent)
    if options.resume:
        return
    if options.output_file.exists() and options.output_file.stat().st_size:
        raise CannotSweep(
            f"--output-file {options.output_file} has results already: go on with --resume, or name "
            "another file."
        )


def _make_folder(flag: str, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CannotSweep(
            f"{flag}: the folder {folder} cannot be made ({error.strerror}): name another one."
        ) from None


def _check_attached(options: argparse.Namespace) -> None:
    for name in _OF_SERVERS:
        if getattr(options, name):
            flag = "server arguments" if name == "server_arguments" else f"--{name}"
            raise CannotSweep(
                f"{flag.replace('_', '-')} cannot be given to a server that runs already: leave out "
                "that or --base-url."
            )
    if options.workers and len(options.workers) > 1:
        raise CannotSweep(
            "--base-url is one server: name the worker that it runs, as --workers v2, or leave "
            "--workers out."
        )


def check_plot(folder: Path) -> None:
    """Before hours of measuring rather than after them.

    Raises:
        CannotSweep: matplotlib is missing, or the folder is a file.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise CannotSweep(
            f"--plot {folder} needs matplotlib, which is not installed: install the extra `plot`, or "
            "leave --plot out."
        )
    if folder.exists() and not folder.is_dir():
        raise CannotSweep(f"--plot {folder} is a file: name a folder.")


def report_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"{PROG} report", description="Prints results again.")
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="also draw them")
    return parser


def compare_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"{PROG} compare",
        description="Results B beside results A. Exit status 1 if a cell of B is worse than the "
        "tolerance allows, failed or is missing; 2 if nothing can be compared.",
    )
    parser.add_argument("files", type=Path, nargs=2, metavar="FILE")
    parser.add_argument(
        "--tolerance",
        type=number(0, 1),
        default=TOLERANCE,
        help="part of output tok/s, accuracy or accept length that may be lost; %(default)s",
    )
    return parser
