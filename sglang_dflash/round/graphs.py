"""Rounds as CUDA graphs: of what the draft model does, of what the target does, and of what follows if nobody asks for
more than the likeliest tokens."""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from sglang.srt.distributed.parallel_state import graph_capture
from sglang.srt.model_executor.cuda_graph_runner import freeze_gc, model_capture_mode

from sglang_dflash.drawing.sampling import Sampling
from sglang_dflash.gpu.block_attention import BlockAttention
from sglang_dflash.gpu.choose_attention import narrowed
from sglang_dflash.gpu.fa3_attention import SHORT_CONTEXT
from sglang_dflash.gpu.kernels.open_round import open_round
from sglang_dflash.gpu.pass_sizes import dear_sizes
from sglang_dflash.gpu.targets import Body
from sglang_dflash.round.accept import Accepted
from sglang_dflash.round.adapter_buffers import Ids
from sglang_dflash.round.captured_models import (
    CapturedAdaptedTarget,
    CapturedModel,
    CapturedTarget,
    CapturedWindowedModel,
)
from sglang_dflash.round.capturing import capturing, warm_up
from sglang_dflash.round.costs import Staircase, milliseconds, orderly
from sglang_dflash.round.fused import fuse_adapted, fuse_models
from sglang_dflash.round.opened import Round
from sglang_dflash.round.parts import Parts
from sglang_dflash.round.propose import propose
from sglang_dflash.round.stages import Blocks, accept_blocks, verify_blocks
from sglang_dflash.round.survival import Estimate, Kinds, Survival

logger = logging.getLogger(__name__)


class Key(NamedTuple):
    """What a graph was captured for: a batch bucket, a width, short contexts or all, LoRA adapters or none."""

    bucket: int
    width: int
    short: bool
    adapted: bool = False


@dataclass(frozen=True)
class Proposed:
    """What the first stage of a round gives.

    Attributes:
        draft_tokens: [bs, width - 1] int64.
        estimate: what is expected of them; None if nobody asks.
    """

    round: Round
    draft_tokens: torch.Tensor
    estimate: Estimate | None

    def first(self, requests: int) -> Proposed:
        """Of the first requests, where the others only pad the batch."""
        estimate = self.estimate and self.estimate.first(requests)
        return Proposed(self.round.first(requests), self.draft_tokens[:requests], estimate)


@dataclass(frozen=True)
class Captured:
    """All stages of a round, and what they write, which the next round overwrites.

    Attributes:
        read: models whose tensors the graphs read.
        propose, verify, greedy: the parts of a round, the last without draws.
        told: what `Survival.learn` gives in the last; None if nobody asks.
    """

    read: tuple[CapturedModel, CapturedModel]
    propose: torch.cuda.CUDAGraph
    drafted: Proposed
    verify: torch.cuda.CUDAGraph
    blocks: Blocks
    greedy: torch.cuda.CUDAGraph
    accepted: Accepted
    told: torch.Tensor | None

    def replay_rest(self) -> None:
        """All that follows the first stage, without draws."""
        self.verify.replay()
        self.greedy.replay()


class Attention(NamedTuple):
    """What computes attention in graphs, by model."""

    draft: type[BlockAttention]
    target: type[BlockAttention]


