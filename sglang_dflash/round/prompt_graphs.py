"""Prompts as CUDA graphs, alone or behind the blocks of a round: the target's pass, and the context that it leaves.

A graph is captured for a number of rows, not for what they are. What a prompt asks to know of them (their
log-probabilities, hidden states) is made afterwards by the release's own head, of what the graph leaves of all rows.
"""

from __future__ import annotations

import bisect
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from sglang.srt.batch_invariant_ops import is_batch_invariant_mode_enabled
from sglang.srt.distributed.parallel_state import graph_capture
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.cuda_graph_runner import freeze_gc, model_capture_mode
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from sglang_dflash.drafter.context_kv import write_context
from sglang_dflash.gpu.choose_attention import SIDE_BY_SIDE, narrowed, prompts_in_graphs
from sglang_dflash.gpu.narrow_attention import NarrowBlockAttention, NarrowSideBySide
from sglang_dflash.gpu.pass_sizes import PROMPTS, SHORT_TABLE, narrow_sizes, rooms, row_sizes
from sglang_dflash.round.adapter_buffers import Ids, has_adapters
from sglang_dflash.round.at_once_check import use_kernels
from sglang_dflash.round.block_costs import costs_of_blocks
from sglang_dflash.round.captured_models import CapturedAdaptedPass, CapturedTarget
from sglang_dflash.round.capturing import captured
from sglang_dflash.round.choose import likeliest
from sglang_dflash.round.costs import Costs, Staircase, milliseconds, orderly
from sglang_dflash.round.graphs import RoundGraphs
from sglang_dflash.round.parts import Parts
from sglang_dflash.round.prefill import wait_for_host
from sglang_dflash.round.side_by_side import Drafted, SideBySide
from sglang_dflash.round.stages import Blocks
from sglang_dflash.round.target import TargetRows
from sglang_dflash.serving.memory import GIB

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ModelWorkerBatch
    from sglang.srt.server_args import ServerArgs

    from sglang_dflash.gpu.block_attention import BlockAttention

logger = logging.getLogger(__name__)

_USUAL = 512  # rows that most rounds do not exceed
PATIENCE = 8  # rounds after which all prompts that wait should be through


class Key(NamedTuple):
    """What a graph was captured for.

    Attributes:
        rows: how many.
        requests: the most that they are of.
        short: whether a short page table holds all contexts.
        adapted: whether any may have LoRA adapters.
        narrow: whether none has more rows than `NarrowSideBySide` is for.
    """

    rows: int
    requests: int
    short: bool
    adapted: bool = False
    narrow: bool = False


@dataclass(frozen=True)
class Captured:
    """A graph and what it writes; `read` are modules whose tensors it reads."""

    graph: torch.cuda.CUDAGraph
    rows: TargetRows
    read: CapturedTarget


