"""What requests take of a round, once its result is on the host."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from sglang_dflash.drawing.not_finite import NOT_FINITE
from sglang_dflash.scheduler.ending import may_end
from sglang_dflash.scheduler.trust import comes_to_nothing, what_counts

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

logger = logging.getLogger(__name__)


@dataclass
class Committed:
    """What a round came to.

    Attributes:
        taken: the tokens that each request took; empty for a round in vain.
        lengths: accept lengths of the requests for which it counted.
        failed: how many requests it ended because of NaN.
        strayed: how many strayed with it.
    """

    taken: list[list[int]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    failed: int = 0
    strayed: int = 0


def commit_round(
    reqs: Sequence[Req],
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    output: LogitsProcessorOutput | None,
) -> Committed:
    """Gives every request of a round its tokens, and what it asked to know of them.

    Requests that finished, were retracted or strayed since the round was launched take nothing: it ran for
    nothing and counts nowhere, so accept lengths are those of the worker that does not overlap. Nor does it count
    for a request that strays with its first token.

    Args:
        tokens: [bs, width] int64, as in `Accepted`.
        lengths: [bs] int64, how many of them are accepted.
        output: log-probabilities and hidden states of the rows, if a request wants any.
    """
    committed = Committed()
    batch = zip(reqs, tokens.tolist(), lengths.tolist(), strict=True)
    for index, (req, row, length) in enumerate(batch):
        if comes_to_nothing(req) or req.finished() or req.is_retracted:
            committed.taken.append([])
            continue
        kept = what_counts(req, row[:length])
        mine = row[: commit_tokens(req, kept)] if kept else []
        if len(kept) < length:
            committed.strayed += 1
            # This round has run the last token that it has: an accepted draft, or the bonus token of the one before.
            req.last_was_draft = True
        if output is not None:
            commit_output(req, mine, output, index * len(row))
        committed.taken.append(mine)
        committed.lengths += [length] * bool(mine)
        committed.failed += NOT_FINITE in mine
    return committed


def commit_tokens(req: Req, tokens: list[int]) -> int:
    """Appends a round's tokens to a request, up to the one that finishes it.

    Args:
        tokens: the accepted tokens, the next bonus token last; at least one.

    Returns:
        How many of them the request took.
    """
    taken = len(tokens)
    if may_end(req, tokens):
        taken = _commit_one_by_one(req, tokens)
    elif req.grammar is not None:
        taken = _commit_to_grammar(req, tokens)
    else:
        req.output_ids += tokens
    req.kv_committed_len += taken
    req.last_was_draft = taken < len(tokens)
    req.spec_verify_ct += 1
    req.spec_accepted_tokens += taken - 1
    req.update_spec_acceptance_histogram(taken - 1)
    return taken


def _commit_one_by_one(req: Req, tokens: list[int]) -> int:
    """Checks each alone, as plain decoding does: a stop token before the length limit must win over the limit, though
    both lie in the same block."""
    taken = 0
    for token in tokens:
        taken += 1
        if token == NOT_FINITE:
            token = end_of(req)
        req.output_ids.append(token)
        req.check_finished()
        if req.grammar is not None:
            _advance_grammar(req, token)
        if req.finished():
            break
    return taken


def _commit_to_grammar(req: Req, tokens: list[int]) -> int:
    """Where nothing but the grammar can end the request; the release looks for that end before it tells the grammar."""
    taken = 0
    for token in tokens:
        taken += 1
        req.output_ids.append(token)
        if req.to_finish is not None or req.grammar.is_terminated():
            req.check_finished()
        _advance_grammar(req, token)
        if req.finished():
            break
    return taken


def rows_run(req: Req, taken: int) -> int:
    """How many rows of a block the prefix cache will have of a request that took so many tokens of it, if it has ended.

    For the worker that waits for every result; of a request that goes on, as many as it took.
    """
    return taken + (req.finished() and req.last_was_draft and _has_slot_left(req))


def count_last_token(req: Req) -> None:
    """Counts the K/V of a finished request's last token as committed, if it is there.

    It is if the token is a draft that was accepted, or if a round that was launched after it, in vain, runs
    it as its bonus token. Plain decoding with overlap always launches such a step; without, never. What is copied to
    the host at once (`host_waits`) must not wait for the rest of that round, which writes draft K/V.
    """
    in_vain = getattr(req, "results_in_flight", 0) > 0 and not getattr(req, "host_waits", False)
    run = getattr(req, "last_was_draft", False) or in_vain
    if req.finished() and run and _has_slot_left(req):
        req.kv_committed_len += 1


def _has_slot_left(req: Req) -> bool:
    return req.kv_committed_len < req.kv_allocated_len


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


def end_of(req: Req) -> int:
    """Makes a request fail at the token that NaN chose; gives the token to append in its place."""
    message = (
        f"The target's logits are NaN after {req.seqlen} tokens of this request, so it has no next token: the "
        "model's weights are damaged, or overflow with this input; try another --dtype."
    )
    if req.to_finish is None:
        req.to_finish = FINISH_ABORT(message, status_code=HTTPStatus.INTERNAL_SERVER_ERROR)
    logger.error("Request %s failed: %s", req.rid, message)
    req.not_finite = True
    return min(req.eos_token_ids or {0})


def end_marked(reqs: Sequence[Req], tokens: list[int]) -> tuple[list[int], int]:
    """First tokens of prefilled requests, those that NaN chose replaced, and how many failed so."""
    failed = [
        token == NOT_FINITE and req.is_chunked <= 0 for req, token in zip(reqs, tokens, strict=True)
    ]
    ended = [
        end_of(req) if fails else max(token, 0)
        for req, token, fails in zip(reqs, tokens, failed, strict=True)
    ]
    return ended, sum(failed)
