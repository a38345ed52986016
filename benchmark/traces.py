"""What the GPU does in a round, from a trace of SGLang's own profiler."""

from __future__ import annotations

import gzip
import json
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import requests

_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_KINDS = (
    # FlashAttention's kernels are instances of a CUTLASS template, so they are looked for first.
    ("attention", re.compile(r"flash::|attention|attn|fmha", re.I)),
    ("matrix products", re.compile(r"nvjet|gemm|cutlass|cublas|splitk|matmul|^_skinny", re.I)),
    ("copies", re.compile(r"memcpy|memset", re.I)),
)
_TOP_KERNELS = 40
_TOP_GAPS = 8
# A shorter pause lies between two kernels of one graph; nobody waits for the host there.
_LONG_GAP_US = 5.0
_TRACE_SECONDS = 120


class BadTrace(Exception):
    """A trace from which no round can be told."""


@dataclass(frozen=True)
class Activity:
    """One kernel, copy or fill on the GPU; microseconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class RoundProfile:
    """Where the time of a round goes; microseconds a round, means over `rounds` rounds.

    Attributes:
        round_us: from the start of a round to the start of the next, while it was traced.
        busy_us: at least one stream of the GPU was busy.
        idle_share: 1 - busy_us / round_us.
        long_gap_share: part of the round in pauses of more than 5 µs, which are not launches
            inside a graph.
        launches: kernels, copies and fills of a round.
        kernels: the costliest, with calls a round and µs a round.
        gaps: the costliest pauses by the kernels around them, likewise.
    """

    rounds: int
    round_us: float
    busy_us: float
    idle_share: float
    long_gap_share: float
    launches: float
    kernels: list[dict]
    gaps: list[dict]

    def to_json(self) -> dict:
        return _rounded(asdict(self))


def record(url: str, folder: Path, steps: int, cpu: bool = False) -> None:
    """Makes the server trace its next `steps` steps; returns when it has begun.

    The host is traced only on request: that makes it slower, and the GPU idle.
    """
    body = {
        "output_dir": str(folder),
        "num_steps": steps,
        "activities": ["CPU", "GPU"] if cpu else ["GPU"],
        "with_stack": False,
        "record_shapes": False,
    }
    requests.post(f"{url}/start_profile", json=body, timeout=60).raise_for_status()


def wait_for_trace(folder: Path, seconds: float = _TRACE_SECONDS) -> Path:
    """The trace of the first rank, once it is written.

    Raises:
        BadTrace: it did not appear in time.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for path in sorted(folder.rglob("*.json.gz")):
            if "TP-" not in path.name or re.search(r"TP-0\b", path.name):
                try:
                    with gzip.open(path) as file:
                        while file.read(1 << 20):
                            pass
                    return path
                except (EOFError, OSError):
                    pass  # still being written
        time.sleep(0.5)
    raise BadTrace(f"no trace after {seconds:.0f} s")


def read_trace(path: Path) -> list[Activity]:
    """GPU activities in the order of their starts."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    activities = [
        Activity(event["name"], float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        for event in events
        if event.get("ph") == "X" and event.get("cat") in _ON_GPU
    ]
    return sorted(activities, key=lambda activity: (activity.start, activity.end))


def analyse(activities: Sequence[Activity], steps: int, skip: int = 2) -> RoundProfile:
    """Splits a trace into rounds and says where their time goes.

    Args:
        steps: rounds that were asked for; a trace has a few more or less.
        skip: rounds at its begin that the start of the profiler may have disturbed.

    Raises:
        BadTrace: nothing on the GPU, or nothing that comes once a round.
    """
    if not activities:
        raise BadTrace("no activity of a GPU in the trace")
    starts = round_starts(activities, steps)[skip:]
    if len(starts) < 3:
        raise BadTrace(f"only {len(starts)} rounds in the trace: the requests ended too early")
    rounds, begin, end = len(starts) - 1, starts[0], starts[-1]
    inside = [activity for activity in activities if begin <= activity.start < end]
    gaps = pauses(inside, end)
    idle = sum(us for us, _, _ in gaps)
    return RoundProfile(
        rounds=rounds,
        round_us=(end - begin) / rounds,
        busy_us=(end - begin - idle) / rounds,
        idle_share=idle / (end - begin),
        long_gap_share=sum(us for us, _, _ in gaps if us > _LONG_GAP_US) / (end - begin),
        launches=len(inside) / rounds,
        kernels=_totals(((a.end - a.start, a.name) for a in inside), rounds)[:_TOP_KERNELS],
        gaps=_totals(((us, f"{_short(a)} → {_short(b)}") for us, a, b in gaps), rounds)[:_TOP_GAPS],
    )


def round_starts(activities: Sequence[Activity], steps: int) -> list[float]:
    """Starts of rounds, as the starts of a kernel that comes once a round at the most even pace."""
    by_name = defaultdict(list)
    for activity in activities:
        by_name[activity.name].append(activity.start)
    best: tuple[float, list[float]] | None = None
    for calls in (1, 2, 3, 4):  # a round
        for times in by_name.values():
            if calls * max(steps - 4, 3) <= len(times) <= calls * (steps + 2):
                marks = times[::calls]
                spans = np.diff(marks)
                spread = float(np.std(spans) / max(np.mean(spans), 1e-9))
                if best is None or spread < best[0]:
                    best = spread, marks
        if best:
            return best[1]
    raise BadTrace(f"no kernel comes once a round in a trace of {steps} rounds")


def pauses(activities: Sequence[Activity], end: float) -> list[tuple[float, str, str]]:
    """Pauses of the whole GPU: microseconds, activity before, activity after.

    Args:
        activities: sorted by their starts; the first one begins the span.
        end: end of the span, at which the next round begins.
    """
    found = []
    last = activities[0]
    for activity in activities[1:]:
        if activity.start > last.end:
            found.append((activity.start - last.end, last.name, activity.name))
        if activity.end > last.end:
            last = activity
    if end > last.end:
        found.append((end - last.end, last.name, activities[0].name))
    return found


def by_kind(kernels: Sequence[dict]) -> dict[str, float]:
    """µs a round by kind of kernel, of the kernels that a profile lists."""
    total: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        kind = next((kind for kind, words in _KINDS if words.search(kernel["name"])), "other")
        total[kind] += kernel["us"]
    return dict(total)


def _totals(timed, rounds: int) -> list[dict]:
    """Calls a round and µs a round by name, costliest first; takes (µs, name) pairs."""
    found: dict[str, list[float]] = defaultdict(list)
    for us, name in timed:
        found[name].append(us)
    rows = [
        {
            "name": name.removeprefix("void ")[:240],
            "calls": len(times) / rounds,
            "us": sum(times) / rounds,
            "median_us": statistics.median(times),
        }
        for name, times in found.items()
    ]
    return sorted(rows, key=lambda row: -row["us"])


def _short(name: str) -> str:
    return name.removeprefix("void ")[:60]


def _rounded(value):
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    return [_rounded(part) for part in value] if isinstance(value, list) else value
