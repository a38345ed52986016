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


def test_gauges_are_set_ten_times_a_second(
    observed: list[tuple], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An idle scheduler, which waits for 30 s else, sets at once those that were left."""
    now = [100.0]
    monkeypatch.setattr(late_metrics.time, "perf_counter", lambda: now[0])

    def set_all(self: LateMetrics, stats: str) -> None:
        observed.append(("log_stats", stats))
        self.last_log_time = now[0]

    monkeypatch.setattr(SchedulerMetricsCollector, "log_stats", set_all)
    collector = LateMetrics()
    for stats, waits in (("a", False), ("b", True), ("c", True), ("d", False), ("e", True)):
        collector.log_stats(stats)
        assert (now[0] > collector.last_log_time + 30) is waits
        now[0] += 0.04
    now[0] += 0.1
    collector.log_stats("idle")
    assert now[0] < collector.last_log_time + 30
    assert observed[1:] == [("log_stats", stats) for stats in ("a", "d", "idle")]


def test_without_statistics_they_do_not_pile_up(
    observed: list[tuple], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(late_metrics, "MOST", 3)
    collector = LateMetrics()
    for latency in range(5):
        collector.observe_queue_time(latency)
    assert [latency for _, latency in observed[1:]] == [0, 1, 2]