class RoundGraphs:
    """Graphs by (batch bucket, width, short or long contexts).

    A batch runs in the smallest bucket that holds it, padded with requests whose K/V goes to slot 0.
    All that a round reads, it reads in the graph, by the requests' rows: state, slots, page table.
    """

    def __init__(
        self,
        parts: Parts,
        attention: Attention,
        sizes: Iterable[int],
        widths: Iterable[int],
        survival: Survival | None = None,
        narrow: Iterable[int] = (),
        passes: Collection[int] = (),
    ):
        """
        Args:
            survival: what says how likely drafts are to be accepted; None if nobody asks.
            narrow: widths that blocks may have, too, where they are drafted faster.
            passes: rows of those that `PromptGraphs` has.
        """
        self.parts, self.attention, self.survival = parts, attention, survival
        self.sizes, self.widths = sorted(sizes), sorted(widths)
        self.narrow = sorted(narrow, reverse=True)
        self.page_size = parts.target.runner.page_size
        device, largest = parts.req_to_token.device, self.sizes[-1]
        # Their addresses are baked into the graphs.
        self.rows = torch.full(
            (largest,), parts.state.padding_row, dtype=torch.int64, device=device
        )
        self.kinds = Kinds(largest, device)
        self.cache_lengths = torch.zeros(largest, dtype=torch.int32, device=device)
        pages = -(-parts.req_to_token.shape[1] // self.page_size)
        self.page_table = torch.zeros(largest, pages, dtype=torch.int32, device=device)
        self._graphs: dict[Key, Captured] = {}
        kinds = [(self.sizes, w) for w in self.widths]
        kinds += [(dear_sizes(self.sizes, w), w) for w in self.narrow]
        rows = {size * width for sizes, width in kinds for size in sizes} | {*passes}
        self.body = fuse_models(parts, *attention, largest, self.widths[-1], rows)
        self.adapted_body: Body | None = None
        self.pool = torch.cuda.graph_pool_handle()
        self._capture_all("rounds", self._keys(self.sizes, self.widths))
        narrow = [key for w in self.narrow for key in self._keys(dear_sizes(self.sizes, w), [w])]
        if narrow:
            self._capture_all("rounds of narrower blocks", narrow)

    def key(self, start_bounds: torch.Tensor, width: int, adapted: bool = False) -> Key | None:
        """The graph for a round ([bs] int64 on the host), or None if none was captured for it.

        Args:
            adapted: whether requests have LoRA adapters.
        """
        batch_size = len(start_bounds)
        if batch_size > self.sizes[-1]:
            return None
        key = self._key(batch_size, int(start_bounds.max()) + width, width)
        key = key._replace(adapted=adapted)
        return key if key in self._graphs else None

    def _key(self, batch_size: int, longest: int, width: int) -> Key:
        bucket = self.sizes[bisect.bisect_left(self.sizes, batch_size)]
        short = Key(bucket, width, longest <= SHORT_CONTEXT)
        return short if short in self._graphs else Key(bucket, width, False)

    def verify(self, key: Key) -> None:
        """The second stage of a round, over whole blocks, after `propose` for the same key."""
        self._graphs[key].verify.replay()

    def blocks(self, key: Key, requests: int) -> Blocks:
        """What both models made of a round after `verify` for the same key, for those who draw."""
        return self._graphs[key].blocks.first(requests)

    def accept(self, key: Key, requests: int) -> tuple[Accepted, torch.Tensor | None]:
        """The last stages of a round after `verify` for the same key, if nobody draws.

        Returns:
            Its result, which the next one overwrites; what `Survival.learn` gave, None if nobody asks.
        """
        graphs = self._graphs[key]
        graphs.greedy.replay()
        told = graphs.told
        return graphs.accepted.first(requests), None if told is None else told[:requests]

    def propose(
        self,
        key: Key,
        rows: torch.Tensor,
        sampling: Sampling | None = None,
        adapters: Ids | None = None,
    ) -> Proposed:
        """The first stage of a round over the requests at `rows` ([bs] int64)."""
        batch_size, graphs = len(rows), self._graphs[key]
        if self.survival is not None:
            self.kinds.tell(batch_size, sampling.drawing if sampling else (), adapters)
        self.rows[:batch_size].copy_(rows)
        if key.bucket > batch_size:
            self.rows[batch_size : key.bucket].fill_(self.parts.state.padding_row)
        graphs.propose.replay()
        return graphs.drafted.first(batch_size)

    def times(self) -> tuple[dict[int, tuple[Staircase, Staircase]], bool]:
        """By width: what the first stage takes, and what the others do, by requests; and whether it was quiet.

        Of narrower blocks from so many requests on as have them.
        """
        measured, quiet = {}, True
        self.rows.fill_(self.parts.state.padding_row)  # not those of the last round
        for width in (*self.widths, *self.narrow):
            sizes = dear_sizes(self.sizes, width) if width in self.narrow else self.sizes
            if not sizes:
                continue
            graphs = [self._graphs[self._key(size, 0, width)] for size in sizes]
            # All share their memory: what a graph reads is only there right after the one before it in its round.
            parts = [part for each in graphs for part in (each.propose.replay, each.replay_rest)]
            times = milliseconds(parts)
            found = [times.shortest[i::2] for i in (0, 1)]
            measured[width] = tuple(Staircase(sizes, each) for each in found)
            quiet = quiet and times.quiet and all(map(orderly, found))
        return measured, quiet

    def _keys(self, sizes: Sequence[int], widths: Iterable[int]) -> list[Key]:
        """The largest first, so that the smaller ones reuse its memory."""
        keys = []
        for bucket in reversed(sizes):
            for width in sorted(widths, reverse=True):
                keys.append(Key(bucket, width, False))
                if SHORT_CONTEXT < self.parts.context_len and self._short_contexts_gain(bucket):
                    keys.append(Key(bucket, width, True))
        return keys

    def _short_contexts_gain(self, bucket: int) -> bool:
        models = (self.parts.draft, self.parts.target)
        return any(
            attention.short_contexts_gain(model.runner, bucket)
            for attention, model in zip(self.attention, models, strict=True)
        )

    def capture_adapted(self, widths: Iterable[int]) -> None:
        """Rounds of requests with LoRA adapters, too; the target has its LoRA layers now.

        Args:
            widths: that these may have.
        """
        keys = [key._replace(adapted=True) for key in self._keys(self.sizes, widths)]
        buffers = self.parts.adapters.buffers
        self.adapted_body = fuse_adapted(buffers, self.body, self.sizes[-1], self.widths[-1])
        self._capture_all("rounds with LoRA adapters", keys)

    def _capture_all(self, what: str, keys: list[Key]) -> None:
        begin, free = time.perf_counter(), torch.cuda.mem_get_info()[0]
        with freeze_gc(False), model_capture_mode(), graph_capture() as context:
            for key in keys:
                self._graphs[key] = self._capture(key, context.stream)
        self.rows.fill_(self.parts.state.padding_row)
        logger.info(
            "DFLASH captured %d graphs of %s (batch sizes %s, widths %s) in %.1f s, %.2f GiB",
            len(keys),
            what,
            sorted({key.bucket for key in keys}),
            sorted({key.width for key in keys}),
            time.perf_counter() - begin,
            (free - torch.cuda.mem_get_info()[0]) / (1 << 30),
        )

    def _capture(self, key: Key, stream: torch.cuda.Stream) -> Captured:
        read = self._models(key)

        def whole_round() -> None:
            drafted = self._propose(key, read)
            self._accept(drafted, self._verify(drafted, read))

        warm_up(whole_round)
        first, second, greedy = (torch.cuda.CUDAGraph() for _ in range(3))
        with capturing(first, self.pool, stream):
            drafted = self._propose(key, read)
        with capturing(second, self.pool, stream):
            blocks = self._verify(drafted, read)
        with capturing(greedy, self.pool, stream):
            accepted, told = self._accept(drafted, blocks)
        return Captured(read, first, drafted, second, blocks, greedy, accepted, told)

    def _models(self, key: Key) -> tuple[CapturedModel, CapturedModel]:
        keys = SHORT_CONTEXT if key.short else self.page_table.shape[1] * self.page_size
        lengths = self.cache_lengths[: key.bucket]
        page_table = self.page_table[: key.bucket, : -(-keys // self.page_size)]

        draft, target = self.parts.draft.runner, self.parts.target.runner
        own = narrowed(self.attention.target, target, key.width, key.bucket)
        causal = own(target, lengths, page_table, key.width, True, key.short)
        if key.adapted:
            buffers = self.parts.adapters.buffers
            captured = CapturedAdaptedTarget(target, causal, self.adapted_body, buffers, key.bucket)
        else:
            captured = CapturedTarget(target, causal, self.body)
        if (window := self.parts.window) is not None:
            lengths = torch.zeros_like(lengths)
            page_table = page_table.new_zeros(key.bucket, min(page_table.shape[1], window.pages))
        own = narrowed(self.attention.draft, draft, key.width, key.bucket)
        drafting = own(draft, lengths, page_table, key.width, False, key.short)
        if window is not None:
            return CapturedWindowedModel(draft, drafting, window), captured
        return CapturedModel(draft, drafting), captured

    def _propose(self, key: Key, models: tuple[CapturedModel, CapturedModel]) -> Proposed:
        parts, rows, (draft, target) = self.parts, self.rows[: key.bucket], models
        start, tokens, positions, slots = open_round(
            rows,
            parts.state.lengths,
            parts.state.bonus_tokens,
            parts.req_to_token,
            self.cache_lengths,
            self.page_table[:, : target.attention.page_table.shape[1]],
            width=key.width,
            page_size=self.page_size,
            padding_row=parts.state.padding_row,
            mask_token_id=parts.draft.runner.model.mask_token_id,
            last_position=parts.context_len - 1,
        )
        bounds = torch.full((key.bucket,), parts.context_len, dtype=torch.int64)
        bonus_tokens = tokens[:: key.width]
        round = Round(
            rows=rows,
            width=key.width,
            start=start,
            start_bounds=bounds,
            bonus_tokens=bonus_tokens,
            positions=positions,
            slots=slots,
            tokens=tokens,
            rope_deltas=parts.state.rope_deltas_of(rows),
        )
        if key.width > 1:  # else nothing is drafted
            draft.prepare()
        drafts, estimate = propose(draft, round), None
        if self.survival is not None and drafts.log_odds is not None:
            kinds, ended = self.kinds.values[: key.bucket], parts.state.ended
            estimate = self.survival.estimate(drafts.log_odds, kinds, rows, ended)
        return Proposed(round, drafts.tokens, estimate)

    def _verify(self, drafted: Proposed, models: tuple[CapturedModel, CapturedModel]) -> Blocks:
        models[1].prepare()
        return verify_blocks(self.parts, drafted.round, drafted.draft_tokens, models[1])

    def _accept(self, drafted: Proposed, blocks: Blocks) -> tuple[Accepted, torch.Tensor | None]:
        accepted, _ = accept_blocks(self.parts, blocks)
        if drafted.estimate is None:
            return accepted, None
        width = drafted.round.width
        return accepted, self.survival.learn(drafted.estimate, width, accepted.lengths)
