"""How a round draws: each row of a block by SGLang's own sampler, with its request's parameters.

What the sampler is given for row i is what plain decoding would give it after the tokens that are
drafted before row i. If all of those are accepted, the row's draw is plain decoding's; if not, the
row is not committed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.sampler import Sampler
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from sglang_dflash.device_waits import to_device
from sglang_dflash.drawing.grammar import vocabulary_mask
from sglang_dflash.drawing.not_finite import NOT_FINITE, take_out
from sglang_dflash.drawing.on_its_way import DraftsOnHost
from sglang_dflash.drawing.penalties import Penalties, is_penalized

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ModelWorkerBatch, Req, ScheduleBatch

# Rows whose logits are held at once: 78 MB a tensor with a vocabulary of 152,000.
ROWS_AT_ONCE = 128

# Parameters that have a row for each request.
_BY_REQUEST = ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed", "logit_bias")

# By row, what a sampler gives only if a request asks for it.
_LISTS = (
    "next_token_top_logprobs_val",
    "next_token_top_logprobs_idx",
    "next_token_token_ids_logprobs_val",
    "next_token_token_ids_logprobs_idx",
)


@dataclass(frozen=True)
class Sampling:
    """What the requests of a batch ask of their draws.

    Attributes:
        info: of the batch, one row a request.
        reqs: the requests; all of their `output_ids` are only known for what `needs_history` names.
        rows: [bs] int64, theirs in `req_to_token`.
        drawing: which of them ask for more than the likeliest token; of all, if one wants to know something of
            its rows.
        penalties: what was counted for them; None if none of them has any.
        drafts: of the round, on their way to the host, if it is going to read them.
    """

    info: SamplingBatchInfo
    reqs: list[Req]
    rows: torch.Tensor
    drawing: list[int]
    penalties: Penalties | None
    has_grammar: bool
    return_hidden_states: bool
    return_logprob: bool
    top_logprobs_nums: list[int]
    token_ids_logprobs: list[list[int] | None]
    drafts: DraftsOnHost | None = None

    @classmethod
    def of(
        cls, batch: ScheduleBatch | ModelWorkerBatch, penalties: Penalties, detect_nan: bool
    ) -> Sampling | None:
        """What a decode batch asks, or None if the likeliest token of each row is all.

        Args:
            penalties: of all requests that run.
            detect_nan: whether the sampler looks for NaN, which only happens with logits.
        """
        reqs = batch.reqs
        hidden_states = any(req.return_hidden_states for req in reqs)
        logprobs = any(req.return_logprob for req in reqs)
        drawing = range(len(reqs))
        if not (hidden_states or logprobs or detect_nan):
            drawing = [i for i, req in enumerate(reqs) if draws(req)]
        if not drawing:
            return None
        biased = any(reqs[i].sampling_params.logit_bias for i in drawing)
        # The release's own notes of a batch are inherited by what is left of it.
        info = replace(
            batch.sampling_info,
            is_all_greedy=all(is_greedy(reqs[i]) for i in drawing),
            logit_bias=batch.sampling_info.logit_bias if biased else None,
        )
        bs = len(reqs)
        return cls(
            info=info,
            reqs=list(reqs),
            rows=batch.req_pool_indices,
            drawing=list(drawing),
            penalties=penalties if any(map(is_penalized, reqs)) else None,
            has_grammar=any(_has_masks(reqs[i]) for i in drawing),
            return_hidden_states=hidden_states,
            return_logprob=logprobs,
            top_logprobs_nums=batch.top_logprobs_nums or [0] * bs,
            token_ids_logprobs=batch.token_ids_logprobs or [None] * bs,
        )

    @property
    def reads_drafts(self) -> bool:
        """Whether the host reads the drafts, for masks and what custom processors find."""
        return self.has_grammar or self.info.has_custom_logit_processor

    def after(self, drafts: torch.Tensor, counts: torch.Tensor | None = None) -> Sampling:
        """The same for a round of these drafts, before the target runs them.

        What the host makes of them it then makes while the target runs.

        Args:
            drafts, counts: as in `DraftsOnHost`.
        """
        return replace(self, drafts=DraftsOnHost(drafts, counts)) if self.reads_drafts else self

    def draw(
        self,
        sampler: Sampler,
        logits: Callable[[slice], LogitsProcessorOutput],
        positions: torch.Tensor,
        width: int,
        drafts: torch.Tensor,
    ) -> tuple[torch.Tensor, LogitsProcessorOutput]:
        """Draws after every row of those that draw, some requests at a time.

        Args:
            logits: gives `next_token_logits` [n, vocabulary] float32 of n rows, to be overwritten.
            positions: [bs * width] int64.
            drafts: [bs, width - 1] int64.

        Returns:
            [len(drawing), width] int64, and the log-probabilities of all rows.
        """
        step = max(1, ROWS_AT_ONCE // width)
        parts = [self.drawing[first : first + step] for first in range(0, len(self.drawing), step)]
        drawn, whole = [], LogitsProcessorOutput(next_token_logits=None)
        for part in parts:
            at, rows = rows_of(part, 1, drafts.device), rows_of(part, width, drafts.device)
            # Logits first: the device makes them while the host fills masks.
            output, info = logits(rows), self.info_of(part, at, drafts, width)
            wanted = (
                self.return_logprob,
                _repeat([self.top_logprobs_nums[i] for i in part], width),
                _repeat([self.token_ids_logprobs[i] for i in part], width),
            )
            drawn.append(_draw(sampler, output, info, *wanted, positions[rows]))
            if self.return_logprob:
                _append(whole, output, len(part) * width)
        if whole.next_token_logprobs is not None:
            whole.next_token_logprobs = whole.next_token_logprobs.view(-1, width)
        return torch.cat(drawn).view(-1, width), whole

    @property
    def alike(self) -> bool:
        """Whether all requests draw, and none asks for more than its parameters and its grammar say."""
        extras = (self.penalties, self.return_hidden_states, self.return_logprob)
        custom = self.info.has_custom_logit_processor
        return len(self.drawing) == len(self.reqs) and not (custom or any(extras))

    def draw_rows(
        self,
        sampler: Sampler,
        logits: Callable[[slice], LogitsProcessorOutput],
        positions: torch.Tensor,
        source: torch.Tensor,
        counts: torch.Tensor,
        drafts: torch.Tensor,
    ) -> torch.Tensor:
        """Draws after some rows of requests that are `alike`.

        Args:
            logits: as in `draw`.
            positions: [bs * width] int64.
            source: [n] int64, which rows of the blocks: the first of each.
            counts: [bs] int64, how many of each.
            drafts: [bs, width - 1] int64.

        Returns:
            [n] int64.
        """
        drawn, masks = [], None
        for first in range(0, len(source), ROWS_AT_ONCE):
            part = slice(first, min(first + ROWS_AT_ONCE, len(source)))
            output, rows = logits(part), source[part]
            if masks is None:  # filled while the device makes logits
                masks = self._masks(range(len(self.reqs)), drafts, counts)
            info = self._info_at(rows // (drafts.shape[1] + 1))
            if masks[0] is not None:
                info = replace(info, vocab_mask=masks[0][part], apply_mask_func=masks[1])
            nobody = False, [0] * len(rows), [None] * len(rows)
            drawn.append(_draw(sampler, output, info, *nobody, positions[rows]))
        return torch.cat(drawn)

    def _masks(
        self,
        part: Sequence[int],
        drafts: torch.Tensor,
        counts: torch.Tensor | None = None,
        width: int | None = None,
    ) -> tuple[torch.Tensor | None, Callable | None]:
        """What grammars allow after verified rows of some requests, and what applies it; none without any.

        Args:
            drafts, counts: of all requests, as in `DraftsOnHost`.
            width: as in `vocabulary_mask`.
        """
        grammars = [self.reqs[i].grammar for i in part] if self.has_grammar else []
        if not any(grammars):
            return None, None
        verified = self._on_host(drafts, counts).verified(part)
        return vocabulary_mask(grammars, verified, self.info.vocab_size, drafts.device, width)

    def _on_host(self, drafts: torch.Tensor, counts: torch.Tensor | None = None) -> DraftsOnHost:
        return self.drafts or DraftsOnHost(drafts, counts)

    def _info_at(self, owners: torch.Tensor) -> SamplingBatchInfo:
        """Parameters of requests ([n] int64), a row each."""

        def of(value: torch.Tensor | None) -> torch.Tensor | None:
            return None if value is None else value[owners]

        return replace(
            self.info,
            **{name: of(getattr(self.info, name)) for name in _BY_REQUEST},
            grammars=None,
            vocab_mask=None,
            apply_mask_func=None,
            penalizer_orchestrator=None,
        )

    def note(self, tokens: torch.Tensor, lengths: torch.Tensor) -> None:
        """After a round that commits the first `lengths` ([bs] int64) of `tokens` ([bs, width] int64)."""
        if self.penalties is not None:
            self.penalties.count(self.rows, tokens, lengths)

    def info_of(
        self, part: list[int], at: slice | torch.Tensor, drafts: torch.Tensor, width: int
    ) -> SamplingBatchInfo:
        """Parameters of some requests, a row for each row of their blocks.

        Args:
            at: the same requests on the device.
            drafts: [bs, width - 1] int64, of all requests.
        """
        info, penalizer = self.info, None
        if any(is_penalized(self.reqs[i]) for i in part):
            penalizer = self.penalties.of(self.rows[at], drafts[at])
        mask, apply_mask = self._masks(part, drafts, width=width)

        def repeated(value: torch.Tensor | None) -> torch.Tensor | None:
            return None if value is None else value[at].repeat_interleave(width, dim=0)

        custom = {}
        if info.has_custom_logit_processor:
            custom = self._custom(part, at, self._on_host(drafts).rows(part), width)
        return replace(
            info,
            **{name: repeated(getattr(info, name)) for name in _BY_REQUEST},
            **custom,
            grammars=[self.reqs[i].grammar for i in part] if self.has_grammar else None,
            vocab_mask=mask,
            apply_mask_func=apply_mask,
            penalizer_orchestrator=penalizer,
        )

    def _custom(
        self, part: list[int], at: slice | torch.Tensor, drafts: list[list[int]], width: int
    ) -> dict[str, Any]:
        """Custom logit processors of some requests, with what each row's would find."""
        processors = {
            key: (processor, chosen[at].repeat_interleave(width))
            for key, (processor, chosen) in self.info.custom_logit_processor.items()
            if chosen[at].any()
        }
        params = [
            _params_after(self.info.custom_params[request], self.reqs[request], row[:i])
            for request, row in zip(part, drafts, strict=True)
            for i in range(width)
        ]
        return {"custom_logit_processor": processors, "custom_params": params}


