"""From results to tables: medians, ratios, targets, simulated acceptance."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from benchmark.servers import OWN

# What v2 must reach on an H200 with the shape and block size below: at concurrency 1, 8 and 32.
TARGET_SHAPE, TARGET_BLOCK, TARGET_GPU = "qwen3-8b", 16, "NVIDIA H200"
OVER_V1 = {1: 1.20, 8: 1.20, 32: 1.05}
OVER_PEER = {1: 1.15, 8: 1.15, 32: 1.10}
IDLE_SHARE = {1: 0.05, 8: 0.04, 32: 0.02}


@dataclass
class Cell:
    """All repeats of one system at one concurrency; what was only profiled has no rates."""

    rounds_per_s: list[float] = field(default_factory=list)
    tok_per_s: list[float] = field(default_factory=list)
    round_ms: list[float] = field(default_factory=list)
    accept_length: list[float] = field(default_factory=list)
    profile: dict | None = None

    def median(self, name: str) -> float | None:
        values = getattr(self, name)
        return statistics.median(values) if values else None

    def idle_share(self) -> float | None:
        """Part of the round in which no stream of the GPU was busy, while it was traced."""
        return self.profile and self.profile["idle_share"]

    def idle_share_untraced(self) -> float | None:
        """The same for a round without the tracer, which makes rounds longer.

        Takes the busy time from the trace, so it is right as far as tracing leaves kernels as fast
        as they are.
        """
        round_ms = self.median("round_ms")
        if not self.profile or not round_ms:
            return None
        return 1 - self.profile["busy_us"] / 1e3 / round_ms


Cells = dict[tuple[str, int], Cell]


def read_lines(files: Iterable[Path]) -> list[dict]:
    """Results of all files, oldest first."""
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines() if line]
    return sorted(lines, key=lambda line: line["time"])


def groups(lines: Iterable[dict]) -> dict[tuple, list[dict]]:
    """Lines that may be compared: one run, shape, block size and length of answers."""
    found: dict[tuple, list[dict]] = {}
    for line in lines:
        key = tuple(line[name] for name in ("run", "shape", "block_size", "new_tokens"))
        found.setdefault(key, []).append(line)
    return found


def cells(lines: Iterable[dict]) -> Cells:
    """Samples of all repeats by system and concurrency; of profiles the last."""
    found: Cells = {}
    for line in lines:
        cell = found.setdefault((line["system"], line["concurrency"]), Cell())
        for sample in line["samples"]:
            for name in ("rounds_per_s", "tok_per_s", "round_ms", "accept_length"):
                getattr(cell, name).append(sample[name])
        cell.profile = line.get("profile") or cell.profile
    return found


def systems(found: Cells) -> list[str]:
    """This project's first, then peers, then plain decoding."""
    order = {name: rank for rank, name in enumerate(("v1", "v2", "v2-plan"))}
    names = dict.fromkeys(name for name, _ in found)
    return sorted(names, key=lambda name: order.get(name, 99 if name == "plain" else 50))


def peers(found: Cells) -> list[str]:
    return [name for name in systems(found) if name not in OWN]


def concurrencies(found: Cells) -> list[int]:
    return sorted({concurrency for _, concurrency in found})


def overlapped(found: Cells) -> list[str]:
    return [name for name in systems(found) if name in ("v2", "v2-plan")]


def rates_table(found: Cells) -> list[list[str]]:
    """Rounds per second and median round; plain decoding commits one token a round."""
    table = [["", *(f"c={c}" for c in concurrencies(found))]]
    for name in systems(found):
        row = [f"{name} (tok/s)" if name == "plain" else f"{name} (rounds/s)"]
        for concurrency in concurrencies(found):
            rate = _rate(found, name, concurrency)
            if rate is None:
                row.append("–")
            else:
                round_ms = found[name, concurrency].median("round_ms")
                row.append(f"{rate:,.0f} · {round_ms:.2f} ms")
        table.append(row)
    return table


