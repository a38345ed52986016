"""A round over a batch of requests: from a graph if one was captured for it, else kernel by kernel."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from sglang.srt.batch_invariant_ops import is_batch_invariant_mode_enabled
from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from sglang_dflash.drawing.sampling import Sampling
from sglang_dflash.gpu.choose_attention import BACKEND, block_attention_of
from sglang_dflash.gpu.pass_sizes import narrower, sizes_to_capture
from sglang_dflash.process.source import source_digest
from sglang_dflash.round.accept import Accepted
from sglang_dflash.round.adapter_buffers import Ids, has_adapters
from sglang_dflash.round.block_costs import costs_of_blocks
from sglang_dflash.round.costs import Costs, remembered
from sglang_dflash.round.opened import Round
from sglang_dflash.round.parts import Parts
from sglang_dflash.round.ragged import Ragged
from sglang_dflash.round.sharing_costs import costs_of_sharing
from sglang_dflash.round.side_by_side import Drafted
from sglang_dflash.round.stages import Blocks, accept_blocks, run_models
from sglang_dflash.round.survival import Survival

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ModelWorkerBatch
    from sglang.srt.managers.utils import GenerationBatchResult
    from sglang.srt.server_args import ServerArgs

    from sglang_dflash.round.graphs import Key, Proposed, RoundGraphs
    from sglang_dflash.round.prompt_graphs import PromptGraphs

logger = logging.getLogger(__name__)

# Why a round was not replayed from a graph, though graphs are captured.
NO_GRAPH, ADAPTERS = "no_graph", "adapters"

# Rounds verify as many rows as pay, not all that they draft (`--speculative-dflash-verify`).
AUTO = "auto"


@dataclass(frozen=True)
class RoundResult:
    """What a round gave, on the device.

    Attributes:
        output: log-probabilities and hidden states of its rows, if a request asks for any.
        fell_back: why it was not replayed from a graph; None if it was, or if none are captured.
        expected: what was expected of its drafts, [bs, width - 1] float32 as in `Estimate`, and behind it how many
            rows of each request it verified; on the host, where it is as soon as anything is that is copied later, as
            what was accepted. None if nobody asks or nothing was drafted.
        begins: [bs] int64, where rows of each request begin; None if all rows of all blocks were verified.
    """

    accepted: Accepted
    output: LogitsProcessorOutput | None = None
    fell_back: str | None = None
    expected: torch.Tensor | None = None
    begins: torch.Tensor | None = None


# Launches what is left of a round.
Finish = Callable[[], RoundResult]


class RoundRunner:
    """Runs rounds over the requests of one set of parts."""

    def __init__(
        self,
        parts: Parts,
        graphs: RoundGraphs | None = None,
        prompt_graphs: PromptGraphs | None = None,
    ):
        self.parts, self.graphs, self.prompt_graphs = parts, graphs, prompt_graphs
        self.survival = None if graphs is None else graphs.survival
        # Whether what rounds take was measured while something else used the GPU.
        self.disturbed = False

    @property
    def attention(self) -> dict[str, str]:
        """What computes attention of blocks, by model, in the words of `--speculative-dflash-attention`."""
        if self.graphs is None:
            return dict.fromkeys(("target", "drafter"), BACKEND)
        return {
            "target": self.graphs.attention.target.name,
            "drafter": self.graphs.attention.draft.name,
        }

    def costs(self) -> Costs | None:
        """What rounds take, where the number of their rows is to be chosen; passes are timed either way."""
        if self.survival is None:
            if self.prompt_graphs is not None:
                self.prompt_graphs.time_passes()
            return None
        costs, quiet = remembered(self._name(), self._measure)
        self.disturbed = not quiet
        if self.prompt_graphs is not None:
            self.prompt_graphs.passes = costs.ragged
        return costs

    def _measure(self) -> tuple[Costs, bool]:
        """What rounds take, and whether nobody else used the GPU meanwhile."""
        if self.prompt_graphs is None:
            return costs_of_blocks(self.graphs, self.parts.target.runner)
        costs, quiet = self.prompt_graphs.costs(self.graphs)
        if self.parts.linear_states is not None:
            return costs, quiet
        sharing, quiet_rounds = costs_of_sharing(
            self.graphs, self.prompt_graphs, self.launch, costs
        )
        return replace(costs, sharing=sharing), quiet and quiet_rounds

    def _name(self) -> str:
        """Of all that decides what rounds take."""
        graphs, target = self.graphs, self.parts.target.runner
        passes = self.prompt_graphs.sizes if self.prompt_graphs else []
        models = (target.model, self.parts.draft.runner.model)
        weights = [sum(p.numel() * p.itemsize for p in model.parameters()) for model in models]
        asked = target.server_args.speculative_dflash_attention
        lora = self.parts.adapters and self.parts.adapters.manager.max_lora_rank
        return ", ".join(
            (
                f"{torch.cuda.get_device_name() if torch.cuda.is_available() else 'CPU'} x{target.tp_size}",
                f"{type(target.model).__name__} of {target.model_config.num_hidden_layers} layers",
                f"{weights[0]} and {weights[1]} bytes of weights, {target.dtype}, K/V {target.kv_cache_dtype}",
                f"attention {', '.join((asked, *self.attention.values()))}, adapters of rank {lora or 0}",
                f"whole blocks of {[*graphs.widths, *graphs.narrow]}, requests {graphs.sizes}, rows {passes}",
                f"sglang-dflash {source_digest()}, torch {torch.__version__}",
            )
        )

    def launch(
        self,
        rows: torch.Tensor,
        start_bounds: torch.Tensor,
        width: int,
        sampling: Sampling | None = None,
        cut: bool = True,
        total: int | None = None,
        adapters: Ids | None = None,
    ) -> Finish:
        """Launches one round over the requests at `rows` ([bs] int64), as far as the target's pass.

        Args:
            start_bounds: [bs] int64 on the host, no less than the committed lengths.
            sampling: how to draw; None for the likeliest tokens.
            cut: whether a row may have no slot.
            total: how many rows of all blocks are verified; None for all.
            adapters: of each request; see `shares_adapted`.

        Returns:
            Launches the rest; to be called before the next round. Draws may need tokens that are known only then.
        """
        parts, graphs = self.parts, self.graphs
        adapted = has_adapters(adapters)
        # What is no whole block of every request is a pass over so many rows, of which there are adapted ones.
        part = graphs is not None and width < graphs.widths[-1]
        as_rows = total is not None or (adapted and part and self.shares_adapted)
        key = graphs and graphs.key(start_bounds, width, adapted and not as_rows)
        if key is None:
            round = Round.open(
                parts.state, rows, start_bounds, width, parts.req_to_token, parts.context_len, cut
            )
            target = parts.target if adapters is None else parts.adapters.model(adapters)
            blocks = run_models(parts, round, parts.draft, target)
            fell_back = None if graphs is None else ADAPTERS if adapted else NO_GRAPH
            if blocks.target.adapted is None:
                return lambda: RoundResult(*accept_blocks(parts, blocks, sampling), fell_back)
            parts.adapters.hold(adapters)
            return self._held(
                lambda: RoundResult(*accept_blocks(parts, blocks, sampling), fell_back)
            )
        proposed = graphs.propose(key, rows, sampling, adapters)
        if as_rows:
            drafted = _drafted(proposed, start_bounds, total, adapters)
            sampling = _after(drafted, sampling)
            blocks = self.prompt_graphs.verify(drafted)
            finish: Finish = partial(self._accept, proposed, blocks, sampling)
        else:
            sampling = sampling and sampling.after(proposed.draft_tokens)
            if adapted:
                parts.adapters.buffers.fill(adapters)
            finish = self._verify(key, proposed, sampling)
        if not adapted:
            return finish
        parts.adapters.hold(adapters)
        return self._held(finish)

    @property
    def shares_adapted(self) -> bool:
        """Whether requests with LoRA adapters can have different numbers of rows in a round."""
        return self.prompt_graphs is not None and self.prompt_graphs.adapted

    def _verify(self, key: Key, proposed: Proposed, sampling: Sampling | None) -> Finish:
        """The target's pass over whole blocks, from a graph."""
        graphs, requests = self.graphs, len(proposed.draft_tokens)
        graphs.verify(key)
        if sampling is None:
            return lambda: _told(*graphs.accept(key, requests))
        return partial(self._accept, proposed, graphs.blocks(key, requests), sampling)

    def holds_prompts(
        self,
        start_bounds: torch.Tensor,
        width: int,
        rows: int,
        prompts: ModelWorkerBatch,
        adapted: bool,
    ) -> bool:
        """Whether so many rows of a round's blocks and prompts beside them are one pass of the target.

        Args:
            adapted: whether requests of the round have LoRA adapters.
        """
        requests, both = len(start_bounds), self.prompt_graphs
        return (
            both is not None
            and (self.shares_adapted or not adapted)
            and self.graphs.key(start_bounds, width) is not None
            and both.computes(prompts)
            and both.holds(rows + len(prompts.input_ids), requests + len(prompts.reqs))
        )

    def milliseconds_of(self, prompts: ModelWorkerBatch) -> float | None:
        """What prompts take in a pass of their own, contexts aside; None if that is in no graph, or nobody asks."""
        passes, rows = self.prompt_graphs, len(prompts.input_ids)
        if self.survival is None or passes is None or not passes.computes(prompts):
            return None
        return passes.passes.at(rows) if passes.holds(rows, len(prompts.reqs)) else None

    def launch_with_prompts(
        self,
        rows: torch.Tensor,
        start_bounds: torch.Tensor,
        width: int,
        sampling: Sampling | None,
        prefill: Callable[[], GenerationBatchResult],
        total: int | None = None,
        adapters: Ids | None = None,
    ) -> tuple[Finish, GenerationBatchResult]:
        """A round, and prompts that the target runs in the same pass; see `launch`.

        Args:
            prefill: runs the prompts.
        """
        key = self.graphs.key(start_bounds, width)
        proposed = self.graphs.propose(key, rows, sampling, adapters)
        drafted = _drafted(proposed, start_bounds, total, adapters)
        sampling = _after(drafted, sampling)
        if adapted := has_adapters(adapters):
            self.parts.adapters.hold(adapters)
        self.prompt_graphs.board(drafted)
        result = prefill()
        finish = partial(self._accept, proposed, self.prompt_graphs.leave(), sampling)
        return self._held(finish) if adapted else finish, result

    def _held(self, finish: Finish) -> Finish:
        """Lets adapters go when the rest of a round that holds them is launched."""

        def finish_and_let_go() -> RoundResult:
            try:
                return finish()
            finally:
                self.parts.adapters.let_go()

        return finish_and_let_go

    def _accept(self, proposed: Proposed, blocks: Blocks, sampling: Sampling | None) -> RoundResult:
        """The result of a round, of which the next ones have learned what drafts are worth."""
        accepted, output = accept_blocks(self.parts, blocks, sampling)
        estimate, ragged = proposed.estimate, blocks.ragged
        begins = None if ragged is None else ragged.begins
        if estimate is None:
            return RoundResult(accepted, output, begins=begins)
        rows = proposed.round.width if ragged is None else ragged.counts
        told = self.survival.learn(estimate, rows, accepted.lengths)
        return RoundResult(accepted, output, expected=_to_host(told), begins=begins)