class PromptGraphs:
    """Stands where a model runner has its graphs of prompts; the runner calls `can_run` and `replay`.

    Attributes:
        adapted: whether passes over requests with LoRA adapters were captured, too.
    """

    adapted = False

    def __init__(self, parts: Parts, rounds: RoundGraphs, sizes: Sequence[int]):
        """
        Args:
            sizes: rows of a pass, rising.
        """
        self.parts, self._rounds, self.pool = parts, rounds, rounds.pool
        self.runner, self.sizes = parts.target.runner, list(sizes)
        self._attention = SIDE_BY_SIDE[rounds.attention.target]
        requests, page_size = rounds.sizes[-1] + PROMPTS, self.runner.page_size
        # Requests that passes are captured for, by their rows, fewest first.
        self._rooms = {size: rooms(size, requests) for size in self.sizes}
        mrope = parts.state.rope_deltas is not None
        self.inputs = SideBySide(parts.req_to_token, page_size, self.sizes[-1], requests, mrope)
        if self.inputs.requests.is_cuda:
            use_kernels(self.inputs, max(rounds.widths))
        self._hidden: torch.Tensor | None = None
        self._blocks: Drafted | None = None
        self._last: TargetRows | None = None
        self._graphs: dict[Key, Captured] = {}
        self._capture_all("prompts", self._keys())
        self.passes: Staircase | None = None

    def holds(self, rows: int, requests: int) -> bool:
        """Whether a pass over so many rows of so many requests was captured."""
        return rows <= self.sizes[-1] and requests <= self.inputs.most

    def board(self, blocks: Drafted) -> None:
        """Blocks that the next prompts are to take along."""
        self._blocks = blocks

    def leave(self) -> Blocks:
        """Those blocks, verified.

        Raises:
            RuntimeError: the prompts ran without them.
        """
        blocks, self._blocks = self._blocks, None
        target, self._last = self._last, None
        if target is None:
            raise RuntimeError(
                "DFLASH: the target ran prompts without the blocks that were to be beside them."
            )
        return self._verified(blocks, target)

    def verify(self, blocks: Drafted) -> Blocks:
        """Blocks without prompts beside them, verified."""
        return self._verified(blocks, self._pass(blocks.rows, blocks.longest, blocks, None))

    def _verified(self, blocks: Drafted, target: TargetRows) -> Blocks:
        """Blocks after a pass whose first rows were theirs."""
        round, ragged, head = blocks.round, blocks.ragged, None
        if has_adapters(blocks.adapters):
            head = self.parts.adapters.buffers.head(len(blocks.adapters), round.width)
        if head is not None and ragged is not None:
            head = head.at(ragged.source)
        target = replace(target, hidden_states=self._hidden[: blocks.rows], adapted=head)
        return Blocks(round.rows, round.positions, blocks.draft_tokens, target, ragged)

    def computes(self, batch: ForwardBatch | ModelWorkerBatch) -> bool:
        """Whether what prompts ask for is plain causal attention over tokens, not pictures, of the target alone."""
        # Items of a request that is scored do not see each other.
        scored = self.runner.server_args.multi_item_scoring_delimiter and batch.is_prefill_only
        return (
            not scored
            and (self.adapted or not has_adapters(batch.lora_ids))
            and batch.input_embeds is None
            and not _has_pictures(batch)
            and not batch.return_hidden_states_before_norm
            and batch.forward_mode == ForwardMode.EXTEND
        )

    def can_run(self, batch: ForwardBatch) -> bool:
        """Whether a pass was captured for prompts, and they do not overwrite what a round still needs."""
        states = self.parts.linear_states
        free = states is None or not states.waits or self._blocks is not None
        holds = self.holds(len(batch.input_ids), batch.batch_size)
        return free and holds and self.computes(batch)

    def replay(self, batch: ForwardBatch, **kwargs: Any) -> LogitsProcessorOutput:
        """What the model gives for prompts; their taps are context already."""
        wait_for_host(self.runner)
        blocks, prompt_rows = self._blocks, len(batch.input_ids)
        first, longest = 0, int(batch.seq_lens_cpu.max())
        if blocks is not None:
            first, longest = blocks.rows, max(longest, blocks.longest)
        rows = self._pass(first + prompt_rows, longest, blocks, batch)
        if self.parts.linear_states is not None:
            self.parts.linear_states.bring_prompts(batch, first)
        hidden = self._hidden[first : first + prompt_rows]
        self._last = None if blocks is None else rows
        return rows.head.after_prompts(batch, hidden, rows.lm_head)

    def _pass(
        self, rows: int, longest: int, blocks: Drafted | None, prompts: ForwardBatch | None
    ) -> TargetRows:
        size = self.sizes[bisect.bisect_left(self.sizes, rows)]
        self.inputs.fill(size, blocks, prompts)
        adapters = _adapters_of(blocks, prompts)
        if adapted := has_adapters(adapters):
            self.parts.adapters.buffers.fill(adapters)
        requests = len(blocks.draft_tokens) if blocks else 0
        requests += prompts.batch_size if prompts else 0
        key = self._key(size, requests, longest)._replace(adapted=adapted)
        if prompts is None and self._is_narrow(blocks.round.width, requests):
            narrow = key._replace(requests=self._rounds.sizes[-1], narrow=True)
            key = narrow if narrow in self._graphs else key
        captured = self._graphs[key]
        captured.graph.replay()
        return captured.rows

    def time_passes(self) -> bool:
        """Measures what passes take, `passes`; whether nobody else used the GPU meanwhile."""
        self.passes, quiet = self._measure(self._replay)
        logger.info("DFLASH passes of the target take, by rows: %s", self.passes)
        return quiet

    def _passes_of_few(self) -> tuple[dict[int, Staircase], bool]:
        """What they take of few requests, by the most that they are captured for, and whether it was quiet."""
        found, all_quiet = {}, True
        for room in self._rooms[self.sizes[0]][:-1]:
            sizes = [size for size in self.sizes if room in self._rooms[size]]
            found[room], quiet = self._measure(partial(self._replay, requests=room), sizes)
            logger.info("DFLASH passes over up to %d requests take: %s", room, found[room])
            all_quiet &= quiet
        return found, all_quiet

    def prompt_rows(
        self,
        block_rows: int,
        slowdown: float,
        backlog: int,
        besides: float = 0.0,
        host: float = 0.0,
    ) -> int:
        """Rows of prompts that a round over so many rows takes along.

        Args:
            slowdown: how much longer the round may take, as a part of what it takes without.
            backlog: rows of all prompts that wait; if there are many, they are through after `PATIENCE` rounds
                all the same.
            besides: milliseconds of the round that the target's pass does not take.
            host: milliseconds of a step that has prompts. Rows that the device runs meanwhile make it no longer.
        """
        if block_rows >= self.sizes[-1]:
            return 0
        alone = self.passes.at(block_rows)
        longest = max(alone * (1 + slowdown) + besides * slowdown, host - besides)
        within = bisect.bisect_right(self.passes.times, longest)
        rows = max(self.sizes[within - 1] - block_rows, backlog // PATIENCE)
        return min(rows, self.sizes[-1] - block_rows)

    def costs(self, rounds: RoundGraphs) -> tuple[Costs, bool]:
        """What rounds take that verify some rows or all, and whether nobody else used the GPU meanwhile."""
        quiet_passes = self.time_passes()
        costs, quiet = costs_of_blocks(rounds, self.runner, self.passes.times[0])
        head, quiet_head = self._measure(self._choose)
        few, quiet_few = self._passes_of_few()
        added, quiet_added = self._adapters_add()
        quiet = quiet and quiet_head and quiet_passes and quiet_few and quiet_added
        return replace(costs, ragged=self.passes, by_requests=few, head=head, adapters=added), quiet

    def _adapters_add(self) -> tuple[float, bool]:
        """Milliseconds, about as many for few rows as for more, and whether nobody else used the GPU meanwhile."""
        if not self.adapted:
            return 0.0, True
        with self.parts.adapters.buffers.random_adapters():
            adapted, quiet = self._measure(partial(self._replay, adapted=True))
        times = zip(adapted.times, self.passes.times, strict=True)
        added = [with_some - without for with_some, without in times]
        return max(0.0, statistics.median(added[: bisect.bisect_right(self.sizes, _USUAL)])), quiet

    def _key(self, size: int, requests: int, longest: int) -> Key:
        room = next(room for room in self._rooms[size] if requests <= room)
        short = Key(size, room, longest <= SHORT_TABLE)
        return short if short in self._graphs else Key(size, room, False)

    def _keys(self) -> list[Key]:
        """The largest first, so that the smaller ones reuse its memory."""
        tables = (False, True) if SHORT_TABLE < self.parts.context_len else (False,)
        of_rooms = [(size, room) for size in self.sizes[::-1] for room in self._rooms[size][::-1]]
        keys = [Key(*each, short) for each in of_rooms for short in tables]
        rounds, most = self._rounds, self._rounds.sizes[-1]
        widths = [w for w in (*rounds.widths, *rounds.narrow) if w > 1 and self._is_narrow(w, most)]
        if widths and rounds.survival is not None:  # else rounds of blocks are verified whole
            sizes = narrow_sizes(self.sizes, most, max(widths))
            keys += [Key(size, most, t, narrow=True) for size in sizes[::-1] for t in tables]
        return keys

    def _is_narrow(self, width: int, requests: int) -> bool:
        """Whether attention of blocks of so many rows is `NarrowSideBySide`'s."""
        attention = narrowed(self._rounds.attention.target, self.runner, width, requests)
        return attention is NarrowBlockAttention

    def capture_adapted(self) -> None:
        """Passes over requests with LoRA adapters, too; the target has its LoRA layers now."""
        keys = [key._replace(adapted=True) for key in self._keys() if not key.narrow]
        self._capture_all("prompts with LoRA adapters", keys)
        self.adapted = True

    def _capture_all(self, what: str, keys: list[Key]) -> None:
        begin, free = time.perf_counter(), torch.cuda.mem_get_info()[0]
        with freeze_gc(False), model_capture_mode(), graph_capture() as context:
            for key in keys:
                self._graphs[key] = self._capture(key, context.stream)
        logger.info(
            "DFLASH captured %d graphs of %s (up to %d rows of %d requests) in %.1f s, %.2f GiB",
            len(keys),
            what,
            self.sizes[-1],
            self.inputs.most,
            time.perf_counter() - begin,
            (free - torch.cuda.mem_get_info()[0]) / GIB,
        )

    def _capture(self, key: Key, stream: torch.cuda.Stream) -> Captured:
        self.inputs.clear(key.rows)
        target = self._target(key)
        graph, rows = captured(partial(self._run, key, target), self.pool, stream)
        return Captured(graph, rows, target)

    def _target(self, key: Key) -> CapturedTarget:
        inputs = self.inputs
        keys = SHORT_TABLE if key.short else inputs.page_table.shape[1] * self.runner.page_size
        lengths, ends = inputs.first(key.requests)
        table = inputs.table_of(keys, key.requests)
        attention = NarrowSideBySide if key.narrow else self._attention
        attention = attention(self.runner, lengths, table, ends, key.rows)
        if key.adapted:
            buffers = self.parts.adapters.buffers
            return CapturedAdaptedPass(self.runner, attention, self._rounds.adapted_body, buffers)
        return CapturedTarget(self.runner, attention, self._rounds.body)

    def _run(self, key: Key, target: CapturedTarget) -> TargetRows:
        inputs, table = self.inputs, target.attention.page_table
        inputs.look_up(table)
        target.prepare()
        batch = inputs.forward_batch(self.runner, key.rows, key.requests)
        rows = target.forward(batch)
        draft, slots = self.parts.draft.runner, inputs.slots[: key.rows]
        write_context(draft, rows.taps, inputs.positions[: key.rows], slots)
        if self._hidden is None:  # captured with the most rows first
            self._hidden = torch.empty_like(rows.hidden_states)
        hidden = self._hidden[: key.rows].copy_(rows.hidden_states)
        return replace(rows, hidden_states=hidden, taps=None)

    def _measure(
        self, run: Callable[[int], object], sizes: Sequence[int] | None = None
    ) -> tuple[Staircase, bool]:
        """What is done with rows of each size, and whether it was quiet."""
        sizes = self.sizes if sizes is None else sizes
        times = milliseconds([partial(run, size) for size in sizes])
        return Staircase(sizes, times.shortest), times.quiet and orderly(times.shortest)

    def _replay(self, size: int, requests: int | None = None, adapted: bool = False) -> None:
        self.inputs.clear(size)
        room = requests or self.inputs.most
        self._graphs[self._key(size, room, 0)._replace(adapted=adapted)].graph.replay()

    def _choose(self, size: int) -> None:
        likeliest(self.parts.vocabulary, self._hidden[:size])


def _adapters_of(blocks: Drafted | None, prompts: ForwardBatch | None) -> Ids:
    """Of all requests of a pass, in its order; none at all if the server has none."""
    return [
        *((blocks and blocks.adapters) or ()),
        *((prompts and prompts.lora_ids) or ()),
    ]


def _has_pictures(batch: ForwardBatch | ModelWorkerBatch) -> bool:
    """Whether a request of a batch has any, if only in the part of its prompt that was run before."""
    inputs = batch.mm_inputs if isinstance(batch, ForwardBatch) else batch.multimodal_inputs
    return any(each is not None for each in inputs or ())


def sizes_of_prompts(
    args: ServerArgs, attention: type[BlockAttention], block_rows: int, linear: bool
) -> list[int]:
    """Rows of the passes that are to be captured; none if the user wants none, or answers that they would change.

    Args:
        attention: of the target's blocks.
        block_rows: the most that a round has.
        linear: whether layers of the target have linear attention, of which the release computes prompts otherwise.
    """
    prefill_backend, _ = args.get_attention_backends()
    deterministic = is_batch_invariant_mode_enabled()
    if not prompts_in_graphs(attention, prefill_backend, deterministic) or (
        linear and deterministic
    ):
        return []
    return row_sizes(block_rows, args.piecewise_cuda_graph_max_tokens, linear)
