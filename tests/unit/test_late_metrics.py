"""Observations of requests, which wait until results are out."""

from __future__ import annotations

import pytest
from sglang.srt.observability.metrics_collector import SchedulerMetricsCollector

from sglang_dflash.serving import late_metrics
from sglang_dflash.serving.late_metrics import LateMetrics


@pytest.fixture
def observed(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """What the release's collector is told."""
    told: list[tuple] = []
    for name in ("__init__", "observe_queue_time", "observe_per_stage_req_latency", "log_stats"):
        monkeypatch.setattr(
            SchedulerMetricsCollector,
            name,
            lambda self, *given, name=name: told.append((name, *given)),
        )
    return told


def test_they_wait_for_statistics(observed: list[tuple]) -> None:
    collector = LateMetrics()
    collector.observe_per_stage_req_latency("request_process", 0.25)
    collector.observe_queue_time(0.5)
    assert observed == [("__init__",)]
    collector.log_stats("stats")
    assert observed[1:] == [
        ("observe_per_stage_req_latency", "request_process", 0.25),
        ("observe_queue_time", 0.5),
        ("log_stats", "stats"),
    ]
    collector.log_stats("stats")
    assert len(observed) == 5


def test_without_statistics_they_do_not_pile_up(
    observed: list[tuple], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(late_metrics, "MOST", 3)
    collector = LateMetrics()
    for latency in range(5):
        collector.observe_queue_time(latency)
    assert [latency for _, latency in observed[1:]] == [0, 1, 2]
