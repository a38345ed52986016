"""A model as the stages run it: a block in, whatever its forward pass returns out."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner

from sglang_dflash.round.opened import Round


class BlockModel:
    """Runs blocks through a model runner, kernel by kernel."""

    def __init__(self, runner: ModelRunner):
        self.runner = runner

    def run(self, round: Round, tokens: torch.Tensor, capture: CaptureHiddenMode) -> Any:
        """Runs `tokens` ([bs * width] int64) as the block of a round."""
        return self.forward(round.forward_batch(self.runner, tokens, capture))

    def forward(self, batch: ForwardBatch) -> Any:
        set_block_width(self.runner.attn_backend, batch.spec_info.draft_token_num)
        return self.runner.forward(batch).logits_output


def set_block_width(backend: Any, width: int) -> None:
    """Tells an attention backend the width, which the release takes as a constant of the server."""
    for name in ("speculative_num_draft_tokens", "num_draft_tokens"):
        if hasattr(backend, name):
            setattr(backend, name, width)
    for name in ("prefill_backend", "decode_backend", "full_attn_backend"):
        if (inner := getattr(backend, name, None)) is not None:
            set_block_width(inner, width)
