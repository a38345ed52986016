"""Qwen3's attention in fewer launches while blocks are captured."""

from __future__ import annotations

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.models.qwen3 import Qwen3Attention

from sglang_dflash.gpu.block_attention import BlockAttention
from sglang_dflash.gpu.fused_attention import fused_attention


class FusedQwen3Attention(Qwen3Attention):
    """Qwen3's attention layer, fused in captured blocks."""

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        if isinstance(forward_batch.attn_backend, BlockAttention):
            return fused_attention(self, positions, hidden_states, forward_batch)
        return super().forward(positions, hidden_states, forward_batch)