def _told(accepted: Accepted, expected: torch.Tensor | None) -> RoundResult:
    """Of a graph that has learned of the round itself."""
    return RoundResult(accepted, expected=None if expected is None else _to_host(expected))


def _to_host(expected: torch.Tensor) -> torch.Tensor:
    return expected.to("cpu", non_blocking=True)


def _drafted(
    proposed: Proposed, start_bounds: torch.Tensor, total: int | None, adapters: Ids | None
) -> Drafted:
    """Blocks for the target, of which it verifies `total` rows, or all."""
    ragged = None
    if total is not None:
        ragged = Ragged.share(proposed.estimate.chances, total)
    round = replace(proposed.round, start_bounds=start_bounds)
    return Drafted(round, proposed.draft_tokens, ragged, adapters)


def _after(drafted: Drafted, sampling: Sampling | None) -> Sampling | None:
    """What is drawn of blocks, of whose drafts the host begins to learn now."""
    ragged = drafted.ragged
    counts = None if ragged is None else ragged.counts
    return sampling and sampling.after(drafted.draft_tokens, counts)


def capture(parts: Parts, server_args: ServerArgs, widths: list[int]) -> RoundRunner:
    """A runner with graphs of whole rounds and of prompts, where the device and the models allow it.

    Args:
        widths: that rounds may have.
    """
    if parts.req_to_token.device.type != "cuda" or server_args.disable_cuda_graph:
        return RoundRunner(parts)
    from sglang_dflash.round.graphs import Attention, RoundGraphs
    from sglang_dflash.round.prompt_graphs import PromptGraphs, sizes_of_prompts

    attention = Attention(*(block_attention_of(m.runner) for m in (parts.draft, parts.target)))
    if None in attention:
        why = (
            "as --speculative-dflash-attention backend asks"
            if server_args.speculative_dflash_attention == BACKEND
            else "because they need K and V of bfloat16, float16, float32 or FP8 with heads of at most 256, or latents "
            "of MLA of bfloat16 or float16 and a Hopper"
        )
        logger.warning("DFLASH runs without CUDA graphs, %s.", why)
        return RoundRunner(parts)
    sizes = sizes_to_capture(server_args.cuda_graph_bs, parts.max_requests)
    linear = parts.linear_states is not None
    passes = sizes_of_prompts(server_args, attention.target, sizes[-1] * max(widths), linear)
    survival, adapted_widths, narrow = None, widths, []
    # With deterministic inference, rounds of one row are not computed as blocks are.
    chosen = passes or (linear and not is_batch_invariant_mode_enabled())
    if server_args.speculative_dflash_verify == AUTO and chosen:
        survival = Survival(server_args.speculative_num_draft_tokens - 1, parts.req_to_token.device)
        narrow = narrower(max(widths))
        # Without passes in which requests have different numbers of rows, all of narrower blocks are verified.
        widths = [1, *widths] if passes else sorted({1, *narrow, *widths})
    parts.draft.runner.model.tells_odds = survival is not None
    adapted = parts.adapters is not None and parts.adapters.can_be_captured
    if adapted:
        parts.adapters.widen_products()
    with nullcontext() if parts.adapters is None else parts.adapters.taken_off():
        narrow = narrow if passes else []
        rounds = RoundGraphs(parts, attention, sizes, widths, survival, narrow, passes)
        prompts = PromptGraphs(parts, rounds, passes) if passes else None
    if adapted:
        parts.adapters.make_buffers(prompts.inputs.most + 1 if prompts else sizes[-1])
        rounds.capture_adapted(adapted_widths)
        if prompts:
            prompts.capture_adapted()
    # Where the release's own graphs of prompts would be.
    parts.target.runner.piecewise_cuda_graph_runner = prompts
    return RoundRunner(parts, rounds, prompts)