def ratios_table(found: Cells, with_targets: bool) -> list[list[str]]:
    """Rounds per second of v2 over those of v1 and of each peer, against the targets."""
    table = [["", *(f"c={c}" for c in concurrencies(found))]]
    for name in overlapped(found):
        for other in ["v1", *peers(found)]:
            targets = (OVER_V1 if other == "v1" else OVER_PEER) if with_targets else {}
            row = [f"{name} / {other}, rounds/s"]
            for concurrency in concurrencies(found):
                ours = _rate(found, name, concurrency)
                theirs = _rate(found, other, concurrency)
                ratio = ours / theirs if ours and theirs else None
                row.append(_against(ratio, targets.get(concurrency), "{:.3f}", least=True))
            if any(value != "–" for value in row[1:]):
                table.append(row)
    return table


def idle_table(found: Cells, with_targets: bool) -> list[list[str]]:
    """Idle shares of the systems of which there is a profile."""
    table = [["", *(f"c={c}" for c in concurrencies(found))]]
    for name in systems(found):
        row_cells = [found.get((name, concurrency)) for concurrency in concurrencies(found)]
        if not any(cell and cell.profile for cell in row_cells):
            continue
        targets = IDLE_SHARE if with_targets and name in overlapped(found) else {}
        traced, untraced = [f"{name}, traced round"], [f"{name}, round without tracer"]
        for concurrency, cell in zip(concurrencies(found), row_cells, strict=True):
            target = targets.get(concurrency)
            traced.append(_against(cell and cell.idle_share(), target, "{:.1%}", least=False))
            share = cell and cell.idle_share_untraced()
            untraced.append("–" if share is None else f"{share:.1%}")
        table += [traced, untraced]
    return table


def _rate(found: Cells, system: str, concurrency: int) -> float | None:
    cell = found.get((system, concurrency))
    return cell and cell.median("rounds_per_s")


def gpus(group: Sequence[dict]) -> str:
    """What a run had: `NVIDIA H200`, `2 × NVIDIA H200`, or `CPU`."""
    origin = group[0]["provenance"]
    name, count = origin["gpu"].get("name", "CPU"), origin["machine"]["gpus_used"]
    return f"{count} × {name}" if count > 1 else name


def has_targets(shape: str, block_size: int, gpus: str) -> bool:
    """Whether there are targets for this; they are about one GPU."""
    return shape == TARGET_SHAPE and block_size == TARGET_BLOCK and gpus == TARGET_GPU


def _against(value: float | None, target: float | None, form: str, least: bool) -> str:
    if value is None:
        return "–"
    text = form.format(value)
    if target is None:
        return text
    met = value >= target if least else value <= target
    return f"{text} ({'≥' if least else '≤'} {form.format(target)}: {'met' if met else 'missed'})"


def tokens_per_round(survival: Sequence[float], block_size: int) -> float:
    """Tokens that a round commits on average, if draft i is accepted with probability survival[i].

    The bonus token comes on top. A curve that is shorter than the block counts as 0 where it ends.

    Raises:
        ValueError: a probability is not in [0, 1] or rises.
    """
    if any(not 0 <= p <= 1 for p in survival) or any(
        later > earlier for earlier, later in pairwise(survival)
    ):
        raise ValueError("a survival curve falls from draft to draft, and stays between 0 and 1")
    return 1 + sum(survival[: block_size - 1])


def simulated_table(found: Cells, survival: Sequence[float], block_size: int) -> list[list[str]]:
    """Tokens per second at equal acceptance: simulated for speculation, measured for plain."""
    tokens = tokens_per_round(survival, block_size)
    table = [
        [f"tok/s, simulated at accept length {tokens:.2f}"]
        + [f"c={c}" for c in concurrencies(found)]
    ]
    for name in systems(found):
        row = [f"{name} (measured)" if name == "plain" else f"{name} (simulated)"]
        for concurrency in concurrencies(found):
            rate = _rate(found, name, concurrency)
            per_round = 1.0 if name == "plain" else tokens
            row.append("–" if rate is None else f"{rate * per_round:,.0f}")
        table.append(row)
    return table


def as_text(table: Sequence[Sequence[str]]) -> str:
    """A table for a terminal."""
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    return "\n".join(
        "  ".join(
            value.ljust(width) if i == 0 else value.rjust(width)
            for i, (value, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    )


def as_markdown(table: Sequence[Sequence[str]]) -> str:
    head, *rows = ["| " + " | ".join(row) + " |" for row in table]
    return "\n".join([head, "|---" * len(table[0]) + "|", *rows])
