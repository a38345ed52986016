"""The command line of the serving benchmark, and what is refused."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from benchmark.errors import CannotMeasure
from benchmark.machine import Machine
from benchmark.options import at_least, check_output, check_plot, names, number
from benchmark.shapes import TINY
from benchmark.traffic import cells
from benchmark.traffic.cells import Place
from benchmark.traffic.figures import Goal
from benchmark.traffic.systems import OWN_NAMES, Choice, Pair, choices
from benchmark.traffic.workloads import FILES, KINDS, Sampling

PROG = "benchmark/serving.py"
_SECONDS = number(0, math.inf, above=True)


def parser() -> argparse.ArgumentParser:
    whole = argparse.ArgumentParser(
        prog=PROG,
        description="Asks servers as users do: several systems, loaded side by side and asked in "
        "turns. Without any option: plain decoding and v2 on the bundled pair.",
        epilog="Other commands: report FILE… prints results again, agreement compares with "
        "sglang.bench_serving, profile splits a server's time, calibration says how right it is about its "
        "drafts; each has its own --help.",
    )
    _add_systems(whole)
    _add_cells(whole)
    _add_servers(whole)
    _add_run(whole)
    return whole


def _add_systems(whole: argparse.ArgumentParser) -> None:
    add = whole.add_argument_group("systems").add_argument
    own = ",".join(OWN_NAMES)
    add(
        "--systems",
        type=names,
        metavar="A,…",
        help=f"this project's, of {own}; plain,v2 if no other",
    )
    many = {"action": "append", "default": []}
    path = "by its PYTHONPATH (a:b:c) or its interpreter"
    add("--sglang", metavar="NAME=PATH", help=f"another SGLang, {path}", **many)
    add("--vllm", metavar="NAME=PATH", help=f"a vLLM, {path}", **many)
    add("--url", metavar="NAME=URL", help="a server that runs already", **many)
    add(
        "--without-draft",
        type=names,
        default=[],
        metavar="NAME,…",
        help="these decode plainly, too",
    )
    add(
        "--args-of", metavar="NAME=ARGS", help="server arguments that only this system gets", **many
    )
    add("--env-of", metavar="NAME=VAR=VALUE", help="environment variable of a system", **many)


def _add_cells(whole: argparse.ArgumentParser) -> None:
    add = whole.add_argument_group("cells, the first ones first").add_argument
    add(
        "--workloads",
        type=names,
        default=["chat"],
        metavar="W,…",
        help=f"of {', '.join(FILES)}; chat",
    )
    add(
        "--kinds",
        type=names,
        default=["greedy", "sampled"],
        metavar="K,…",
        help=f"of {', '.join(KINDS)}",
    )
    add(
        "--loads",
        default="1,8",
        metavar="L,…",
        help="numbers of clients (closed loop), or rates such as 8/s (open loop); %(default)s",
    )
    add(
        "--cells",
        nargs="+",
        metavar="W/K/L,…",
        help="instead of these three: places in the order of their worth, as chat/greedy/8,32",
    )
    add("--repeats", type=at_least(1), default=1, help="of everything; %(default)s")
    add(
        "--seconds", type=_SECONDS, default=8.0, help="that a cell's requests are sent; %(default)s"
    )
    add(
        "--requests", type=at_least(1), metavar="N", help="of a cell, at most; the size of the pool"
    )
    add("--least-per-client", type=at_least(1), default=2, metavar="N", help="%(default)s")
    add("--temperature", type=number(0, 2, above=True), default=0.7, help="if sampled; %(default)s")
    add("--top-p", type=number(0, 1, above=True), default=0.9, help="if sampled; %(default)s")
    add("--top-k", type=at_least(1), default=0, help="if sampled; off")
    add("--goal-ttft-ms", type=_SECONDS, default=500.0, help="latency goal; %(default)s")
    add("--goal-tpot-ms", type=_SECONDS, default=30.0, help="latency goal; %(default)s")
    add("--keep-cache", action="store_true", help="do not empty prefix caches before each cell")
    add("--data", type=Path, default=TINY / "data", metavar="DIR", help="the workloads' files")


def _add_servers(whole: argparse.ArgumentParser) -> None:
    add = whole.add_argument_group("servers").add_argument
    add("--target-model", default=str(TINY / "target"), metavar="DIR", help="the bundled one")
    add("--draft-model", default=str(TINY / "drafter"), metavar="DIR", help="the bundled one")
    add("--block-size", type=at_least(2), help="the drafter's own")
    add("--block-size-of", metavar="NAME=N", help="of a system", action="append", default=[])
    add("--tp-size", type=at_least(1), default=1, help="%(default)s")
    add("--attention-backend", metavar="A", help="of SGLang's: fa3, on a CPU torch_native")
    add(
        "--kv-tokens",
        type=at_least(1),
        metavar="N",
        help="slots of each KV pool; as many as needed",
    )
    add("--max-running", type=at_least(1), metavar="N", help="requests of a batch; most clients")
    ways = ("together", "own-first", "one-by-one")
    add("--start", choices=ways, default="together", help="%(default)s")
    add("--start-timeout", type=_SECONDS, default=400.0, metavar="SECONDS", help="%(default)s")
    add(
        "--timeout-s",
        type=_SECONDS,
        default=300.0,
        metavar="SECONDS",
        help="of a cell; %(default)s",
    )
    add("--client-processes", type=at_least(1), help="one for four processors, at most four")


def _add_run(whole: argparse.ArgumentParser) -> None:
    add = whole.add_argument_group("output").add_argument
    add(
        "--output-file",
        type=Path,
        default=Path("serving.jsonl"),
        metavar="FILE",
        help="JSON lines, a row a cell; the tables go beside it as .md; %(default)s",
    )
    add("--resume", action="store_true", help="go on: measure only what FILE does not have yet")
    add(
        "--stop-after",
        type=_SECONDS,
        metavar="SECONDS",
        help="begin no cell that would end later than this after the start of the command",
    )
    add("--logs", type=Path, metavar="DIR", help="of the servers; default: beside FILE, as .logs")
    add("--plot", type=Path, metavar="DIR", help="also draw it; needs matplotlib, the extra plot")
    add("--dry-run", action="store_true", help="say what would be measured by which commands")
    add("--disable-tqdm", action="store_true", help="no progress bars")
    add("--commit", help="the project's commit, where there is no git checkout")


def parse(given: Sequence[str]) -> argparse.Namespace:
    """Options of a measurement, checked; with `places`, `choices`, `pair`, `sampling` and `goal`.

    Raises:
        CannotMeasure: options that do not go together, or that ask for what is not there.
    """
    options = parser().parse_args(given)
    options.places = _places(options)
    options.choices = _choices(options)
    options.pair = Pair(options.target_model, options.draft_model, options.block_size)
    options.sampling = Sampling(options.temperature, options.top_p, options.top_k)
    options.goal = Goal(options.goal_ttft_ms, options.goal_tpot_ms)
    for model in (options.target_model, options.draft_model):
        if not (Path(model) / "config.json").is_file():
            raise CannotMeasure(
                f"{model} is not a folder with a config.json: name a model's folder."
            )
    if options.plot is not None:
        check_plot(options.plot)
    check_output(options.output_file, again=options.resume, dry=options.dry_run)
    gpus = Machine.here().gpus
    if options.tp_size > max(gpus, 1):
        raise CannotMeasure(
            f"--tp-size {options.tp_size} is more than the {gpus} GPUs of this machine."
        )
    return options


def _places(options: argparse.Namespace) -> list[Place]:
    texts = options.cells or [
        f"{workload}/{kind}/{options.loads}"
        for workload in options.workloads
        for kind in options.kinds
    ]
    return list(dict.fromkeys(place for text in texts for place in cells.parse_places(text)))


def _choices(options: argparse.Namespace) -> list[Choice]:
    peers = {"sglang": options.sglang, "vllm": options.vllm, "url": options.url}
    own = options.systems or ([] if any(peers.values()) else ["plain", "v2"])
    more = (options.without_draft, options.args_of, options.env_of, options.block_size_of)
    return choices(own, peers, *more)


def report_parser() -> argparse.ArgumentParser:
    whole = argparse.ArgumentParser(prog=f"{PROG} report", description="Prints results again.")
    whole.add_argument("files", type=Path, nargs="+", metavar="FILE")
    whole.add_argument("--markdown", action="store_true", help="as Markdown")
    whole.add_argument("--plot", type=Path, metavar="DIR", help="also draw them")
    return whole
