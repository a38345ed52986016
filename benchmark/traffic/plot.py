"""Pictures of this benchmark. Needs matplotlib: the extra `plot`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmark.jsonl import Row
from benchmark.traffic.arrivals import Closed, Load
from benchmark.traffic.report import PLAIN, Found, Place

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKERS = ("o", "s", "^", "D", "v", "P")


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Writes each picture as PNG: a column for each workload, a line of panels for each kind."""
    found = Found(rows)
    folder.mkdir(parents=True, exist_ok=True)
    pictures = {"throughput": _throughput, "frontier": _frontier}
    return [_figure(folder / f"{name}.png", found, panel) for name, panel in pictures.items()]


def _figure(path: Path, found: Found, panel: Callable[[Axes, Found, Place], None]) -> Path:
    from matplotlib.figure import Figure

    workloads = list(dict.fromkeys(workload for workload, _ in found.rows))
    kinds = list(dict.fromkeys(kind for _, kind in found.rows))
    size = (1.2 + 4.6 * len(workloads), 0.4 + 3.8 * len(kinds))
    picture = Figure(figsize=size, layout="constrained")
    grid = picture.subplots(len(kinds), len(workloads), squeeze=False)
    for kind, line in zip(kinds, grid, strict=True):
        for workload, axes in zip(workloads, line, strict=True):
            if (workload, kind) not in found.rows:
                axes.set_axis_off()
                continue
            panel(axes, found, (workload, kind))
            axes.set_title(f"{workload}, {kind}")
            axes.grid(alpha=0.3)
            axes.set_axisbelow(True)
            if axes.get_legend_handles_labels()[0]:
                axes.legend()
    picture.savefig(path, dpi=120)
    return path


def _style(found: Found, system: str) -> dict[str, str]:
    number = found.systems.index(system)
    colour = "0.45" if system == PLAIN else f"C{number % 10}"
    return {"color": colour, "marker": MARKERS[number % len(MARKERS)], "label": system}


def _throughput(axes: Axes, found: Found, place: Place) -> None:
    """Tokens per second against the number of clients; open loops have none."""
    clients = sorted(load.clients for load in found.loads(place) if isinstance(load, Closed))
    for system in found.systems:
        loads = [Closed(n) for n in clients if found.at(place, system, Closed(n))]
        if loads:
            x = [load.clients for load in loads]
            y = [found.value(place, system, load, "output_tok_s") for load in loads]
            axes.plot(x, y, **_style(found, system))
    if clients:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(clients, [str(value) for value in clients])
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.minorticks_off()
    axes.set_xlabel("clients")
    axes.set_ylabel("output tokens/s")


def _frontier(axes: Axes, found: Found, place: Place) -> None:
    """Tokens per second against latency: further up and further left is better."""
    loads: list[Load] = found.loads(place)
    for system in found.systems:
        there = [load for load in loads if found.at(place, system, load)]
        if not there:
            continue
        x = [found.value(place, system, load, "latency_ms", "p50") for load in there]
        y = [found.value(place, system, load, "output_tok_s") for load in there]
        axes.plot(x, y, **_style(found, system))
        for load, *point in zip(there, x, y, strict=True):
            axes.annotate(str(load), point, (4, 4), textcoords="offset points", fontsize=7)
    axes.margins(0.1)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("latency of a request, median (ms)")
    axes.set_ylabel("output tokens/s")
