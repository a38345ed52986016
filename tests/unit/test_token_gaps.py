"""Gaps between tokens: what is written in the end is what the release writes at once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import prometheus_client
import pytest
from sglang.srt.observability.metrics_collector import TokenizerMetricsCollector

from sglang_dflash.serving.token_gaps import WRITTEN_EVERY, TalliedGaps

LABELS = {"model_name": "m", "customer": ""}


@pytest.fixture
def registries(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[list[prometheus_client.CollectorRegistry]]:
    """Of each collector that is made, the last one last."""
    made: list[prometheus_client.CollectorRegistry] = []
    for kind in ("Counter", "Gauge", "Histogram"):
        original = getattr(prometheus_client, kind)
        monkeypatch.setattr(
            prometheus_client,
            kind,
            lambda original=original, **options: original(registry=made[-1], **options),
        )
    yield made


def gaps(registry: prometheus_client.CollectorRegistry) -> dict[tuple, float]:
    """Of all labels, what is in the histogram's buckets and its sum."""
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for metric in registry.collect()
        if metric.name == "sglang:inter_token_latency_seconds"
        for sample in metric.samples
        if not sample.name.endswith("_created")
    }


def test_same_as_the_release(registries: list) -> None:
    """Gaps on bounds, between them and beyond the last, of several labels, in several writings."""
    collectors = []
    for kind in (TokenizerMetricsCollector, TalliedGaps):
        registries.append(prometheus_client.CollectorRegistry())
        collectors.append(kind(labels=LABELS))
    release, tallied = collectors
    drawn = random.Random(1)
    bounds = release.histogram_inter_token_latency._upper_bounds[:-1]

    async def observe() -> None:
        for _ in range(3):
            for _ in range(200):
                tokens = drawn.choice((1, 2, 7, 8))
                gap = drawn.choice((drawn.choice(bounds), drawn.expovariate(20), 1e3))
                labels = LABELS | {"customer": drawn.choice("ab")}
                for collector in collectors:
                    collector.observe_inter_token_latency(labels, gap * tokens, tokens)
            await asyncio.sleep(2 * WRITTEN_EVERY)

    asyncio.run(observe())
    expected, written = map(gaps, registries)
    assert len(expected) > 40 and expected.keys() == written.keys()
    assert written == pytest.approx(expected)
    assert not tallied._tallies


def test_written_together(registries: list) -> None:
    registries.append(prometheus_client.CollectorRegistry())
    collector = TalliedGaps(labels=LABELS)

    async def observe() -> list[float]:
        totals = []
        for _ in range(50):
            collector.observe_inter_token_latency(LABELS, 0.02, 8)
        for seconds in (0, 2 * WRITTEN_EVERY):
            await asyncio.sleep(seconds)
            counts = [
                n for (name, *_), n in gaps(registries[-1]).items() if name.endswith("_count")
            ]
            totals.append(sum(counts))
        return totals

    assert asyncio.run(observe()) == [0, 400]
