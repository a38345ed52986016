"""The dashboard and the documentation name the metrics that there are."""

from __future__ import annotations

import json
import random
import re
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from prometheus_client import REGISTRY

from sglang_dflash.round.run import NO_GRAPH
from sglang_dflash.scheduler.choices import NARROW, PLAIN, PROBE, RAGGED, WHOLE
from sglang_dflash.scheduler.pace import Pace
from sglang_dflash.scheduler.worker_v2 import SLOTS
from sglang_dflash.serving.metrics import (
    ALONE,
    IN_ROUNDS,
    METRICS,
    WITH_PROMPTS,
    WITHOUT_PROMPTS,
    NoMetrics,
    RoundMetrics,
)
from sglang_dflash.serving.round_counts import RoundCounts

DOCS = Path(__file__).parents[2] / "docs"
BOARD = json.loads((DOCS / "grafana" / "dflash.json").read_text())
EXPRESSIONS = [target["expr"] for panel in BOARD["panels"] for target in panel["targets"]]
NAME = re.compile(r"sglang:[a-z_]+")
SUFFIXES = ("_sum", "_count", "_bucket")


def metric(name: str) -> str:
    """The metric to which a time series belongs."""
    for suffix in SUFFIXES:
        base = name.removesuffix(suffix)
        if METRICS.get(base, ("",))[0] == "Histogram":
            return base
    return name


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_queries(expression: str) -> None:
    """Each asks for time series of a kind that fits, by labels that they have."""
    names = NAME.findall(expression)
    assert names and {metric(name) for name in names} <= METRICS.keys()
    labels = {label for name in names for label in METRICS[metric(name)][2]}
    labels |= {"le"} if any(name.endswith("_bucket") for name in names) else set()
    assert set(re.findall(r"by \((\w+)\)", expression)) <= labels
    for name in names:
        ever_growing = METRICS[metric(name)][0] != "Gauge"
        assert bool(re.search(rf"(rate|increase)\({name}\{{", expression)) == ever_growing
        assert METRICS.get(name, ("",))[0] != "Histogram"  # has no series of its own name
    assert expression.count("(") == expression.count(")")


def test_dashboard_shows_every_metric() -> None:
    shown = {metric(name) for expression in EXPRESSIONS for name in NAME.findall(expression)}
    assert shown == METRICS.keys()
    (query,) = (each["query"] for each in BOARD["templating"]["list"] if each["name"] == "model")
    assert NAME.findall(query) and set(NAME.findall(query)) <= METRICS.keys()


def test_documentation() -> None:
    """One row for each metric with its kind and label, and one for each reason."""
    text = (DOCS / "metrics.md").read_text()
    rows = re.findall(r"^\| `(sglang:\S+)` \| (\w+)(?:, `(\w+)`)? \|", text, re.M)
    documented = {
        name: (kind.capitalize(), (label,) if label else ()) for name, kind, label in rows
    }
    assert documented == {name: (kind, labels) for name, (kind, _, labels) in METRICS.items()}
    plans = (WHOLE, RAGGED, NARROW, PLAIN, PROBE)
    rounds = (WITH_PROMPTS, WITHOUT_PROMPTS)
    for reason in (NO_GRAPH, SLOTS, IN_ROUNDS, ALONE, *plans, *rounds):
        assert f"| `{reason}` |" in text
    requests = (DOCS.parent / "sglang_dflash" / "serving" / "requests.py").read_text()
    refusals = set(re.findall(r'refusing\("(\w+)"\)', requests))
    assert refusals and all(f"| `{reason}` |" in text for reason in refusals)


def metrics_of(name: str, block_size: int = 9, pace: Pace | None = None) -> RoundMetrics:
    """Under a label of their own; two of eight slots are in use."""
    pool = SimpleNamespace(available_size=lambda: 6)
    draft = SimpleNamespace(
        token_to_kv_pool_allocator=pool, token_to_kv_pool=SimpleNamespace(size=8)
    )
    args = SimpleNamespace(speculative_num_draft_tokens=block_size)
    pace = pace or Pace(SimpleNamespace(world_size=1))
    return RoundMetrics(args, {"model_name": name}, draft, 100, pace)


def value(name: str, model: str, **own: str) -> float:
    """What Prometheus has; 0 for what was never counted."""
    sample = REGISTRY.get_sample_value(f"sglang:dflash_{name}", {"model_name": model} | own)
    return sample or 0


def test_rows_of_prompts() -> None:
    """Counted by way, under the labels of the server; nothing at all is counted without metrics."""
    metrics = metrics_of("rows of prompts")
    for rows, way in ((30, IN_ROUNDS), (5, ALONE), (12, IN_ROUNDS), (0, ALONE)):
        metrics.ran_prompts(rows, way)
        NoMetrics().ran_prompts(rows, way)
    for way, expected in ((IN_ROUNDS, 42), (ALONE, 5)):
        assert value("prompt_rows_total", "rows of prompts", way=way) == expected


