"""Gaps between tokens are counted in memory, and written to the metrics ten times a second.

The release adds each part of each answer to a histogram when it comes, which it looks up by name, and whose numbers are
in a file that all processes share.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from typing import Any

from sglang.srt.observability.metrics_collector import TokenizerMetricsCollector

WRITTEN_EVERY = 0.1  # seconds


class Tally:
    """Of one histogram, what is not in it yet."""

    def __init__(self, histogram: Any):
        """
        Args:
            histogram: of prometheus_client, with values for all of its labels.
        """
        self._histogram, self._bounds = histogram, histogram._upper_bounds
        self._tokens, self._seconds = [0] * len(self._bounds), 0.0

    def add(self, seconds: float, tokens: int) -> None:
        """As many tokens, in all after so many seconds."""
        self._seconds += seconds
        self._tokens[bisect_left(self._bounds, seconds / tokens)] += tokens

    def write(self) -> None:
        """Once; what is observed after it belongs to another."""
        self._histogram._sum.inc(self._seconds)
        for bucket, tokens in zip(self._histogram._buckets, self._tokens, strict=True):
            if tokens:
                bucket.inc(tokens)


class TalliedGaps(TokenizerMetricsCollector):
    """The release's collector of what an HTTP server observes, of which gaps between tokens come late."""

    def __init__(self, *args: Any, **options: Any):
        self._tallies: dict[tuple[tuple[str, str], ...], Tally] = {}
        self._due: asyncio.TimerHandle | None = None
        super().__init__(*args, **options)

    def observe_inter_token_latency(
        self, labels: dict[str, str], internval: float, num_new_tokens: int
    ) -> None:
        """Within the event loop.

        Args:
            labels: names and values.
            internval: seconds since the request's tokens before these.
            num_new_tokens: at least 1.
        """
        key = tuple(labels.items())
        if key not in self._tallies:
            self._tallies[key] = Tally(self.histogram_inter_token_latency.labels(**labels))
        self._tallies[key].add(internval, num_new_tokens)
        if self._due is None:
            self._due = asyncio.get_running_loop().call_later(WRITTEN_EVERY, self._write)

    def _write(self) -> None:
        """Labels are forgotten with what was observed: custom ones may have any number of values."""
        tallies, self._tallies, self._due = self._tallies, {}, None
        for tally in tallies.values():
            tally.write()
