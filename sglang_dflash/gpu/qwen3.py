"""Qwen3 targets in few launches while blocks are captured.

Prefill and whatever else the release runs stay as they are: only a block whose attention is ours takes the
other way.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.models.qwen3 import Qwen3Attention, Qwen3DecoderLayer, Qwen3Model
from torch import nn

from sglang_dflash.gpu.block_attention import BlockAttention
from sglang_dflash.gpu.fused_attention import can_fuse, fused_attention
from sglang_dflash.gpu.fused_layers import can_fuse_layers, run_layers

# Token ids, positions, batch → hidden states [rows, hidden] and those of the tapped layers.
Body = Callable[[torch.Tensor, torch.Tensor, ForwardBatch], tuple[torch.Tensor, list[torch.Tensor]]]


def fused_body(model: nn.Module) -> Body | None:
    """All of a Qwen3 target but its head, its layers fused; None where they cannot be."""
    body = getattr(model, "model", None)
    whole = type(body) is Qwen3Model and body.pp_group.world_size == 1
    if not whole or not all(type(layer) is Qwen3DecoderLayer for layer in body.layers):
        return None
    if not can_fuse_layers(body.layers):
        return None

    def run(ids: torch.Tensor, positions: torch.Tensor, batch: ForwardBatch):
        x = body.embed_tokens(ids)
        return run_layers(body.layers, body.norm, x, positions, batch, body.layers_to_capture)

    return run


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
