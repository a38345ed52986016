"""The GSM8K sweep: is DFLASH worth it on this machine?

    python benchmark/bench_gsm8k_sweep.py --target-model TARGET --draft-model DRAFTER
    python benchmark/bench_gsm8k_sweep.py report FILE [--plot DIR]
    python benchmark/bench_gsm8k_sweep.py compare A B --tolerance 0.05
    python benchmark/bench_gsm8k_sweep.py agreement --base-url URL

Exit status: 0 good; 1 a cell failed, or is worse; 2 nothing could be measured or compared; 130 or
128 plus the signal if it was ended, and then --resume goes on.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, from any folder

from benchmark.errors import CannotMeasure, CellFailed  # noqa: E402
from benchmark.gsm8k import agreement, arguments, measure, plot, report, rows  # noqa: E402
from benchmark.gsm8k.compare import compare  # noqa: E402
from benchmark.machine import Machine  # noqa: E402
from benchmark.options import check_plot  # noqa: E402
from benchmark.servers import end_by_signals  # noqa: E402

GOOD, WORSE, NOTHING = 0, 1, 2


def sweep(given: Sequence[str]) -> int:
    options = arguments.parse(given)
    prepared = measure.prepare(options, Machine.here())
    if prepared is None:
        return GOOD
    try:
        measure.measure(prepared)
    except (KeyboardInterrupt, SystemExit):
        kept = len(prepared.results())
        print(
            f"\nended; {kept} of {len(prepared.cells)} cells are in {options.output_file}, and "
            "--resume goes on with the rest",
            file=sys.stderr,
        )
        raise
    found = prepared.results()
    show(found, options.plot)
    written = report.write(found, options.output_file)
    print(f"\nrows: {options.output_file}, summary: {written[0]} and {written[1]}")
    return WORSE if not all(map(rows.good, found)) else GOOD


def show(found: Sequence[rows.Row], pictures: Path | None) -> None:
    print("\n" + report.text(found))
    if pictures is not None:
        print("\npictures: " + ", ".join(str(path) for path in plot.draw(found, pictures)))


def report_again(given: Sequence[str]) -> int:
    options = arguments.report_parser().parse_args(given)
    if options.plot is not None:
        check_plot(options.plot)
    show(rows.latest(rows.read(options.file)), options.plot)
    return GOOD


def compare_two(given: Sequence[str]) -> int:
    options = arguments.compare_parser().parse_args(given)
    found = compare(*options.files, options.tolerance)
    print(found.text(options.tolerance))
    return WORSE if found.worse else GOOD


COMMANDS = {"report": report_again, "compare": compare_two, "agreement": agreement.main}


def main(given: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if given is None else given)
    try:
        if given and given[0] in COMMANDS:
            return COMMANDS[given[0]](given[1:])
        return sweep(given)
    except (CannotMeasure, CellFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        return NOTHING


if __name__ == "__main__":
    end_by_signals()
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
