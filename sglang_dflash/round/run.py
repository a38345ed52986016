"""A round over a batch of requests: from a graph if one was captured for it, else kernel by kernel."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from sglang_dflash.drawing.sampling import Sampling
from sglang_dflash.gpu.choose_attention import BACKEND, block_attention_of
from sglang_dflash.round.accept import Accepted
from sglang_dflash.round.opened import Round
from sglang_dflash.round.parts import Parts
from sglang_dflash.round.side_by_side import Drafted
from sglang_dflash.round.stages import accept_blocks, run_models

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ModelWorkerBatch
    from sglang.srt.managers.utils import GenerationBatchResult
    from sglang.srt.server_args import ServerArgs

    from sglang_dflash.round.graphs import RoundGraphs
    from sglang_dflash.round.prompt_graphs import PromptGraphs

logger = logging.getLogger(__name__)

# Why a round was not replayed from a graph, though graphs are captured.
NO_GRAPH = "no_graph"


@dataclass(frozen=True)
class RoundResult:
    """What a round gave, on the device.

    Attributes:
        output: log-probabilities and hidden states of its rows, if a request asks for any.
        fell_back: why it was not replayed from a graph; None if it was, or if none are captured.
    """

    accepted: Accepted
    output: LogitsProcessorOutput | None = None
    fell_back: str | None = None


class RoundRunner:
    """Runs rounds over the requests of one set of parts."""

    def __init__(
        self,
        parts: Parts,
        graphs: RoundGraphs | None = None,
        prompt_graphs: PromptGraphs | None = None,
    ):
        self.parts, self.graphs, self.prompt_graphs = parts, graphs, prompt_graphs

    @property
    def attention(self) -> dict[str, str]:
        """What computes attention of blocks, by model, in the words of `--speculative-dflash-attention`."""
        if self.graphs is None:
            return dict.fromkeys(("target", "drafter"), BACKEND)
        return {
            "target": self.graphs.attention.target.name,
            "drafter": self.graphs.attention.draft.name,
        }

    def run(
        self,
        rows: torch.Tensor,
        start_bounds: torch.Tensor,
        width: int,
        sampling: Sampling | None = None,
        cut: bool = True,
    ) -> RoundResult:
        """One round over the requests at `rows` ([bs] int64).

        Args:
            start_bounds: [bs] int64 on the host, no less than the committed lengths.
            sampling: how to draw; None for the likeliest tokens.
            cut: whether a row may have no slot.
        """
        parts, graphs = self.parts, self.graphs
        if graphs is not None and (key := graphs.key(start_bounds, width)) is not None:
            return RoundResult(*graphs.replay(key, rows, sampling))
        round = Round.open(
            parts.state, rows, start_bounds, width, parts.req_to_token, parts.context_len, cut
        )
        blocks = run_models(parts, round, parts.draft, parts.target)
        fell_back = None if graphs is None else NO_GRAPH
        return RoundResult(*accept_blocks(parts, blocks, sampling), fell_back)

    def holds_prompts(
        self, start_bounds: torch.Tensor, width: int, prompts: ModelWorkerBatch
    ) -> bool:
        """Whether a round's blocks and prompts beside them are one pass of the target."""
        requests, both = len(start_bounds), self.prompt_graphs
        return (
            both is not None
            and self.graphs.key(start_bounds, width) is not None
            and both.computes(prompts)
            and both.holds(requests * width + len(prompts.input_ids), requests + len(prompts.reqs))
        )

    def run_with_prompts(
        self,
        rows: torch.Tensor,
        start_bounds: torch.Tensor,
        width: int,
        sampling: Sampling | None,
        prefill: Callable[[], GenerationBatchResult],
    ) -> tuple[RoundResult, GenerationBatchResult]:
        """A round, and prompts that the target runs in the same pass; see `run`.

        Args:
            prefill: runs the prompts.
        """
        round, draft_tokens = self.graphs.propose(self.graphs.key(start_bounds, width), rows)
        sampling = sampling and sampling.after(draft_tokens)
        round = replace(round, start_bounds=start_bounds)
        self.prompt_graphs.board(Drafted(round, draft_tokens))
        result = prefill()
        blocks = self.prompt_graphs.leave()
        return RoundResult(*accept_blocks(self.parts, blocks, sampling)), result


def capture(parts: Parts, server_args: ServerArgs, widths: list[int]) -> RoundRunner:
    """A runner with graphs of whole rounds and of prompts, where the device and the models allow it.

    Args:
        widths: that rounds may have.
    """
    if parts.req_to_token.device.type != "cuda" or server_args.disable_cuda_graph:
        return RoundRunner(parts)
    from sglang_dflash.round.graphs import Attention, RoundGraphs, sizes_to_capture
    from sglang_dflash.round.prompt_graphs import capture_prompts

    attention = Attention(*(block_attention_of(m.runner) for m in (parts.draft, parts.target)))
    if None in attention:
        why = (
            "as --speculative-dflash-attention backend asks"
            if server_args.speculative_dflash_attention == BACKEND
            else "because they need a target without MLA, with K and V in one pool of bfloat16, float16, float32 or "
            "FP8, and heads of at most 256"
        )
        logger.warning("DFLASH runs without CUDA graphs, %s.", why)
        return RoundRunner(parts)
    sizes = sizes_to_capture(server_args.cuda_graph_bs, parts.max_requests)
    rounds = RoundGraphs(parts, attention, sizes, widths)
    prompts = capture_prompts(parts, rounds)
    # Where the release's own graphs of prompts would be.
    parts.target.runner.piecewise_cuda_graph_runner = prompts
    return RoundRunner(parts, rounds, prompts)
