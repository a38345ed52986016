"""How right a server is about its drafts: expected against real survival, by position of the block."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import requests

from benchmark import jsonl
from benchmark.errors import CannotMeasure
from benchmark.options import at_least, check_plot
from benchmark.traffic.arguments import PROG
from benchmark.traffic.clients import Clients, Job
from benchmark.traffic.profile import add_asked, served_by

_COUNTS = ("tried", "survived", "expected")
_ENOUGH = 200  # drafts at a position from which its rate says something


@dataclass(frozen=True)
class Position:
    """Drafts at one position of the block.

    Attributes:
        position: 1 for the first draft.
        tried: drafts that were verified after all before them had been accepted.
        survived, expected: how many of these were accepted, and were expected to be.
    """

    position: int
    tried: float
    survived: float
    expected: float

    @property
    def error(self) -> float:
        """Of the rate that was expected."""
        return (self.expected - self.survived) / self.tried


def counted(page: str) -> dict[tuple[str, int], float]:
    """What a Prometheus page counts of drafts, by count and position, summed over ranks and models."""
    found: dict[tuple[str, int], float] = {}
    for name, labels, value in re.findall(
        r"^sglang:dflash_(\w+)_at_position_total\{(.*)\} (\S+)$", page, re.MULTILINE
    ):
        at = re.search(r'\bposition="(\d+)"', labels)
        if name in _COUNTS and at is not None:
            key = name, int(at[1])
            found[key] = found.get(key, 0.0) + float(value)
    return found


def positions(before: str, after: str) -> list[Position]:
    """What became of drafts between two pages.

    Raises:
        CannotMeasure: nothing was expected of any draft.
    """
    then, now = counted(before), counted(after)
    found = [
        Position(at, *(now.get((name, at), 0.0) - then.get((name, at), 0.0) for name in _COUNTS))
        for at in sorted({at for _, at in now})
    ]
    found = [each for each in found if each.tried]
    if not found:
        raise CannotMeasure(
            "the server expects nothing of its drafts: start this project's with --enable-metrics and "
            "--speculative-dflash-verify auto, where passes of any number of rows are captured."
        )
    return found


def errors(found: Sequence[Position]) -> tuple[float, float]:
    """The mean error, of each draft alike, and the greatest of positions with enough drafts."""
    tried = sum(each.tried for each in found)
    mean = sum(abs(each.error) * each.tried for each in found) / tried
    return mean, max((abs(each.error) for each in found if each.tried >= _ENOUGH), default=mean)


def parser() -> argparse.ArgumentParser:
    whole = argparse.ArgumentParser(
        prog=f"{PROG} calibration",
        description="Asks a server of this project that runs already, with --enable-metrics, and compares what it "
        "expected of drafts with what became of them.",
    )
    add_asked(whole)
    add = whole.add_argument
    add("--clients", type=at_least(1), default=8, help="%(default)s")
    add("--requests", type=at_least(1), default=200, help="%(default)s")
    add("--plot", type=Path, metavar="FILE", help="also draw it, as PNG; needs matplotlib")
    return whole


def main(given: Sequence[str]) -> int:
    options = parser().parse_args(given)
    if options.plot is not None:
        check_plot(options.plot.parent)
        options.plot.parent.mkdir(parents=True, exist_ok=True)
    served, bodies = served_by(options)
    served.flush()
    job = Job(served.url, bodies, clients=options.clients, most=options.requests)
    before = _page(served.url)
    with Clients() as clients:
        clients.ask(job)
    found = positions(before, _page(served.url))
    print(_table(found))
    if options.output_file is not None:
        jsonl.write(options.output_file, map(asdict, found))
    if options.plot is not None:
        draw(found, options.plot, f"{options.workload}, {options.kind}")
    return 0


def _page(url: str) -> str:
    return requests.get(f"{url}/metrics", timeout=60).text


def _table(found: Sequence[Position]) -> str:
    lines = ["position   drafts  expected     real     error"]
    lines += [
        f"{each.position:8}{each.tried:9,.0f}{each.expected / each.tried:10.3f}"
        f"{each.survived / each.tried:9.3f}{each.error:+10.3f}"
        for each in found
    ]
    mean, greatest = errors(found)
    lines.append(
        f"mean error {mean:.3f}, greatest {greatest:.3f} (of positions with {_ENOUGH} drafts)"
    )
    return "\n".join(lines)


def draw(found: Sequence[Position], path: Path, title: str) -> None:
    """Writes expected and real survival by position as PNG."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(6, 3.8), layout="constrained")
    axes = picture.subplots()
    at = [each.position for each in found]
    axes.plot(at, [each.survived / each.tried for each in found], "o-", label="real")
    axes.plot(at, [each.expected / each.tried for each in found], "s--", label="expected")
    axes.set(title=title, xlabel="position of the draft", ylabel="accepted", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend()
    picture.savefig(path, dpi=120)
