"""The four stages of a round, one after the other."""

from __future__ import annotations

from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from sglang_dflash.drawing.sampling import Sampling
from sglang_dflash.round.accept import Accepted, accept_round
from sglang_dflash.round.block_model import BlockModel
from sglang_dflash.round.commit import commit_context
from sglang_dflash.round.opened import Round
from sglang_dflash.round.parts import Parts
from sglang_dflash.round.propose import propose
from sglang_dflash.round.verify import verify


def run_stages(
    parts: Parts,
    round: Round,
    draft: BlockModel,
    target: BlockModel,
    sampling: Sampling | None = None,
) -> tuple[Accepted, LogitsProcessorOutput | None]:
    """propose → verify → accept → commit, without a wait between them.

    Args:
        draft, target: the models of `parts` as this round runs them.
        sampling: how to draw; None for the likeliest tokens.

    Returns:
        What the round commits; log-probabilities and hidden states, if `sampling` asks for any.
    """
    draft_tokens = propose(draft, round)
    verified = verify(target, parts.vocabulary, round, draft_tokens, sampling)
    accepted = accept_round(verified.tokens, draft_tokens, round.rows, parts.state)
    commit_context(draft.runner, round, verified)
    return accepted, verified.output
