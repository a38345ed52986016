"""Rounds per second of DFLASH servers, and the share of a round in which the GPU is idle.

    python benchmark/rounds.py --systems v1,v2,plain --peer NAME=PYTHONPATH --profile \
        --output results.jsonl
    python benchmark/rounds.py table results.jsonl
    python benchmark/rounds.py report benchmark/results/*.jsonl --write docs/rounds.md
    python benchmark/rounds.py trace TRACE.json.gz --steps 24

With dummy weights nothing is accepted, so every round costs the same whatever the text is: rounds
per second times the tokens that a round commits are tokens per second.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, from any folder

from benchmark import measure, report, tables, traces  # noqa: E402
from benchmark.servers import OWN  # noqa: E402
from benchmark.shapes import SHAPES  # noqa: E402

COMMANDS = ("measure", "table", "report", "trace")


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def curve(text: str) -> list[float]:
    survival = [float(part) for part in text.split(",")]
    tables.tokens_per_round(survival, len(survival) + 1)  # raises what argparse reports
    return survival


def own_names(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in OWN:
            raise argparse.ArgumentTypeError(f"{name} is not one of {', '.join(OWN)}")
    return names


def variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text} is not NAME=VALUE")
    return name, value


def parser() -> argparse.ArgumentParser:
    whole = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = whole.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_measure(commands.add_parser("measure", help="measure servers (the default command)"))

    table = commands.add_parser("table", help="print results again")
    report_ = commands.add_parser("report", help="write results as markdown")
    for command in (table, report_):
        command.add_argument("files", type=Path, nargs="+", metavar="FILE")
        _add_simulation(command)
    report_.add_argument("--write", type=Path, metavar="FILE", help="default: standard output")
    report_.add_argument(
        "--rejected", type=Path, metavar="FILE", default=report.REJECTED, help="what was not kept"
    )

    trace = commands.add_parser("trace", help="analyse a trace of SGLang's profiler")
    trace.add_argument("file", type=Path)
    trace.add_argument("--steps", type=int, required=True, help="rounds in the trace, about")
    return whole


def _add_simulation(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--simulate-acceptance",
        type=curve,
        metavar="P1,P2,…",
        help="probability that draft 1, 2, … of a block is accepted: prints simulated tokens per "
        "second, rounds per second times the expected tokens of a round",
    )


def _add_measure(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    what = command.add_argument_group("systems")
    what.add_argument(
        "--systems", type=own_names, default=["v1", "v2", "plain"], help=f"of {', '.join(OWN)}"
    )
    what.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="another SGLang: its PYTHONPATH (a:b:c) or its interpreter; may be repeated",
    )
    for flag, whose in (("--peer-env", "peers"), ("--env", "all systems")):
        what.add_argument(
            flag,
            type=variable,
            action="append",
            default=[],
            metavar="NAME=VALUE",
            help=f"environment variable for {whose}; may be repeated",
        )
    what.add_argument(
        "--peer-args",
        default="",
        help="server arguments that only peers get, as --peer-args='--flag value'",
    )
    what.add_argument("--server-args", default="", help="server arguments that all systems get")

    add("--shape", choices=SHAPES, default="qwen3-8b")
    add("--block-size", type=int, help="rows of a block; the drafter's own by default")
    add("--concurrencies", type=numbers, default=[1, 8, 32], metavar="N,N,…")
    add("--new-tokens", type=int, default=384)
    add("--prompt-tokens", type=int, default=128)
    add("--samples", type=int, default=3, help="measurements in one start of a server")
    add("--repeats", type=int, default=1, help="starts of each server, alternating")
    add("--device", choices=("cuda", "cpu"), help="default: cpu for the tiny shape, else cuda")
    add("--attention-backend", help="default: fa3, on a CPU torch_native")
    add("--tp", type=int, default=1)
    add("--with-tokenizer", action="store_true", help="start servers with a tokenizer")
    add("--start", choices=("together", "one-by-one"), default="one-by-one", help="%(default)s")
    add("--start-timeout", type=float, default=240, metavar="SECONDS")

    add("--profile", action="store_true", help="trace a few rounds and say where they go")
    add("--profile-steps", type=int, default=24)
    add("--profile-cpu", action="store_true", help="trace the host too, which makes rounds longer")
    _add_simulation(command)
    add("--output", type=Path, default=Path("rounds.jsonl"), help="JSON lines; appended to")
    add("--logs", type=Path, help="folder of logs and traces; default: beside the output")
    add("--commit", help="the project's commit, where there is no git checkout")


def print_tables(lines: list[dict], survival: list[float] | None) -> None:
    for (run, shape, block_size, new_tokens), group in tables.groups(lines).items():
        found = tables.cells(group)
        gpus = tables.gpus(group)
        targets = tables.has_targets(shape, block_size, gpus)
        print(f"\n{gpus}, {shape}, block {block_size}, {new_tokens} new tokens, run {run}")
        parts = [tables.rates_table(found), tables.ratios_table(found, targets)]
        parts.append(tables.idle_table(found, targets))
        survival_here = survival or group[0].get("simulated_acceptance")
        if survival_here:
            parts.append(tables.simulated_table(found, survival_here, block_size))
        for part in parts:
            if len(part) > 1:
                print("\n" + tables.as_text(part))


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] not in (*COMMANDS, "-h", "--help"):
        arguments = ["measure", *arguments]
    args = parser().parse_args(arguments)
    if args.command == "trace":
        activities = traces.read_trace(args.file)
        print(json.dumps(traces.analyse(activities, args.steps).to_json(), indent=2))
    elif args.command == "table":
        print_tables(tables.read_lines(args.files), args.simulate_acceptance)
    elif args.command == "report":
        text = report.markdown(
            tables.read_lines(args.files), args.rejected, args.simulate_acceptance
        )
        if args.write:
            args.write.parent.mkdir(parents=True, exist_ok=True)
            args.write.write_text(text)
        else:
            sys.stdout.write(text)
    else:
        # Ended by a signal, it must still end its servers.
        for sent in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(sent, lambda number, frame: sys.exit(128 + number))
        lines, failures = measure.measure(args)
        print_tables(lines, args.simulate_acceptance)
        for failure in failures:
            print(f"\nnot measured: {failure.splitlines()[0]}")
        return 1 if failures else 0
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
    except (traces.BadTrace, ValueError) as error:
        sys.exit(f"error: {error}")
