"""Stage 4: accepted rows become context and output; the rest of the round rolls back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.model_executor.model_runner import ModelRunner

from sglang_dflash.drafter.context_kv import write_context
from sglang_dflash.drawing.not_finite import NOT_FINITE, end_of
from sglang_dflash.round.opened import Round
from sglang_dflash.round.verify import Verified
from sglang_dflash.serving.acceptance_watch import watch
from sglang_dflash.serving.metrics import metrics

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


def commit_context(draft: ModelRunner, round: Round, verified: Verified) -> None:
    """Turns the verified rows into the draft model's context.

    All rows are written, rejected ones too: the shape is then known before the result is, and what
    lies beyond the committed length is scratch that the next round's block overwrites.
    """
    write_context(draft, verified.hidden_states, round.positions, round.slots)


def commit_round(
    reqs: Sequence[Req],
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    output: LogitsProcessorOutput | None,
) -> list[list[int]]:
    """Gives every request of a round its tokens, and what it asked to know of them.

    Requests that finished or were retracted since the round was launched take nothing: it ran for
    nothing and counts nowhere, so accept lengths are those of the worker that does not overlap.

    Args:
        tokens: [bs, width] int64, as in `Accepted`.
        lengths: [bs] int64, how many of them are accepted.
        output: log-probabilities and hidden states of the rows, if a request wants any.

    Returns:
        The tokens that each request took; empty for a round in vain.
    """
    taken: list[list[int]] = []
    counted: list[int] = []
    batch = zip(reqs, tokens.tolist(), lengths.tolist(), strict=True)
    for index, (req, row, length) in enumerate(batch):
        in_vain = req.finished() or req.is_retracted
        taken.append([] if in_vain else row[: commit_tokens(req, row[:length])])
        if output is not None and not in_vain:
            commit_output(req, taken[-1], output, index * len(row))
        counted += [] if in_vain else [length]
    watch.note(counted)
    metrics.rounds.committed(tokens.shape[1], [len(each) for each in taken if each])
    return taken


def commit_tokens(req: Req, tokens: list[int]) -> int:
    """Appends a round's tokens to a request, up to the one that finishes it.

    Each is checked alone, as plain decoding does: a stop token before the length limit must win
    over the limit, though both lie in the same block.

    Args:
        tokens: the accepted tokens, the next bonus token last; at least one.

    Returns:
        How many of them the request took.
    """
    taken = 0
    for token in tokens:
        if token == NOT_FINITE:
            token = end_of(req)
        req.output_ids.append(token)
        taken += 1
        req.check_finished()
        if req.grammar is not None:
            _advance_grammar(req, token)
        if req.finished():
            break
    req.kv_committed_len += taken
    req.spec_verify_ct += 1
    req.spec_accepted_tokens += taken - 1
    req.update_spec_acceptance_histogram(taken - 1)
    return taken


def commit_output(
    req: Req, tokens: list[int], output: LogitsProcessorOutput, first_row: int
) -> None:
    """Appends what a request wants to know of `tokens`, which are those after `first_row` and on.

    In the form in which SGLang keeps it for a step of plain decoding.
    """
    rows = range(first_row, first_row + len(tokens))
    if req.return_logprob:
        req.output_token_logprobs_val += output.next_token_logprobs.flatten()[
            first_row : rows.stop
        ].tolist()
        req.output_token_logprobs_idx += tokens
        if req.top_logprobs_num > 0:
            values, ids = output.next_token_top_logprobs_val, output.next_token_top_logprobs_idx
            req.output_top_logprobs_val += [values[row].tolist() for row in rows]
            req.output_top_logprobs_idx += [ids[row].tolist() for row in rows]
        if req.token_ids_logprob is not None:
            values = output.next_token_token_ids_logprobs_val
            ids = output.next_token_token_ids_logprobs_idx
            req.output_token_ids_logprobs_val += [values[row].tolist() for row in rows]
            req.output_token_ids_logprobs_idx += [ids[row] for row in rows]
    if req.return_hidden_states:
        req.hidden_states += output.hidden_states[first_row : rows.stop].tolist()


def _advance_grammar(req: Req, token: int) -> None:
    """After the check for an end, as in plain decoding, where a grammar's end shows a token later."""
    try:
        req.grammar.accept_token(token)
    except ValueError as error:
        req.to_finish = FINISH_ABORT(f"The grammar does not accept token {token}: {error}")
    req.grammar.finished = req.finished()
