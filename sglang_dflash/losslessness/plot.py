"""Regret by position, as a picture. Needs matplotlib: the extra `plot`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sglang_dflash.losslessness.errors import CannotCompare
from sglang_dflash.losslessness.greedy import Greedy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def check_plot(path: Path) -> None:
    """Before hours of decoding rather than after them.

    Raises:
        CannotCompare: matplotlib is missing, or does not know the file's ending.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise CannotCompare(
            f"--plot {path} needs matplotlib, which is not installed: install the extra `plot`, or "
            "leave --plot out."
        )
    from matplotlib.figure import Figure

    known = Figure().canvas.get_supported_filetypes()
    if path.suffix.lstrip(".") not in known:
        raise CannotCompare(f"--plot {path} must end with one of .{', .'.join(sorted(known))}.")


def plot_regret(greedy: Greedy, path: Path) -> None:
    """Writes `regret_figure`."""
    regret_figure(greedy).savefig(path, dpi=120)


def regret_figure(greedy: Greedy) -> Figure:
    """Above: regret and top-2 gap of each divergence; below: how many answers reach a position."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    if greedy.divergences:
        _scatter(above, greedy)
    else:
        above.set_yticks([])
        above.text(
            *(0.5, 0.5, "no divergence: every token is plain decoding's own choice"),
            **dict(ha="center", va="center", transform=above.transAxes),
        )
    above.set_title(
        f"{len(greedy.divergences)} divergences from plain decoding in {sum(greedy.lengths):,} tokens"
    )
    lengths = np.sort(greedy.lengths)
    grid = np.arange(lengths[-1] + 1)
    below.step(grid, len(lengths) - np.searchsorted(lengths, grid, side="right"), where="post")
    below.set_ylabel("answers")
    below.set_xlabel("position in the answer (tokens)")
    return figure


def _scatter(above: Axes, greedy: Greedy) -> None:
    positions = [d.position for d in greedy.divergences]
    above.scatter(positions, [d.gap for d in greedy.divergences], 24, "none", edgecolors="grey")
    above.scatter(positions, [d.regret for d in greedy.divergences], 12, "C0")
    above.axhline(greedy.max_regret, color="C3", linestyle="--")
    # Linear near zero, where ties are, and logarithmic where a broken server would be.
    above.set_yscale("symlog", linthresh=greedy.max_regret)
    above.set_ylim(bottom=0)
    above.set_ylabel("nat")
    above.legend(["top-2 gap", "regret", f"limit, {greedy.max_regret:g} nat"])
