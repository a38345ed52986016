"""A server that runs prompts in rounds on a CPU: `python -m tests.server.eager_passes --model-path …`.

What a GPU replays from a CUDA graph is computed each time, with attention written out instead of a GPU's kernel. All
else is what a GPU runs: who rides, what is put side by side, the target's pass over it, and what is made of it.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
from sglang.srt.lora.utils import LoRABatchInfo
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.server_args import ServerArgs

from sglang_dflash.chunks import chunk_of
from sglang_dflash.cpu.block_attention import attend
from sglang_dflash.cpu.lora import batch_info
from sglang_dflash.drawing.sampling import Sampling
from sglang_dflash.gpu import pass_sizes
from sglang_dflash.gpu.block_attention import BlockAttention, window_of
from sglang_dflash.gpu.choose_attention import SIDE_BY_SIDE
from sglang_dflash.gpu.pass_sizes import narrower, row_sizes
from sglang_dflash.round import run, sharing_costs
from sglang_dflash.round.accept import Accepted
from sglang_dflash.round.adapter_buffers import AdapterBuffers, Ids
from sglang_dflash.round.costs import Staircase, Times
from sglang_dflash.round.graphs import Attention, Proposed
from sglang_dflash.round.opened import Round
from sglang_dflash.round.parts import Parts
from sglang_dflash.round.prompt_graphs import Key, PromptGraphs
from sglang_dflash.round.propose import propose
from sglang_dflash.round.run import AUTO, RoundRunner
from sglang_dflash.round.stages import Blocks, accept_blocks, verify_blocks
from sglang_dflash.round.survival import Kinds, Survival
from sglang_dflash.round.target import TargetRows


class SideBySideAttention(BlockAttention):
    """What `TritonSideBySide` and FA3's compute: each request's rows over all of its keys, causal."""

    name = "written out"

    def __init__(
        self,
        runner: ModelRunner,
        cache_lengths: torch.Tensor,
        page_table: torch.Tensor,
        ends: torch.Tensor,
        rows: int,
    ):
        super().__init__(runner, cache_lengths, page_table, rows, causal=True, short=True)
        self.ends = ends

    def forward(
        self,
        q: torch.Tensor | None = None,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        layer: RadixAttention | RadixLinearAttention | None = None,
        forward_batch: ForwardBatch | None = None,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        if save_kv_cache and self.runner.use_mla_backend:  # its pool takes no scales
            slots, save_kv_cache = forward_batch.out_cache_loc, False
            forward_batch.token_to_kv_pool.set_kv_buffer(layer, slots, k, v)
        return super().forward(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)

    def attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        layer: RadixAttention,
        causal: bool,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        lengths, table = self.keys_of(layer)
        out = q.new_zeros(*q.shape[:2], values.shape[2])
        page_size, window, ends = self.runner.page_size, window_of(layer), self.ends.tolist()
        for request, length in enumerate(lengths.tolist()):
            begin, end = ends[request : request + 2]
            if begin == end:
                continue
            key = torch.arange(length)
            slots = table[request, key // page_size] * page_size + key % page_size
            row = (length - end + torch.arange(begin, end))[:, None]
            seen = (key <= row) & (key >= (row - window if window >= 0 else 0))
            if chunk := chunk_of(layer, self.runner.attention_chunk_size):
                seen &= key >= row // chunk * chunk
            given = (x.transpose(0, 1) for x in (q[begin:end], keys[slots], values[slots]))
            attended = attend(*given, seen, layer.scaling, sinks)
            out[begin:end] = attended.transpose(0, 1)
        return out


def target_alone(parts: Parts) -> AbstractContextManager[None]:
    """The target as graphs hold it."""
    return nullcontext() if parts.adapters is None else parts.adapters.taken_off()


class EagerKey(NamedTuple):
    """Of what graphs are told apart by, what matters without them."""

    width: int
    adapted: bool


class EagerBuffers(AdapterBuffers):
    """For the CPU's LoRA layers, which read their segments on the host."""

    def fill(self, ids: Ids) -> None:
        super().fill(ids)
        self.ids = ids

    def _segments(self, ends: torch.Tensor, places: torch.Tensor, *_: int) -> LoRABatchInfo:
        return batch_info(ends.diff().tolist(), places.tolist(), self.ranks, self.scalings)


