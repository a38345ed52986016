"""How a round draws: each row of a block by SGLang's own sampler, with its request's parameters.

What the sampler is given for row i is what plain decoding would give it after the tokens that are
drafted before row i. If all of those are accepted, the row's draw is plain decoding's; if not, the
row is not committed.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.sampler import Sampler
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from sglang_dflash.grammar import vocabulary_mask
from sglang_dflash.penalties import is_penalized, row_penalties

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ModelWorkerBatch, Req, ScheduleBatch

    from sglang_dflash.round import Round


@dataclass(frozen=True)
class Sampling:
    """What the requests of a batch ask of their draws.

    Attributes:
        info: of the batch, one row a request.
        reqs: the requests; their `output_ids` are only read for what `needs_history` names.
    """

    info: SamplingBatchInfo
    reqs: list[Req]
    has_grammar: bool
    return_hidden_states: bool
    return_logprob: bool
    top_logprobs_nums: list[int]
    token_ids_logprobs: list[list[int] | None]

    @classmethod
    def of(cls, batch: ScheduleBatch | ModelWorkerBatch, detect_nan: bool) -> Sampling | None:
        """What a decode batch asks, or None if the likeliest token of each row is all.

        Args:
            detect_nan: whether the sampler looks for NaN, which only happens with logits.
        """
        info = batch.sampling_info
        history = needs_history(batch)
        hidden_states = any(req.return_hidden_states for req in batch.reqs)
        asks = history or batch.return_logprob or hidden_states or info.logit_bias is not None
        if info.is_all_greedy and not asks and not detect_nan:
            return None
        bs = len(batch.reqs)
        return cls(
            info=info,
            reqs=list(batch.reqs),
            has_grammar=batch.has_grammar,
            return_hidden_states=hidden_states,
            return_logprob=batch.return_logprob,
            top_logprobs_nums=batch.top_logprobs_nums or [0] * bs,
            token_ids_logprobs=batch.token_ids_logprobs or [None] * bs,
        )

    def draw(
        self, sampler: Sampler, output: LogitsProcessorOutput, round: Round, drafts: torch.Tensor
    ) -> torch.Tensor:
        """Draws after every row: [bs, width] int64; log-probabilities go to `output`.

        Args:
            output: with `next_token_logits` [bs * width, vocabulary] float32, which are overwritten.
            drafts: [bs, width - 1] int64.
        """
        width = round.width
        rows = self.rows(drafts, width)
        rows.apply_logits_bias(output.next_token_logits)
        tokens = sampler(
            output,
            rows,
            self.return_logprob,
            _repeat(self.top_logprobs_nums, width),
            _repeat(self.token_ids_logprobs, width),
            round.positions,
        )
        if output.next_token_logprobs is not None:
            output.next_token_logprobs = output.next_token_logprobs.view(-1, width)
        return tokens.to(torch.int64).view(-1, width)

    def rows(self, drafts: torch.Tensor, width: int) -> SamplingBatchInfo:
        """The batch's parameters, a row for each row of the blocks."""
        info, reqs = self.info, self.reqs
        additive = scaling = mask = custom = None
        on_host = drafts.tolist() if self.has_grammar or info.has_custom_logit_processor else []
        if any(map(is_penalized, reqs)):
            additive, scaling = row_penalties(reqs, drafts, info.vocab_size)
        grammars = [req.grammar for req in reqs] if self.has_grammar else None
        apply_mask = None
        if grammars and any(grammars):
            mask, apply_mask = vocabulary_mask(grammars, on_host, info.vocab_size, drafts.device)
        params = info.custom_params
        if info.has_custom_logit_processor:
            custom = {
                key: (processor, chosen.repeat_interleave(width))
                for key, (processor, chosen) in info.custom_logit_processor.items()
            }
            params = [
                _params_after(param, req, row[:i])
                for param, req, row in zip(params, reqs, on_host, strict=True)
                for i in range(width)
            ]

        def repeated(value: torch.Tensor | None) -> torch.Tensor | None:
            return None if value is None else value.repeat_interleave(width, dim=0)

        return replace(
            info,
            temperatures=repeated(info.temperatures),
            top_ps=repeated(info.top_ps),
            top_ks=repeated(info.top_ks),
            min_ps=repeated(info.min_ps),
            sampling_seed=repeated(info.sampling_seed),
            logit_bias=repeated(info.logit_bias),
            grammars=grammars,
            vocab_mask=mask,
            apply_mask_func=apply_mask,
            penalizer_orchestrator=None,
            acc_additive_penalties=additive,
            acc_scaling_penalties=scaling,
            custom_params=params,
            custom_logit_processor=custom,
        )


def needs_history(batch: ScheduleBatch | ModelWorkerBatch) -> bool:
    """Whether a decode batch can only be drawn for when all earlier tokens are on the host.

    The overlapped scheduler then looks at a round's result before it launches the next.
    """
    return (
        batch.has_grammar
        or batch.sampling_info.has_custom_logit_processor
        or any(map(is_penalized, batch.reqs))
    )


class _RequestAfter:
    """A request as a custom logit processor would find it after some more tokens."""

    def __init__(self, req: Req, tokens: list[int]):
        self._req = req
        self.output_ids = [*req.output_ids, *tokens]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._req, name)


def _params_after(params: dict | None, req: Req, tokens: list[int]) -> dict | None:
    """Parameters of a custom logit processor for the row after `tokens`.

    A copy for each row: what a processor writes there must not reach rows that are not committed.
    """
    if params is None:
        return None
    params = copy.copy(params)
    if "__req__" in params:
        params["__req__"] = _RequestAfter(req, tokens)
    return params


def _repeat(values: list, width: int) -> list:
    return [value for value in values for _ in range(width)]
