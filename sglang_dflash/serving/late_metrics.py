"""What SGLang's scheduler observes is written when it costs nobody's time.

To look up a histogram and add to it takes the host a good 0.05 ms, three times before the first token of a request that
is alone: when it is queued, when its prompt is chosen, and when that has run. That is written after the first token.
All gauges together take 0.4 ms. The release sets them after every prefill, which with many clients is in every round:
they are set ten times a second.
"""

from __future__ import annotations

import math
import time
from functools import partial
from typing import Any

from sglang.srt.observability.metrics_collector import SchedulerMetricsCollector, SchedulerStats

# Ranks that write no statistics write observations when there are so many.
MOST = 256

GAUGES_EVERY = 0.1  # seconds


class LateMetrics(SchedulerMetricsCollector):
    """The release's collector, whose observations of requests wait for its next statistics, which follow results.

    Of statistics that follow each other closely the last are written when the next are due, or the scheduler is idle.
    """

    def __init__(self, *args: Any, **options: Any):
        self._waiting: list[partial[None]] = []
        self._set_at, self._outdated = -math.inf, False
        super().__init__(*args, **options)

    @property
    def last_log_time(self) -> float:
        """What an idle scheduler looks at: it has gauges set that were set long ago."""
        return -math.inf if self._outdated else self._set_at

    @last_log_time.setter
    def last_log_time(self, seconds: float) -> None:
        self._set_at = seconds

    def observe_queue_time(self, latency: float) -> None:
        self._later(partial(super().observe_queue_time, latency))

    def observe_per_stage_req_latency(self, stage: str, latency: float) -> None:
        self._later(partial(super().observe_per_stage_req_latency, stage, latency))

    def log_stats(self, stats: SchedulerStats) -> None:
        self._write()
        self._outdated = time.perf_counter() - self._set_at < GAUGES_EVERY
        if not self._outdated:
            super().log_stats(stats)

    def _later(self, observe: partial[None]) -> None:
        self._waiting.append(observe)
        if len(self._waiting) >= MOST:
            self._write()

    def _write(self) -> None:
        waiting, self._waiting = self._waiting, []
        for observe in waiting:
            observe()
