"""Stage 2: [bonus, drafts] → the target's hidden states and taps for every row."""

from __future__ import annotations

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

from sglang_dflash.round.block_model import BlockModel
from sglang_dflash.round.opened import Round
from sglang_dflash.round.target import TargetRows


def verify(target: BlockModel, round: Round, draft_tokens: torch.Tensor) -> TargetRows:
    """Runs the target over the blocks, causally.

    Args:
        draft_tokens: [bs, width - 1] int64.

    Writes the target's K/V of every row to the round's slots.
    """
    tokens = torch.cat([round.bonus_tokens[:, None], draft_tokens], dim=1).flatten()
    return target.run(round, tokens, CaptureHiddenMode.FULL)
