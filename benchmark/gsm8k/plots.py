"""Plots of a sweep; matplotlib is an optional extra."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmark.gsm8k.cells import BASELINE
from benchmark.gsm8k.errors import CannotSweep

Rows = Sequence[dict[str, Any]]
_COLOURS = {BASELINE: "#8a8a8a", "v1": "#3b7dd8", "v2": "#d1495b"}
_STYLES = ("-", "--", ":", "-.")


def require_matplotlib() -> Any:
    """matplotlib's pyplot, drawing into files.

    Raises:
        CannotSweep: it is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise CannotSweep(
            "--plot needs matplotlib, which is not installed: install it, or leave --plot out."
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw(rows: Rows, folder: Path) -> list[Path]:
    """Writes the plots; returns their files."""
    pyplot = require_matplotlib()
    folder.mkdir(parents=True, exist_ok=True)
    good = [row for row in rows if not row.get("error")]
    plots: dict[str, Callable[[Any, Rows], None]] = {
        "throughput": _throughput,
        "speedup": _speedup,
        "latency": _latency,
        "accept_histogram": _histogram,
    }
    files = []
    for name, plot in plots.items():
        figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
        plot(axes, good)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8, frameon=False)
        axes.grid(alpha=0.25)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        files.append(folder / f"{name}.png")
        figure.savefig(files[-1], dpi=140)
        pyplot.close(figure)
    return files


def _lines(rows: Rows) -> dict[tuple[str, int, str], list[dict]]:
    """Rows of each arm by concurrency."""
    found: dict[tuple[str, int, str], list[dict]] = {}
    for row in sorted(rows, key=lambda row: row["concurrency"]):
        found.setdefault((row["backend"], row["tp"], row["arm"]), []).append(row)
    return found


def _plot(axes: Any, line: tuple[str, int, str], rows: Rows, xs: list, ys: list) -> None:
    backend, tp, arm = line
    lines = list(dict.fromkeys((row["backend"], row["tp"]) for row in rows))
    style = _STYLES[lines.index((backend, tp)) % len(_STYLES)]
    label = f"{arm}, {backend}, tp {tp}"
    axes.plot(xs, ys, style, marker="o", markersize=4, color=_COLOURS.get(arm), label=label)


def _by_concurrency(axes: Any, rows: Rows) -> None:
    ticks = sorted({row["concurrency"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, labels=map(str, ticks))
    axes.set_xlabel("concurrency")


def _throughput(axes: Any, rows: Rows) -> None:
    for line, mine in _lines(rows).items():
        xs = [row["concurrency"] for row in mine]
        _plot(axes, line, rows, xs, [row["output_tok_s"] for row in mine])
    _by_concurrency(axes, rows)
    axes.set_yscale("log")
    axes.set_ylabel("output tokens/s")


def _speedup(axes: Any, rows: Rows) -> None:
    lines = _lines(rows)
    for (backend, tp, arm), mine in lines.items():
        baseline = {row["concurrency"]: row for row in lines.get((backend, tp, BASELINE), [])}
        both = [row for row in mine if row["concurrency"] in baseline]
        if arm == BASELINE or not both:
            continue
        xs = [row["concurrency"] for row in both]
        ys = [row["output_tok_s"] / baseline[row["concurrency"]]["output_tok_s"] for row in both]
        _plot(axes, (backend, tp, arm), rows, xs, ys)
    _by_concurrency(axes, rows)
    axes.axhline(1, color="#8a8a8a", linewidth=1)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("speedup over plain decoding")


def _latency(axes: Any, rows: Rows) -> None:
    timed = [row for row in rows if row.get("inter_token_ms")]
    for line, mine in _lines(timed).items():
        xs = [row["output_tok_s"] for row in mine]
        _plot(axes, line, rows, xs, [row["inter_token_ms"]["p50"] for row in mine])
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("output tokens/s")
    axes.set_ylabel("time of a token, median, ms")


def _histogram(axes: Any, rows: Rows) -> None:
    arms = list(dict.fromkeys(row["arm"] for row in rows if row.get("accept_histogram")))
    for index, arm in enumerate(arms):
        counts = [row["accept_histogram"] for row in rows if row["arm"] == arm]
        length = max(map(len, counts))
        total = [sum(each[i] for each in counts if i < len(each)) for i in range(length)]
        width = 0.8 / len(arms)
        xs = [i - 0.4 + width * (index + 0.5) for i in range(length)]
        shares = [100 * n / sum(total) for n in total]
        axes.bar(xs, shares, width, color=_COLOURS.get(arm), label=arm)
    axes.set_xlabel("drafts accepted in a verify step")
    axes.set_ylabel("verify steps, %")
