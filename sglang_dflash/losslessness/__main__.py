"""Compares a speculative server with plain decoding, greedily and by sampling.

    python -m sglang_dflash.losslessness --prompts FILE --speculative-url URL --plain-url URL
    python -m sglang_dflash.losslessness --prompts FILE --model-path TARGET \
        --draft-model-path DRAFTER [-- SERVER ARGUMENTS]

Exit status: 0 lossless, 1 not, 2 nothing could be compared, 3 inconclusive.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from sglang_dflash import __version__
from sglang_dflash.losslessness.client import Client
from sglang_dflash.losslessness.errors import CannotCompare
from sglang_dflash.losslessness.faults import FAULTS
from sglang_dflash.losslessness.greedy import PLAIN, SPECULATIVE, compare_greedy
from sglang_dflash.losslessness.plot import check_plot, plot_regret
from sglang_dflash.losslessness.progress import Progress
from sglang_dflash.losslessness.prompts import read_prompts, token_ids
from sglang_dflash.losslessness.report import NO_COMPARISON, Report
from sglang_dflash.losslessness.sampling import DRAWING, Plan, compare_sampling
from sglang_dflash.losslessness.servers import Interrupted, both_running

SETTINGS = (
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 1.3, "min_p": 0.05},
)
OURS = ("max_new_tokens", "n")  # sampling parameters that the comparison sets itself


def at_least(smallest: int):
    def integer(text: str) -> int:
        if int(text) < smallest:
            raise argparse.ArgumentTypeError(f"{text} is less than {smallest}")
        return int(text)

    return integer


def rate(text: str) -> float:
    if not 0 < float(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return float(text)


def setting(text: str) -> dict:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict) or any(name in value for name in OURS):
        raise argparse.ArgumentTypeError(
            f"{text} is not a JSON object of sampling parameters without {' and '.join(OURS)}"
        )
    return value


def parser() -> argparse.ArgumentParser:
    whole = argparse.ArgumentParser(
        prog="python -m sglang_dflash.losslessness",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    whole.add_argument("--prompts", type=Path, required=True, metavar="FILE", help="JSON or text")
    whole.add_argument("--limit", type=at_least(1), help="only the first prompts of the file")
    whole.add_argument("--tokenizer", metavar="PATH", help="default: the servers' own")
    _add_servers(whole.add_argument_group("servers that run, or what to start"))
    _add_comparison(whole.add_argument_group("comparison"))
    output = whole.add_argument_group("output, besides the text on standard output")
    output.add_argument("--json", type=Path, metavar="FILE")
    output.add_argument("--plot", type=Path, metavar="FILE", help="greedy regret by position")
    return whole


def _add_servers(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--speculative-url", metavar="URL")
    add("--plain-url", metavar="URL")
    add("--model-path", metavar="TARGET")
    add("--draft-model-path", metavar="DRAFTER")
    add("--logs", type=Path, metavar="FOLDER", help="of servers started here; default: a new one")
    add("--start-seconds", type=float, default=900, help="for a start; default: %(default)s")
    add(
        "--fault",
        choices=FAULTS,
        help="break the speculative server on purpose: a negative control, which must fail",
    )
    add(
        "--any-server",
        action="store_true",
        help="compare any two servers: do not insist that the first one speculates",
    )


def _add_comparison(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--mode", choices=("both", "greedy", "sampling"), default="both")
    add("--concurrency", type=at_least(1), default=8, help="requests at once; %(default)s")
    add("--new-tokens", type=at_least(1), default=256, help="greedy; default: %(default)s")
    add("--max-regret", type=float, default=0.20, metavar="NAT", help="greedy; %(default)s")
    add(
        "--setting",
        type=setting,
        action="append",
        dest="settings",
        metavar="JSON",
        help="sampling parameters; may be repeated; default: "
        + " ".join(json.dumps(value) for value in SETTINGS).replace("%", "%%"),
    )
    add("--runs", type=at_least(2), default=256, help="of a prompt and setting; %(default)s")
    add("--positions", type=at_least(1), default=32, help="tokens of a run; %(default)s")
    add("--q", type=rate, default=0.05, help="false-discovery rate; %(default)s")
    add("--seed", type=int, default=0, help="of the permutations; %(default)s")


def check(options: argparse.Namespace) -> None:
    """Refuses options that do not go together."""
    urls = (options.speculative_url, options.plain_url)
    paths = (options.model_path, options.draft_model_path)
    if not (all(urls) and not any(paths)) and not (all(paths) and not any(urls)):
        raise CannotCompare(
            "the servers are not given: give --speculative-url and --plain-url, or --model-path "
            "and --draft-model-path to start them."
        )
    if all(urls) and (options.server_arguments or options.fault or options.logs):
        raise CannotCompare(
            "server arguments, --fault and --logs are for servers that are started here: give "
            "--model-path and --draft-model-path instead of URLs, or leave them out."
        )
    if options.plot:
        if options.mode == "sampling":
            raise CannotCompare("--plot shows greedy regret: leave it out with --mode sampling.")
        check_plot(options.plot)
    folders = [path.absolute().parent for path in (options.json, options.plot) if path]
    for folder in (*folders, *filter(None, [options.logs])):
        _make_folder(folder)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CannotCompare(
            f"the folder {folder} cannot be made ({error.strerror}): name another one."
        ) from None


@contextlib.contextmanager
def clients(options: argparse.Namespace) -> Iterator[tuple[Client, Client]]:
    """The speculative and the plain server, started if need be."""
    with contextlib.ExitStack() as stack:
        urls = options.speculative_url, options.plain_url
        if options.model_path:
            logs = options.logs or Path(tempfile.mkdtemp(prefix="losslessness-"))
            print(
                f"starting both servers, which takes a minute or so; their logs are in {logs}",
                file=sys.stderr,
                flush=True,
            )
            urls = stack.enter_context(
                both_running(
                    options.model_path,
                    options.draft_model_path,
                    options.server_arguments,
                    logs,
                    options.start_seconds,
                    options.fault,
                )
            )
        yield Client("speculative", urls[0]), Client("plain", urls[1])


def compare(options: argparse.Namespace) -> Report:
    """Both comparisons, or the one that `--mode` names."""
    prompts = read_prompts(options.prompts, options.limit)
    started = time.monotonic()
    with clients(options) as (speculative, plain):
        info = [client.model_info() for client in (speculative, plain)]
        ids = token_ids(prompts, options.tokenizer or info[1]["tokenizer_path"])
        provenance = {
            name: value if isinstance(value, int | float | str | list | dict) else str(value)
            for name, value in vars(options).items()
            if value is not None
        }
        report = Report({"sglang_dflash": __version__, "models": info, "options": provenance})
        progress = Progress(_planned(options, len(ids)))
        if options.mode != "sampling":
            report.greedy = compare_greedy(
                speculative,
                plain,
                ids,
                options.new_tokens,
                options.concurrency,
                options.max_regret,
                progress,
            )
            _insist_on_speculation(report.greedy.rounds, options)
        if options.mode != "greedy":
            plan = Plan(
                ids,
                options.settings or list(SETTINGS),
                options.runs,
                options.positions,
                options.q,
                options.concurrency,
                options.seed,
            )
            report.sampling = compare_sampling(speculative, plain, plan, progress)
            _insist_on_speculation(report.sampling.rounds, options)
        report.provenance["seconds"] = round(time.monotonic() - started, 1)
    return report


def _planned(options: argparse.Namespace, prompts: int) -> dict[str, float]:
    """Tokens that each phase may draw, by the name that progress gives it."""
    planned: dict[str, float] = {}
    if options.mode != "sampling":
        planned = dict.fromkeys((SPECULATIVE, PLAIN), prompts * options.new_tokens)
    if options.mode != "greedy":
        cells = prompts * len(options.settings or SETTINGS)
        planned[DRAWING] = 3 * cells * options.runs * options.positions
    return planned


def _insist_on_speculation(rounds: int, options: argparse.Namespace) -> None:
    if not rounds and not options.any_server:
        raise CannotCompare(
            "the speculative server answered without a single verify step, so it shows nothing: "
            "start it with --speculative-algorithm DFLASH, or compare any two with --any-server."
        )


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    own, server = given, []
    if "--" in given:
        own, server = given[: given.index("--")], given[given.index("--") + 1 :]
    options = parser().parse_args(own)
    options.server_arguments = server
    try:
        check(options)
        report = compare(options)
    except CannotCompare as error:
        print(f"error: {error}", file=sys.stderr)
        return NO_COMPARISON
    except Interrupted as interrupted:
        print(f"{interrupted}: the servers that were started here have ended", file=sys.stderr)
        return interrupted.status
    print(report.text())
    if options.json:
        report.write_json(options.json)
    if options.plot:
        plot_regret(report.greedy, options.plot)
    return report.status


if __name__ == "__main__":
    sys.exit(main())