def _draw(
    sampler: Sampler, output: LogitsProcessorOutput, info: SamplingBatchInfo, *rest: Any
) -> torch.Tensor:
    """A token for each row, [n] int64, `NOT_FINITE` where NaN would choose; `rest` as the sampler takes it."""
    not_finite = take_out(output.next_token_logits)
    info.apply_logits_bias(output.next_token_logits)
    tokens = sampler(output, info, *rest)
    return tokens.to(torch.int64).masked_fill_(not_finite, NOT_FINITE)


def _append(whole: LogitsProcessorOutput, part: LogitsProcessorOutput, rows: int) -> None:
    """Adds the log-probabilities of some rows to those of the rows before.

    Requests that want no top tokens, or none of their own choice, leave theirs empty: rows of one part
    must not take the place of another's.
    """
    mine, more = whole.next_token_logprobs, part.next_token_logprobs
    whole.next_token_logprobs = more if mine is None else torch.cat([mine, more])
    for name in _LISTS:
        more = getattr(part, name)
        setattr(whole, name, (getattr(whole, name) or []) + ([[]] * rows if more is None else more))


def rows_of(requests: list[int], width: int, device: torch.device) -> slice | torch.Tensor:
    """Which rows belong to some requests, each of which has `width`; a slice where they lie side by side."""
    first, last = requests[0], requests[-1]
    if last - first + 1 == len(requests):
        return slice(first * width, (last + 1) * width)
    rows = (torch.tensor(requests)[:, None] * width + torch.arange(width)).flatten()
    return to_device(rows, device)


def draws(req: Req) -> bool:
    """Whether a request asks for another token than the likeliest."""
    return asks_more(req) or needs_history([req])


def asks_more(req: Req) -> bool:
    """Whether a request asks for another token than the likeliest of those that its grammar allows."""
    biased = bool(req.sampling_params.logit_bias) or is_penalized(req)
    return not is_greedy(req) or biased or bool(req.custom_logit_processor)


def is_greedy(req: Req) -> bool:
    """Whether a request takes the likeliest token; what the release makes of temperature 0."""
    return req.sampling_params.top_k <= 1


def needs_history(reqs: Iterable[Req]) -> bool:
    """Whether requests can only be drawn for when all their earlier tokens are on the host.

    The overlapped scheduler then looks at a round's result before it has the draws of the next launched.
    """
    return any(_has_masks(req) or req.custom_logit_processor for req in reqs)


def _has_masks(req: Req) -> bool:
    """Whether what a request's grammar allows is made out for its next draws, not only looked at afterwards."""
    return req.grammar is not None and not getattr(req, "unmasked", False)


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
