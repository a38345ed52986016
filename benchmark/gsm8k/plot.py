"""Pictures of a sweep. Needs matplotlib: the extra `plot`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmark.gsm8k.cells import ARMS, BASELINE, Cell
from benchmark.gsm8k.figures import added
from benchmark.gsm8k.report import caption, figure
from benchmark.gsm8k.rows import Row, cell_of, good

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = dict(zip(ARMS, ("0.45", "C0", "C3", "C2"), strict=True))
MARKERS = ("o", "s", "^", "D", "v", "P")
Found = dict[Cell, Row]


def draw(found: Sequence[Row], folder: Path) -> list[Path]:
    """Writes each of `pictures` as PNG."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, picture in pictures(found).items():
        paths.append(folder / f"{name}.png")
        picture.savefig(paths[-1], dpi=120)
    return paths


def pictures(found: Sequence[Row]) -> dict[str, Figure]:
    """Each picture by its name, with a column for each attention backend.

    Cells that failed are left out, and so is a picture for which nothing is left.
    """
    by_cell = {cell_of(row): row for row in found if good(row)}
    panels = {
        "throughput": (_throughput, by_cell),
        "speedup": (_speedup, _with_baseline(by_cell)),
        "accept_histogram": (_histogram, _speculative(by_cell)),
        "latency": (_latency, {c: row for c, row in by_cell.items() if row.get("latency_ms")}),
    }
    return {
        name: _figure(chosen, panel, "\n".join(caption(found)))
        for name, (panel, chosen) in panels.items()
        if chosen
    }


def _speculative(found: Found) -> Found:
    return {cell: row for cell, row in found.items() if cell.speculative}


def _with_baseline(found: Found) -> Found:
    return {c: row for c, row in _speculative(found).items() if _baseline(c) in found} and found


def _baseline(cell: Cell) -> Cell:
    return Cell(cell.backend, cell.tp, BASELINE, cell.concurrency)


def _figure(found: Found, panel: Callable[[Axes, Found], None], title: str) -> Figure:
    from matplotlib.figure import Figure

    backends = list(dict.fromkeys(cell.backend for cell in found))
    picture = Figure(figsize=(max(6.0, 1.2 + 4.8 * len(backends)), 4.6), layout="constrained")
    picture.suptitle(title, fontsize="medium")
    for axes, backend in zip(
        picture.subplots(1, len(backends), squeeze=False, sharey=True)[0], backends, strict=True
    ):
        panel(axes, {cell: row for cell, row in found.items() if cell.backend == backend})
        axes.set_title(backend)
        axes.label_outer(remove_inner_ticks=True)
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    return picture


def _lines(found: Found) -> list[tuple[str, dict, list[Cell]]]:
    """(label, style, cells by concurrency) of each TP size and arm."""
    sizes = sorted({cell.tp for cell in found})
    lines = []
    for arm in ARMS:
        for number, tp in enumerate(sizes):
            cells = [cell for cell in found if (cell.arm, cell.tp) == (arm, tp)]
            style = {"color": COLOURS[arm], "marker": MARKERS[number % len(MARKERS)]}
            style["linestyle"] = ("-", "--", "-.", ":")[number % 4]
            label = arm if len(sizes) == 1 else f"{arm}, tp {tp}"
            if cells:
                lines.append((label, style, sorted(cells, key=lambda cell: cell.concurrency)))
    return lines


def _concurrency_axis(axes: Axes, found: Found) -> None:
    axes.set_xscale("log", base=2)
    concurrencies = sorted({cell.concurrency for cell in found})
    axes.set_xticks(concurrencies, [str(value) for value in concurrencies])
    axes.minorticks_off()
    axes.set_xlabel("concurrency")


def _throughput(axes: Axes, found: Found) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    for label, style, cells in _lines(found):
        axes.errorbar(
            [cell.concurrency for cell in cells],
            [_rate(found, cell) for cell in cells],
            [found[cell].get("output_tok_s_spread") or 0 for cell in cells],
            capsize=3,
            label=label,
            **style,
        )
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:,.10g}")
    axes.yaxis.set_minor_locator(NullLocator())
    _concurrency_axis(axes, found)
    axes.set_ylabel("output tokens/s")


def _speedup(axes: Axes, found: Found) -> None:
    compared = {cell: row for cell, row in _speculative(found).items() if _baseline(cell) in found}
    for label, style, cells in _lines(compared):
        ratios = [_rate(found, cell) / _rate(found, _baseline(cell)) for cell in cells]
        axes.plot([cell.concurrency for cell in cells], ratios, label=label, **style)
    axes.axhline(1, color=COLOURS[BASELINE], linewidth=1)
    axes.set_ylim(bottom=0)
    if compared:
        _concurrency_axis(axes, compared)
    axes.set_ylabel("output tokens/s over plain decoding")


def _rate(found: Found, cell: Cell) -> float:
    return figure(found[cell], "output_tok_s")


def _histogram(axes: Axes, found: Found) -> None:
    """Over all concurrencies and repeats of an arm."""
    lines = _lines(found)
    for number, (label, style, cells) in enumerate(lines):
        counts = added([found[cell]["accept_histogram"] for cell in cells])
        width = 0.8 / len(lines)
        offset = (number - (len(lines) - 1) / 2) * width
        shares = [count / sum(counts) for count in counts]
        places = [drafts + 1 + offset for drafts in range(len(counts))]
        hatch = "" if style["linestyle"] == "-" else "//"
        axes.bar(places, shares, width, color=style["color"], label=label, hatch=hatch)
        axes.set_xticks(range(1, len(counts) + 1))
    axes.set_xlabel("tokens that a verify step commits")
    axes.set_ylabel("share of verify steps")


def _latency(axes: Axes, found: Found) -> None:
    from matplotlib.ticker import MaxNLocator

    for label, style, cells in _lines(found):
        x = [_rate(found, cell) for cell in cells]
        y = [found[cell]["latency_ms"]["p50"] for cell in cells]
        axes.plot(x, y, label=label, **style)
        for cell, *place in zip(cells, x, y, strict=True):
            axes.annotate(
                str(cell.concurrency), place, (4, 4), textcoords="offset points", fontsize=8
            )
    axes.margins(0.1)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("output tokens/s (at each point: the concurrency)")
    axes.set_ylabel("latency of a request, median (ms)")
