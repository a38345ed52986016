"""Requests that end with what is in flight, whatever that accepts: another round for them would be in vain."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch


def leave_out_ending(batch: ScheduleBatch) -> None:
    """Takes such requests out of the next decode batch; the result in flight ends them.

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
    # A prefill gives one token, and so does a round at least.
    tokens = getattr(req, "rounds_in_flight", 0) or (not req.output_ids)
    limit = req.sampling_params.max_new_tokens
    ending = req.to_finish is not None or len(req.output_ids) + tokens >= limit
    return req.finished() or bool(tokens and ending)
