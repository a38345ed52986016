"""Prometheus metrics of DFlash on `/metrics`, if the server runs with `--enable-metrics`.

Named and labelled as SGLang's own. Rounds are counted where they are committed, on the host, so that
rounds in vain have a count of their own; nothing waits for a device.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from sglang.srt.server_args import get_global_server_args

from sglang_dflash.serving.round_counts import RoundCounts

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs

# How the target ran tokens of prompts: in the same pass as a round's blocks, or in one of their own.
IN_ROUNDS, ALONE = "in_rounds", "alone"
# What else there was in a step whose time the host's is.
WITH_PROMPTS, WITHOUT_PROMPTS = "with_prompts", "without_prompts"

# Seconds for which counts of rounds are kept back while others follow.
_WRITTEN_EVERY = 0.1

# Name, kind, what it counts, and labels beside those of the server.
METRICS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "sglang:dflash_rounds_total": (
        "Counter",
        "Verify steps of requests: one for each request in a round.",
        (),
    ),
    "sglang:dflash_rounds_in_vain_total": (
        "Counter",
        "Verify steps of requests that had ended or strayed from their grammar when the result came.",
        (),
    ),
    "sglang:dflash_drafted_tokens_total": ("Counter", "Tokens that the draft model drafted.", ()),
    "sglang:dflash_accepted_tokens_total": (
        "Counter",
        "Drafted tokens that requests took, without bonus tokens.",
        (),
    ),
    "sglang:dflash_accept_length": (
        "Histogram",
        "Tokens that a request took from a round, the bonus token included.",
        (),
    ),
    "sglang:dflash_drafted_at_position_total": (
        "Counter",
        "Tokens drafted at a position of the block; 1 is the first draft.",
        ("position",),
    ),
    "sglang:dflash_accepted_at_position_total": (
        "Counter",
        "Drafted tokens that requests took, by position of the block.",
        ("position",),
    ),
    "sglang:dflash_planned_rounds_total": (
        "Counter",
        "Rounds launched, by what they verify: whole blocks, the ragged beginnings of them that pay, those of narrower "
        "blocks, plain bonus tokens, or a probe of a few drafts while nothing is drafted.",
        ("plan",),
    ),
    "sglang:dflash_steps_total": (
        "Counter",
        "Steps of the scheduler that launched rounds, by how many they launched.",
        ("rounds",),
    ),
    "sglang:dflash_verified_rows_total": (
        "Counter",
        "Rows of blocks that the target ran, bonus tokens included.",
        (),
    ),
    "sglang:dflash_tried_at_position_total": (
        "Counter",
        "Drafts at a position of the block that were verified after all before them were accepted.",
        ("position",),
    ),
    "sglang:dflash_survived_at_position_total": (
        "Counter",
        "How many of those were accepted.",
        ("position",),
    ),
    "sglang:dflash_expected_at_position_total": (
        "Counter",
        "How many of those were expected to be accepted.",
        ("position",),
    ),
    "sglang:dflash_prompt_rows_total": (
        "Counter",
        "Tokens of prompts that the target ran, by way: in_rounds or alone.",
        ("way",),
    ),
    "sglang:dflash_host_step_seconds": (
        "Gauge",
        "What the host takes for a step of an overlapping scheduler, waits for the device aside, with prompts in its "
        "round and without.",
        ("way",),
    ),
    "sglang:dflash_draft_kv_used_tokens": (
        "Gauge",
        "Slots of the draft KV pool in use, cached prefixes included.",
        (),
    ),
    "sglang:dflash_draft_kv_used_bytes": ("Gauge", "The same in bytes, on one rank.", ()),
    "sglang:dflash_fallbacks_total": (
        "Counter",
        "Rounds that could not take the fast way, by reason.",
        ("reason",),
    ),
    "sglang:dflash_not_finite_total": ("Counter", "Requests that failed with NaN logits.", ()),
    "sglang:dflash_refusals_total": (
        "Counter",
        "Requests refused with status 400 by DFlash, by reason.",
        ("reason",),
    ),
}


@cache
def _metric(name: str, labels: tuple[str, ...], **options: Any) -> Any:
    # prometheus_client reads its directory when it is imported, so not before the server set it.
    import prometheus_client

    kind, text, own = METRICS[name]
    options = dict(options)
    if kind == "Gauge":
        options["multiprocess_mode"] = "mostrecent"
    return getattr(prometheus_client, kind)(name, text, labelnames=(*labels, *own), **options)


class Pace(Protocol):
    """What the host takes for a step."""

    def of(self, prompts: bool) -> float:
        """Milliseconds of steps with prompts or without; 0 if none was measured."""


class RoundMetrics:
    """What one scheduler says of its rounds."""

    def __init__(
        self,
        args: ServerArgs,
        labels: dict[str, Any],
        draft: ModelRunner,
        slot: int,
        pace: Pace,
    ):
        """
        Args:
            slot: bytes of draft KV in one slot.
            pace: of the host.
        """
        self._pace = pace
        self._labels, self._names = labels, tuple(labels)
        self._pool, self._slot = draft.token_to_kv_pool_allocator, slot
        self._size = draft.token_to_kv_pool.size
        self._counts, self._due = RoundCounts(args.speculative_num_draft_tokens), 0.0
        self._children: dict[tuple[str, ...], Any] = {}
        buckets = tuple(range(1, args.speculative_num_draft_tokens + 1))
        self._lengths = _metric("sglang:dflash_accept_length", self._names, buckets=buckets)
        self._lengths = self._lengths.labels(**labels)

    def _child(self, name: str, *own: str) -> Any:
        """Kept, because looking up labels costs more than counting.

        Args:
            own: the value of the metric's own label, if it has one.
        """
        if (name, *own) not in self._children:
            metric = _metric(f"sglang:dflash_{name}", self._names)
            labels = METRICS[f"sglang:dflash_{name}"][2]
            given = dict(zip(labels, own, strict=True))
            self._children[name, *own] = metric.labels(**self._labels, **given)
        return self._children[name, *own]

    def _add(self, amount: float, name: str, *own: str) -> None:
        self._counts.sums[name, *own] += amount

    def write(self) -> None:
        """All that was counted, for whoever reads the metrics."""
        sums, lengths = self._counts.take_out()
        for (name, *own), amount in sums.items():
            self._child(f"{name}_total", *own).inc(amount)
        for length, times in enumerate(lengths):
            if times:
                _observe(self._lengths, length, times)
        used = self._size - self._pool.available_size()
        self._child("draft_kv_used_tokens").set(used)
        self._child("draft_kv_used_bytes").set(used * self._slot)
        for way, prompts in ((WITH_PROMPTS, True), (WITHOUT_PROMPTS, False)):
            if took := self._pace.of(prompts):
                self._child("host_step_seconds", way).set(took / 1e3)
        self._due = time.monotonic() + _WRITTEN_EVERY

    def committed(self, width: int, taken: Sequence[int], in_vain: int, goes_on: bool) -> None:
        """After a round.

        Args:
            width: rows of its blocks.
            taken: how many tokens each request took, those aside for which it ran in vain.
            in_vain: for how many it did.
            goes_on: whether another round will be committed.
        """
        self._counts.committed(width, taken)
        self._add(in_vain, "rounds_in_vain")
        if not goes_on or time.monotonic() >= self._due:
            self.write()

    def launched(self, plan: str, rows: int) -> None:
        """A round is on its way.

        Args:
            plan: why it verifies so many rows (`scheduler/plan.py`).
            rows: that it verifies.
        """
        self._add(1, "planned_rounds", plan)
        self._add(rows, "verified_rows")

    def stepped(self, rounds: int) -> None:
        """A step of the scheduler has launched so many rounds."""
        self._add(1, "steps", str(rounds))

    def expected(self, chances: np.ndarray, verified: np.ndarray, lengths: np.ndarray) -> None:
        """What was expected of a round's drafts beside what became of them.

        Args:
            chances: [bs, drafts] float32, that a draft is accepted, and all before it.
            verified: [bs, 1] float32, rows of each block that were verified.
            lengths: [bs] int64, tokens committed.
        """
        self._counts.expected(chances, verified, lengths)

    def ran_prompts(self, rows: int, way: str) -> None:
        """The target runs so many tokens of prompts.

        Args:
            way: `IN_ROUNDS` or `ALONE`.
        """
        self._add(rows, "prompt_rows", way)
        if way == ALONE:  # no round may follow
            self.write()

    def fell_back(self, reason: str) -> None:
        """A round could not take the fast way."""
        self._add(1, "fallbacks", reason)

    def not_finite(self, requests: int) -> None:
        """So many requests failed with NaN."""
        if requests:
            self._add(requests, "not_finite")
            self.write()


def _observe(histogram: Any, value: float, times: int) -> None:
    """`observe`, so many times; prometheus_client has no call for that."""
    histogram._sum.inc(value * times)
    histogram._buckets[bisect_left(histogram._upper_bounds, value)].inc(times)


class NoMetrics:
    """Without `--enable-metrics`."""

    def committed(self, width: int, taken: Sequence[int], in_vain: int, goes_on: bool) -> None: ...

    def launched(self, plan: str, rows: int) -> None: ...

    def stepped(self, rounds: int) -> None: ...

    def expected(self, chances: np.ndarray, verified: np.ndarray, lengths: np.ndarray) -> None: ...

    def ran_prompts(self, rows: int, way: str) -> None: ...

    def fell_back(self, reason: str) -> None: ...

    def not_finite(self, requests: int) -> None: ...


def round_metrics(
    args: ServerArgs, ranks: dict[str, Any], draft: ModelRunner, slot: int, pace: Pace
) -> RoundMetrics | NoMetrics:
    """What one scheduler counts, if this rank is one that SGLang counts on.

    Args:
        ranks: this process's, by SGLang's names.
        slot: bytes of draft KV in one slot.
    """
    reports = ranks["tp_rank"] == 0 or args.enable_metrics_for_all_schedulers
    if not (args.enable_metrics and reports):
        return NoMetrics()
    labels = {
        "model_name": args.served_model_name,
        "engine_type": "unified",
        "tp_rank": ranks["tp_rank"],
        "pp_rank": 0,
        "moe_ep_rank": ranks["moe_ep_rank"],
    }
    if ranks["dp_rank"] is not None:
        labels["dp_rank"] = ranks["dp_rank"]
    labels |= args.extra_metric_labels or {}
    return RoundMetrics(args, labels, draft, slot, pace)


@contextmanager
def refusing(reason: str) -> Iterator[None]:
    """Counts what is refused within it; in the process that requests arrive in."""
    try:
        yield
    except ValueError:
        args = get_global_server_args()
        if args.enable_metrics:
            labels = {"model_name": args.served_model_name} | (args.extra_metric_labels or {})
            metric = _metric("sglang:dflash_refusals_total", tuple(labels))
            metric.labels(**labels, reason=reason).inc()
        raise
