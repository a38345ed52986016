"""Stage 1: bonus token and draft KV → draft tokens, in one pass of the draft model."""

from __future__ import annotations

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

from sglang_dflash.round.block_model import BlockModel
from sglang_dflash.round.opened import Round


def block_tokens(bonus_tokens: torch.Tensor, mask_token_id: int, width: int) -> torch.Tensor:
    """[bonus, mask, mask, …] for each request: [bs] int64 → [bs * width] int64."""
    tokens = bonus_tokens.new_full((len(bonus_tokens), width), mask_token_id)
    tokens[:, 0] = bonus_tokens
    return tokens.flatten()


def propose(draft: BlockModel, round: Round) -> torch.Tensor:
    """Draft tokens of a round: [bs, width - 1] int64.

    Writes K/V of the block to the round's slots of the draft pool. They are scratch: the next round
    overwrites all it does not commit before anything reads them.
    """
    tokens = round.tokens
    if tokens is None:
        tokens = block_tokens(round.bonus_tokens, draft.runner.model.mask_token_id, round.width)
    # The draft model's head is inside its forward pass, so what it returns are tokens.
    return draft.run(round, tokens, CaptureHiddenMode.NULL)