class EagerRounds:
    """Stands for `RoundGraphs`: a round of any number of requests, kernel by kernel."""

    body = adapted_body = pool = None
    attention = Attention(SideBySideAttention, SideBySideAttention)

    def __init__(
        self, parts: Parts, widths: list[int], survival: Survival | None, narrow: list[int]
    ):
        self.parts, self.survival, self.narrow = parts, survival, narrow
        self.sizes, self.widths = [parts.max_requests], sorted(widths)

    def key(self, start_bounds: torch.Tensor, width: int, adapted: bool = False) -> EagerKey:
        return EagerKey(width, adapted)

    def verify(self, key: EagerKey) -> None:
        parts, (round, drafts) = self.parts, self._proposed
        if key.adapted:
            target = parts.adapters.model(parts.adapters.buffers.ids)
            self._blocks = verify_blocks(parts, round, drafts, target)
            return
        with target_alone(parts):
            self._blocks = verify_blocks(parts, round, drafts, parts.target)

    def blocks(self, key: EagerKey, requests: int) -> Blocks:
        return self._blocks

    def accept(self, key: EagerKey, requests: int) -> tuple[Accepted, torch.Tensor | None]:
        accepted, _ = accept_blocks(self.parts, self._blocks)
        estimate = self._estimate
        return accepted, estimate and self.survival.learn(estimate, key.width, accepted.lengths)

    def propose(
        self,
        key: EagerKey,
        rows: torch.Tensor,
        sampling: Sampling | None = None,
        adapters: Ids | None = None,
    ) -> Proposed:
        round, estimate = self._open(key.width, rows), None
        drafts = propose(self.parts.draft, round)
        if drafts.log_odds is not None:
            kinds = Kinds(len(rows), "cpu")
            kinds.tell(len(rows), sampling.drawing if sampling else (), adapters)
            ended = self.parts.state.ended
            estimate = self.survival.estimate(drafts.log_odds, kinds.values, rows, ended)
        self._proposed, self._estimate = (round, drafts.tokens), estimate
        return Proposed(round, drafts.tokens, estimate)

    def _open(self, width: int, rows: torch.Tensor) -> Round:
        """Nothing that a graph reads tells how long contexts are at most."""
        parts, bounds = self.parts, torch.full((len(rows),), self.parts.context_len)
        return Round.open(
            parts.state, rows, bounds, width, parts.req_to_token, parts.context_len, cut=True
        )

    def times(self) -> tuple[dict[int, tuple[Staircase, Staircase]], bool]:
        """Every row costs as much, and drafts next to nothing."""
        sizes = list(range(1, self.sizes[-1] + 1))
        first = Staircase(sizes, [0.1] * len(sizes))
        times = {
            width: (first, Staircase(sizes, [float(n * width) for n in sizes]))
            for width in (*self.widths, *self.narrow)
        }
        return times, True


class EagerPass:
    """Stands for `Captured` and for the graph in it."""

    def __init__(self, passes: EagerPasses, key: Key):
        self.graph, self._passes, self._key = self, passes, key
        self._target = passes._target(key)
        passes.inputs.clear(key.rows)
        self.replay()

    def replay(self) -> None:
        parts = self._passes.parts
        with nullcontext() if self._key.adapted else target_alone(parts):
            self.rows = self._passes._run(self._key, self._target)


class EagerPasses(PromptGraphs):
    def _pass(self, *of: Any) -> TargetRows:
        """On a GPU hidden states that requests ask for are copied to the host before the next pass begins."""
        self._hidden = torch.empty_like(self._hidden)
        return super()._pass(*of)

    def _capture_all(self, what: str, keys: list[Key]) -> None:
        self._graphs |= {key: EagerPass(self, key) for key in keys}

    def _measure(
        self, run: Callable[[int], object], sizes: Sequence[int] | None = None
    ) -> tuple[Staircase, bool]:
        """A pass takes as long as it has rows."""
        sizes = self.sizes if sizes is None else sizes
        return Staircase(sizes, list(map(float, sizes))), True


def as_their_parts(runs: Sequence[partial]) -> Times:
    """Rounds whose requests have different numbers of rows take what their parts do; none is run."""
    return Times([0.1 + 2.0 * total for *_, total in (run.args for run in runs)], True)


def capture(parts: Parts, server_args: ServerArgs, widths: list[int]) -> RoundRunner:
    """Stands for `sglang_dflash.round.run.capture`."""
    survival, narrow = None, []
    most, block_rows = server_args.piecewise_cuda_graph_max_tokens, parts.max_requests * max(widths)
    sizes = row_sizes(block_rows, most, parts.linear_states is not None)
    if server_args.speculative_dflash_verify == AUTO:
        survival = Survival(max(widths) - 1, "cpu")
        parts.draft.runner.model.tells_odds = True
        narrow = narrower(max(widths))
        widths = [1, *widths] if sizes else [1, *narrow, *widths]
    rounds = EagerRounds(parts, widths, survival, narrow if sizes else [])
    if not sizes:
        return RoundRunner(parts, rounds)
    passes = EagerPasses(parts, rounds, sizes)
    if parts.adapters is not None:
        requests = passes.inputs.most + 1
        parts.adapters.buffers = EagerBuffers(parts.adapters.manager, requests, "cpu", {})
        passes.capture_adapted()
    parts.target.runner.piecewise_cuda_graph_runner = passes
    return RoundRunner(parts, rounds, passes)


def run_scheduler(*arguments: Any, **more: Any) -> Any:
    """Stands for SGLang's `run_scheduler_process`, in the process that it runs in."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    from sglang_dflash.scheduler import base

    base.capture, SIDE_BY_SIDE[SideBySideAttention] = capture, SideBySideAttention
    sharing_costs.milliseconds = as_their_parts
    pass_sizes.FEW = (2, 3)  # so that tests have passes of few and of more
    # Nothing of it is kept for others; the first time passes for disturbed, so it is measured again.
    again = itertools.chain([False], itertools.repeat(True))
    run.remembered = lambda name, measure: (measure()[0], next(again))
    return run_scheduler_process(*arguments, **more)


if __name__ == "__main__":
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    try:
        launch_server(prepare_server_args(sys.argv[1:]), run_scheduler_process_func=run_scheduler)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
