"""Stage 4: accepted rows become context and output; the rest of the round rolls back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.model_executor.model_runner import ModelRunner

from sglang_dflash.context_kv import write_context
from sglang_dflash.round import Round
from sglang_dflash.verify import Verified

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


def commit_context(draft: ModelRunner, round: Round, verified: Verified) -> None:
    """Turns the verified rows into the draft model's context.

    All rows are written, rejected ones too: the shape is then known before the result is, and what
    lies beyond the committed length is scratch that the next round's block overwrites.
    """
    write_context(draft, verified.hidden_states, round.positions, round.slots)


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
        req.output_ids.append(token)
        taken += 1
        req.check_finished()
        if req.finished():
            break
    req.kv_committed_len += taken
    req.spec_verify_ct += 1
    req.spec_accepted_tokens += taken - 1
    req.update_spec_acceptance_histogram(taken - 1)
    return taken
