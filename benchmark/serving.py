"""The serving benchmark: what users of a server get, beside other servers.

    python benchmark/serving.py --systems plain,v2 --sglang NAME=PYTHONPATH --vllm NAME=PYTHONPATH \
        --target-model TARGET --draft-model DRAFTER --workloads chat,gsm8k --loads 1,8,32
    python benchmark/serving.py report FILE… [--plot DIR]
    python benchmark/serving.py agreement --base-url URL
    python benchmark/serving.py profile --base-url URL
    python benchmark/serving.py calibration --base-url URL
    python benchmark/serving.py changing --url NAME=URL …

Exit status: 0 good; 1 a cell failed; 2 nothing could be measured; 3 --stop-after left cells for
--resume; 130 or 128 plus the signal if it was ended, and then --resume goes on, too.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, from any folder

from benchmark.errors import CannotMeasure, CellFailed  # noqa: E402
from benchmark.jsonl import Row, good  # noqa: E402
from benchmark.machine import Machine  # noqa: E402
from benchmark.options import check_plot  # noqa: E402
from benchmark.servers import end_by_signals  # noqa: E402
from benchmark.traffic import (  # noqa: E402  # noqa: E402
    agreement,
    arguments,
    calibration,
    changing,
    measure,
    plot,
    profile,
    report,
    rows,
)

GOOD, FAILED, NOTHING, LEFT = 0, 1, 2, 3


def serving(given: Sequence[str]) -> int:
    began = time.monotonic()
    options = arguments.parse(given)
    options.began = began
    run = measure.prepare(options, Machine.here())
    if options.dry_run:
        measure.say(run)
        return GOOD
    try:
        measure.measure(run)
    except (KeyboardInterrupt, SystemExit):
        kept = len(run.cells) - len(run.waiting())
        print(
            f"\nended; {kept} of {len(run.cells)} cells are in {options.output_file}, and --resume "
            "goes on with the rest",
            file=sys.stderr,
        )
        raise
    found = run.rows()
    if not any(map(good, found)):
        raise CannotMeasure(f"no cell was measured: see {options.output_file}.")
    show(found, options.plot)
    print(f"\nrows: {options.output_file}, tables: {report.write(found, options.output_file)}")
    if not all(map(good, found)):
        return FAILED
    return LEFT if run.waiting() else GOOD


def show(found: Sequence[Row], pictures: Path | None) -> None:
    print("\n" + report.text(found))
    if pictures is not None:
        print("\npictures: " + ", ".join(str(path) for path in plot.draw(found, pictures)))


def report_again(given: Sequence[str]) -> int:
    options = arguments.report_parser().parse_args(given)
    if options.plot is not None:
        check_plot(options.plot)
    found = rows.latest(rows.read(options.files))
    if options.markdown:
        print(report.markdown(found), end="")
    if options.plot is not None or not options.markdown:
        show(found, options.plot)
    return GOOD


COMMANDS = {
    "report": report_again,
    "agreement": agreement.main,
    "profile": profile.main,
    "calibration": calibration.main,
    "changing": changing.main,
}


def main(given: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if given is None else given)
    try:
        if given and given[0] in COMMANDS:
            return COMMANDS[given[0]](given[1:])
        return serving(given)
    except (CannotMeasure, CellFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        return NOTHING


if __name__ == "__main__":
    end_by_signals()
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
