"""Stage 1: bonus token and draft KV → draft tokens, in one pass of the draft model."""

from __future__ import annotations

import torch

from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.model_executor.model_runner import ModelRunner

from sglang_dflash.round import Round


def block_tokens(bonus_tokens: torch.Tensor, mask_token_id: int, width: int) -> torch.Tensor:
    """[bonus, mask, mask, …] for each request: [bs] int64 → [bs * width] int64."""
    tokens = bonus_tokens.new_full((len(bonus_tokens), width), mask_token_id)
    tokens[:, 0] = bonus_tokens
    return tokens.flatten()


def propose(draft: ModelRunner, round: Round) -> torch.Tensor:
    """Draft tokens of a round: [bs, width - 1] int64.

    Writes K/V of the block to the round's slots of the draft pool. They are scratch: the next round
    overwrites all it does not commit before anything reads them.
    """
    tokens = block_tokens(round.bonus_tokens, draft.model.mask_token_id, round.width)
    forward_batch = round.forward_batch(draft, tokens, CaptureHiddenMode.NULL)
    # The draft model's head is inside its forward pass, so what it returns are tokens.
    return draft.forward(forward_batch).logits_output
