"""The GSM8K sweep: plain decoding against DFlash across TP sizes and concurrencies.

    python benchmark/bench_gsm8k_sweep.py --tp-sizes 1 --concurrencies 1,8 --workers v1,v2
    python benchmark/bench_gsm8k_sweep.py … --resume
    python benchmark/bench_gsm8k_sweep.py compare before.jsonl after.jsonl --tolerance 0.05

Without a model it measures the bundled pair. See docs/sweep.md.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, from any folder

from benchmark.gsm8k import plots, summary  # noqa: E402
from benchmark.gsm8k.arguments import compare_parser, sweep_parser  # noqa: E402
from benchmark.gsm8k.cells import read_rows  # noqa: E402
from benchmark.gsm8k.compare import compare  # noqa: E402
from benchmark.gsm8k.errors import CannotSweep  # noqa: E402
from benchmark.gsm8k.sweep import Sweep  # noqa: E402


def run_compare(arguments: list[str]) -> int:
    args = compare_parser().parse_args(arguments)
    for file in args.files:
        if not file.exists():
            raise CannotSweep(f"{file} is not there: give two outputs of the sweep.")
    before, after = (read_rows(file) for file in args.files)
    lines, worse = compare(before, after, args.tolerance)
    print("\n".join([*lines, *(f"worse: {sentence}" for sentence in worse)]))
    return 1 if worse else 0


def run_sweep(arguments: list[str]) -> int:
    end = arguments.index("--") if "--" in arguments else len(arguments)
    args = sweep_parser().parse_args(arguments[:end])
    args.server_args = arguments[end + 1 :]
    args.logs = args.logs or args.output_file.with_suffix(".logs")
    if args.plot:
        plots.require_matplotlib()  # before hours of measuring
    sweep = Sweep(args)
    if args.dry_run:
        print(sweep.describe())
        return 0
    sweep.run()
    rows = read_rows(args.output_file)
    base = args.summary or args.output_file.with_suffix("")
    base.with_suffix(".md").write_text(summary.as_markdown(rows))
    base.with_suffix(".csv").write_text(summary.as_csv(rows))
    print("\n" + summary.as_text(rows))
    if args.plot:
        plots.draw(rows, args.plot)
    for failure in sweep.failures:
        print(f"not measured: {failure.splitlines()[0]}")
    return 1 if sweep.failures else 0


def main(arguments: list[str]) -> int:
    # Ended by a signal, it must still end its servers.
    for sent in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(sent, lambda number, frame: sys.exit(128 + number))
    try:
        if arguments[:1] == ["compare"]:
            return run_compare(arguments[1:])
        return run_sweep(arguments)
    except CannotSweep as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; --resume goes on from here", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