def test_pace_of_the_host() -> None:
    """In seconds, as far as it was measured."""
    pace = Pace(SimpleNamespace(world_size=1))
    metrics = metrics_of("pace", pace=pace)
    metrics.write()
    assert not value("host_step_seconds", "pace", way=WITHOUT_PROMPTS)
    pace.alone, pace.with_prompts = np.array([3.0, 4.0]), np.array([6.0])
    metrics.write()
    assert value("host_step_seconds", "pace", way=WITHOUT_PROMPTS) == 3.5e-3
    assert value("host_step_seconds", "pace", way=WITH_PROMPTS) == 6e-3


def test_what_is_expected_of_drafts() -> None:
    """Of those that were tried alone: verified, and all before them accepted."""
    metrics = metrics_of("expected")
    alone = np.array([[0.9, 0.5, 0.8], [0.7, 0.6, 0.4], [0.2, 0.1, 0.3]])
    rows, lengths = np.array([[4.0], [2.0], [1.0]]), np.array([2, 2, 1])
    metrics.expected(alone.cumprod(axis=1), rows, lengths)
    metrics.write()
    # Of the first, drafts 1 and 2 were tried; of the second, 1, whose last row gave its bonus token; of the third none.
    found = {"tried": (2, 1), "survived": (2, 0), "expected": (0.9 + 0.7, 0.5)}
    for name, values in found.items():
        for position, amount in enumerate((*values, 0), start=1):
            got = value(f"{name}_at_position_total", "expected", position=str(position))
            assert got == pytest.approx(amount)


def test_drafts_of_many_rounds() -> None:
    """Of any widths, all in vain in some: together they are what each of them adds."""
    draw, together, alone = np.random.default_rng(0), RoundCounts(9), defaultdict(float)
    for _ in range(40):
        requests, drafts = draw.integers(0, 5), draw.integers(1, 9)
        chances = draw.random((requests, drafts)).cumprod(axis=1)
        rows = draw.integers(1, drafts + 2, (requests, 1))
        told = chances, rows.astype(float), draw.integers(1, rows[:, 0] + 1)
        single = RoundCounts(9)
        for counts in (single, together):
            counts.expected(*told)
        for name, amount in single.take_out()[0].items():
            alone[name] += amount
    amounts, _ = together.take_out()
    assert amounts == pytest.approx(alone) and amounts["tried_at_position", "1"] > 20
    assert not together.take_out()[0]


def test_rounds_of_any_width() -> None:
    """Sums of many rounds are what each of them adds, in counters and in the histogram."""
    metrics, draw, block_size = metrics_of("widths"), random.Random(0), 9
    drafted, accepted, taken = [0] * block_size, [0] * block_size, []
    for _ in range(40):
        width = draw.randint(1, block_size)
        took = [draw.randint(1, width) for _ in range(draw.randint(0, 5))]
        metrics.committed(width, took, draw.randint(0, 1), goes_on=True)
        taken += took
        for length in took:
            for position in range(1, width):
                drafted[position] += 1
                accepted[position] += length > position
    metrics.write()
    assert value("rounds_total", "widths") == value("accept_length_count", "widths") == len(taken)
    assert value("drafted_tokens_total", "widths") == sum(drafted)
    assert value("accepted_tokens_total", "widths") == sum(accepted) == sum(taken) - len(taken)
    assert value("accept_length_sum", "widths") == sum(taken)
    for at in range(1, block_size):
        own = {"position": str(at)}
        assert value("drafted_at_position_total", "widths", **own) == drafted[at]
        assert value("accepted_at_position_total", "widths", **own) == accepted[at]
        within = value("accept_length_bucket", "widths", le=f"{at}.0")
        assert within == sum(length <= at for length in taken)


def test_when_counts_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """While rounds follow each other ten times a second; at once when none follows, or none may."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    metrics = metrics_of("when")

    def commit(at: float, goes_on: bool = True) -> float:
        now[0] = at
        metrics.fell_back(SLOTS)
        metrics.launched(WHOLE, 4)
        metrics.stepped(2)
        metrics.committed(4, [3], 0, goes_on)
        return value("rounds_total", "when")

    assert [commit(at) for at in (1000.0, 1000.05, 1000.09, 1000.11)] == [1, 1, 1, 4]
    assert commit(1000.12) == 4 and commit(1000.13, goes_on=False) == 6
    assert value("verified_rows_total", "when") == 24
    assert value("planned_rounds_total", "when", plan=WHOLE) == 6
    assert value("steps_total", "when", rounds="2") == 6
    assert value("fallbacks_total", "when", reason=SLOTS) == 6
    assert value("draft_kv_used_tokens", "when") == 2
    assert value("draft_kv_used_bytes", "when") == 200
    metrics.fell_back(SLOTS)
    metrics.ran_prompts(7, ALONE)
    assert value("fallbacks_total", "when", reason=SLOTS) == 7
    metrics.not_finite(1)
    assert value("not_finite_total", "when") == 1
