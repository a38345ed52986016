"""The dashboard and the documentation name the metrics that there are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from prometheus_client import REGISTRY

from sglang_dflash.round.run import NO_GRAPH
from sglang_dflash.scheduler.plan import NARROW, PLAIN, PROBE, RAGGED, WHOLE
from sglang_dflash.scheduler.worker_v2 import SLOTS
from sglang_dflash.serving.metrics import ALONE, IN_ROUNDS, METRICS, NoMetrics, RoundMetrics

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
    for reason in (NO_GRAPH, SLOTS, IN_ROUNDS, ALONE, *plans):
        assert f"| `{reason}` |" in text
    requests = (DOCS.parent / "sglang_dflash" / "serving" / "requests.py").read_text()
    refusals = set(re.findall(r'refusing\("(\w+)"\)', requests))
    assert refusals and all(f"| `{reason}` |" in text for reason in refusals)


def test_rows_of_prompts() -> None:
    """Counted by way, under the labels of the server; nothing at all is counted without metrics."""
    draft = SimpleNamespace(
        token_to_kv_pool_allocator=None, token_to_kv_pool=SimpleNamespace(size=8)
    )
    args = SimpleNamespace(speculative_num_draft_tokens=4)
    metrics = RoundMetrics(args, {"model_name": "rows of prompts"}, draft, 1)
    for rows, way in ((30, IN_ROUNDS), (5, ALONE), (12, IN_ROUNDS), (0, ALONE)):
        metrics.ran_prompts(rows, way)
        NoMetrics().ran_prompts(rows, way)
    for way, expected in ((IN_ROUNDS, 42), (ALONE, 5)):
        labels = {"model_name": "rows of prompts", "way": way}
        assert REGISTRY.get_sample_value("sglang:dflash_prompt_rows_total", labels) == expected


def test_what_is_expected_of_drafts() -> None:
    """Of those that were tried alone: verified, and all before them accepted."""
    draft = SimpleNamespace(
        token_to_kv_pool_allocator=None, token_to_kv_pool=SimpleNamespace(size=8)
    )
    args = SimpleNamespace(speculative_num_draft_tokens=4)
    metrics = RoundMetrics(args, {"model_name": "expected"}, draft, 1)
    alone = torch.tensor([[0.9, 0.5, 0.8], [0.7, 0.6, 0.4], [0.2, 0.1, 0.3]])
    rows, lengths = torch.tensor([[4.0], [2.0], [1.0]]), torch.tensor([2, 2, 1])
    metrics.expected(alone.cumprod(dim=1), rows, lengths)
    # Of the first, drafts 1 and 2 were tried; of the second, 1, whose last row gave its bonus token; of the third none.
    found = {"tried": (2, 1), "survived": (2, 0), "expected": (0.9 + 0.7, 0.5)}
    for name, values in found.items():
        for position, value in enumerate((*values, 0), start=1):
            labels = {"model_name": "expected", "position": str(position)}
            sample = REGISTRY.get_sample_value(f"sglang:dflash_{name}_at_position_total", labels)
            assert (sample or 0) == pytest.approx(value)
