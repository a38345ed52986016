"""What SGLang's scheduler observes of a request on its way is written after the request's first token is sent.

To look up a histogram and add to it takes the host a good 0.05 ms, three times before the first token of a request that
is alone: when it is queued, when its prompt is chosen, and when that has run.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from sglang.srt.observability.metrics_collector import SchedulerMetricsCollector, SchedulerStats

# Ranks that write no statistics write observations when there are so many.
MOST = 256


class LateMetrics(SchedulerMetricsCollector):
    """The release's collector, whose observations of requests wait for its next statistics, which follow results."""

    def __init__(self, *args: Any, **options: Any):
        self._waiting: list[partial[None]] = []
        super().__init__(*args, **options)

    def observe_queue_time(self, latency: float) -> None:
        self._later(partial(super().observe_queue_time, latency))

    def observe_per_stage_req_latency(self, stage: str, latency: float) -> None:
        self._later(partial(super().observe_per_stage_req_latency, stage, latency))

    def log_stats(self, stats: SchedulerStats) -> None:
        self._write()
        super().log_stats(stats)

    def _later(self, observe: partial[None]) -> None:
        self._waiting.append(observe)
        if len(self._waiting) >= MOST:
            self._write()

    def _write(self) -> None:
        waiting, self._waiting = self._waiting, []
        for observe in waiting:
            observe()
