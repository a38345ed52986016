"""Stage 1: bonus token and draft KV → draft tokens, in one pass of the draft model."""

from __future__ import annotations

from typing import NamedTuple

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

from sglang_dflash.round.block_model import BlockModel
from sglang_dflash.round.opened import Round


def block_tokens(bonus_tokens: torch.Tensor, mask_token_id: int, width: int) -> torch.Tensor:
    """[bonus, mask, mask, …] for each request: [bs] int64 → [bs * width] int64."""
    tokens = bonus_tokens.new_full((len(bonus_tokens), width), mask_token_id)
    tokens[:, 0] = bonus_tokens
    return tokens.flatten()


class Drafts(NamedTuple):
    """What the draft model proposes.

    Attributes:
        tokens: [bs, width - 1] int64.
        log_odds: [bs, width - 1] float32, that each is the token, as the draft model says; None if nobody asks.
    """

    tokens: torch.Tensor
    log_odds: torch.Tensor | None = None


def propose(draft: BlockModel, round: Round) -> Drafts:
    """Drafts of a round; none, and nothing runs, if its blocks are no more than the bonus token.

    Writes K/V of the block to the round's slots of the draft pool. They are scratch: the next round
    overwrites all it does not commit before anything reads them.
    """
    if round.width == 1:
        return Drafts(round.bonus_tokens.new_empty(len(round.rows), 0))
    tokens = round.tokens
    if tokens is None:
        tokens = block_tokens(round.bonus_tokens, draft.runner.model.mask_token_id, round.width)
    # The draft model's head is inside its forward pass, so what it returns are tokens.
    made = draft.run(round, tokens, CaptureHiddenMode.NULL)
    return Drafts(*made) if isinstance(made, tuple) else Drafts(made)
