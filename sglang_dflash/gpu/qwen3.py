"""Qwen3's attention in fewer launches while blocks are captured, where its layers cannot be fused whole.

Prefill and whatever else the release runs stay as they are: only a block whose attention is ours takes the
other way.
"""

from __future__ import annotations

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.models.qwen3 import Qwen3Attention
from torch import nn

from sglang_dflash.gpu.block_attention import BlockAttention
from sglang_dflash.gpu.fused_attention import can_fuse, fused_attention


class FusedQwen3Attention(Qwen3Attention):
    """Qwen3's attention layer, fused in captured blocks."""

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        if isinstance(forward_batch.attn_backend, BlockAttention):
            return fused_attention(self, positions, hidden_states, forward_batch)
        return super().forward(positions, hidden_states, forward_batch)


def fuse_attention(model: nn.Module) -> int:
    """Makes the attention layers of a model fused ones, in place; how many there are."""
    layers = [m for m in model.modules() if type(m) is Qwen3Attention and can_fuse(m)]
    for layer in layers:
        layer.__class__ = FusedQwen3Attention  # the same weights under the same names
    return len(layers)


def unfuse_attention(model: nn.Module) -> None:
    """Makes them again what they were."""
    for module in model.modules():
        if type(module) is FusedQwen3Attention:
            module.__class__ = Qwen3Attention
