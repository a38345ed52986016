"""Traffic that changes: how fast servers are after their text or the number of their clients has changed."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmark import jsonl
from benchmark.errors import CannotMeasure
from benchmark.options import check_plot, number
from benchmark.shapes import TINY
from benchmark.traffic import workloads
from benchmark.traffic.answers import Answer
from benchmark.traffic.arguments import PROG
from benchmark.traffic.clients import Clients, Job, Phase
from benchmark.traffic.profile import pool_of, server_at
from benchmark.traffic.workloads import KINDS, Sampling


@dataclass(frozen=True)
class Change:
    """What is asked from a moment on."""

    workload: str
    kind: str
    clients: int

    @classmethod
    def of(cls, text: str) -> Change:
        parts = text.strip().split("/")
        workload, kind = parts[0], parts[1] if len(parts) == 3 else "greedy"
        if len(parts) not in (2, 3) or workload not in workloads.FILES or kind not in KINDS:
            raise argparse.ArgumentTypeError(
                f"{text} is not WORKLOAD/CLIENTS or WORKLOAD/KIND/CLIENTS, as in chat/8 or gsm8k/sampled/8"
            )
        if not parts[-1].isdigit() or not int(parts[-1]):
            raise argparse.ArgumentTypeError(f"{text} has no clients: end it with a number above 0")
        return cls(workload, kind, int(parts[-1]))

    def __str__(self) -> str:
        kind = "" if self.kind == "greedy" else f" {self.kind}"
        return f"{self.workload}{kind} c={self.clients}"


def named_url(text: str) -> tuple[str, str]:
    name, equals, url = text.partition("=")
    if not (name and equals and url.startswith("http")):
        raise argparse.ArgumentTypeError(f"{text} is not NAME=URL")
    return name, url.rstrip("/")


def parser() -> argparse.ArgumentParser:
    whole = argparse.ArgumentParser(
        prog=f"{PROG} changing",
        description="Asks servers that run already, one after the other, what changes from phase to phase while "
        "requests are under way, and says how many tokens a second came just after each change and later.",
    )
    add = whole.add_argument
    add("--url", type=named_url, action="append", required=True, metavar="NAME=URL", dest="urls")
    add(
        "--phases",
        type=lambda text: [Change.of(part) for part in text.split(",")],
        default="chat/8,gsm8k/8,chat/8",
        metavar="PHASE,…",
        help="WORKLOAD/CLIENTS or WORKLOAD/KIND/CLIENTS; %(default)s",
    )
    add("--seconds", type=number(0, 600, above=True), default=6.0, help="of a phase; %(default)s")
    add(
        "--settle",
        type=number(0, 600),
        default=2.0,
        help="seconds in which a server may find out about a change; %(default)s",
    )
    add("--data", type=Path, default=TINY / "data", metavar="DIR", help="the workloads' files")
    add("--output-file", type=Path, metavar="FILE", help="JSON lines")
    add("--plot", type=Path, metavar="FILE", help="also draw it, as PNG; needs matplotlib")
    return whole


def main(given: Sequence[str]) -> int:
    options = parser().parse_args(given)
    names = [name for name, _ in options.urls]
    if len(names) > len(set(names)):
        raise CannotMeasure(f"--url has {', '.join(names)}: give each server a name of its own.")
    if options.settle >= options.seconds:
        raise CannotMeasure(
            f"--settle {options.settle:g} leaves nothing of --seconds {options.seconds:g}: make it shorter."
        )
    if options.plot is not None:
        check_plot(options.plot.parent)
        options.plot.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    with Clients() as clients:
        for name, url in options.urls:
            answers, start = _asked(options, url, clients)
            rows.append({"system": name} | rates(answers, start, options))
    print(table(rows))
    if options.output_file is not None:
        jsonl.write(options.output_file, rows)
    if options.plot is not None:
        draw(rows, options.plot)
    return 0


def _asked(options: argparse.Namespace, url: str, clients: Clients) -> tuple[list[Answer], float]:
    """All answers of a server, and when the first phase began."""
    served, target = server_at(url)
    names = {change.workload for change in options.phases}
    pools = {name: pool_of(name, options.data, target) for name in names}
    phases = [
        Phase(
            pools[change.workload].bodies(change.kind, Sampling(0.7, 0.9, 0), served.model),
            change.clients,
            options.seconds,
        )
        for change in options.phases
    ]
    served.flush()
    timeout = len(phases) * options.seconds + 120
    heard = clients.ask(Job(served.url, (), phases=phases, most=1 << 30, timeout=timeout))
    return heard.answers, heard.answers[0].began


def rates(answers: Sequence[Answer], start: float, options: argparse.Namespace) -> dict:
    """Output tokens a second in each phase, and in each half second.

    Args:
        start: of the first phase, by the clock of the answers.
    """
    begins = start + options.seconds * np.arange(len(options.phases))
    edges = np.concatenate([begins, begins + options.settle, begins + options.seconds])
    halves = start + np.arange(0, options.seconds * len(options.phases) + 1e-9, 0.5)
    came = sum(answer.tokens_until(np.concatenate([edges, halves])) for answer in answers)
    came, over_time = np.split(came, [len(edges)])
    first, settled, end = came.reshape(3, -1)
    return {
        "phases": [str(change) for change in options.phases],
        "seconds": options.seconds,
        "settle": options.settle,
        "at_first_tok_s": _rounded((settled - first) / options.settle) if options.settle else None,
        "later_tok_s": _rounded((end - settled) / (options.seconds - options.settle)),
        "over_time_tok_s": _rounded(np.diff(over_time) / 0.5),
    }


def _rounded(values: np.ndarray) -> list[float]:
    return [round(float(value), 1) for value in values]


def table(rows: Sequence[dict]) -> str:
    """Each phase by system, and what the first system is over the best of the others."""
    names = [row["system"] for row in rows]
    wide = max(12, *(len(name) + 2 for name in names))
    over = f"{names[0]} / best" if len(rows) > 1 else ""
    head = "".join(f"{name:>{wide}}" for name in names)
    lines = [f"{'output tok/s':34}{head}{over:>{len(over) + 3}}"]
    settle = f"{rows[0]['settle']:g}"
    for at, phase in enumerate(rows[0]["phases"]):
        for when, key in ((f"first {settle} s", "at_first_tok_s"), ("later", "later_tok_s")):
            if rows[0][key] is None:
                continue
            values = [row[key][at] for row in rows]
            line = f"{phase:20}{when:14}" + "".join(f"{value:>{wide},.0f}" for value in values)
            if len(values) > 1 and max(values[1:]):
                line += f"{values[0] / max(values[1:]):>{len(over) + 3}.2f}"
            lines.append(line)
    return "\n".join(lines)


def draw(rows: Sequence[dict], path: Path) -> None:
    """Writes tokens a second over time as PNG, with a line at each change."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(9, 3.8), layout="constrained")
    axes = picture.subplots()
    for row in rows:
        rate = row["over_time_tok_s"]
        axes.plot(0.25 + 0.5 * np.arange(len(rate)), rate, label=row["system"])
    for at, phase in enumerate(rows[0]["phases"]):
        begin = at * rows[0]["seconds"]
        axes.axvline(begin, color="0.7", linewidth=0.8)
        axes.annotate(phase, (begin, 1.01), xycoords=("data", "axes fraction"), fontsize=8)
    axes.set(xlabel="seconds", ylabel="output tokens a second", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    picture.savefig(path, dpi=120)
