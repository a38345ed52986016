"""What results that are in flight mean for requests, and when a round may end one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from sglang_dflash.drawing.sampling import needs_history
from sglang_dflash.round.state import end_tokens
from sglang_dflash.scheduler.trust import may_stray

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch


def leave_out_ending(batch: ScheduleBatch) -> None:
    """Takes requests that end with what is in flight out of the next decode batch: a round would be in vain.

    For a scheduler that overlaps, while a result is pending.
    """
    keep = [i for i, req in enumerate(batch.reqs) if not ends_in_flight(req)]
    if len(keep) < len(batch.reqs):
        batch.filter_batch(keep_indices=keep)
        batch.batch_is_full = False


def ends_in_flight(req: Req) -> bool:
    """Whether a request has finished, or will with a result that is pending.

    Its limit is then reached even if the round accepts no draft, or its client has gone.
    """
    # A prefill gives one token, and a round at least one, unless its request strays.
    tokens = 0 if may_stray(req) else getattr(req, "results_in_flight", 0)
    limit = req.sampling_params.max_new_tokens
    ending = req.to_finish is not None or len(req.output_ids) + tokens >= limit
    return req.finished() or bool(tokens and ending)


def waits_for_history(reqs: Iterable[Req]) -> bool:
    """Whether one of some requests can only be drawn for when a result of its own has come that is in flight."""
    return needs_history(req for req in reqs if getattr(req, "results_in_flight", 0))


def may_end(req: Req, tokens: Sequence[int]) -> bool:
    """Whether a request may end with one of a round's tokens, which then have to be looked at one by one.

    Each costs the host some microseconds, and with stop strings a call of the tokenizer. Where this says no, none of
    them would have ended it, unless its grammar does.
    """
    params = req.sampling_params
    if req.to_finish is not None or params.stop_regex_strs:
        return True
    if len(req.output_ids) + len(tokens) >= params.max_new_tokens:
        return True
    if min(tokens) < 0 or max(tokens) > req.vocab_size:
        return True
    if not end_tokens(req).isdisjoint(tokens):
        return True
    return bool(params.stop_strs) and _may_have_stop_string(req, tokens)


def _may_have_stop_string(req: Req, tokens: Sequence[int]) -> bool:
    """Of all texts in which the release would look after each of the tokens, the one that holds them all."""
    seen = req.sampling_params.stop_str_max_len + 1
    text = req.tokenizer.decode([*req.output_ids[-seen:], *tokens])
    # What a character's first bytes alone are shown as is in none of the longer texts.
    return any(
        stop in text or stop in req.decoded_text or "\ufffd" in stop
        for stop in req.sampling_params.stop_strs
    )
