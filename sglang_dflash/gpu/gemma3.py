"""Gemma 3's layers in fewer launches while blocks are captured: the release computes its norms and RoPE in steps."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.layernorm import Gemma3RMSNorm
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.models.gemma3_causal import (
    Gemma3Attention,
    Gemma3DecoderLayer,
    Gemma3RotaryEmbedding,
)
from torch import nn

from sglang_dflash.gpu.block_attention import BlockAttention
from sglang_dflash.gpu.kernels.qk_norm_rope_store import qk_norm_rope_store
from sglang_dflash.gpu.kernels.sandwich_norm import norm, norm_add, norm_add_norm


class Angles(tuple):
    """Cosines and sines of rows, [1, rows, head_dim] each, and in the order of a table of RoPE.

    Attributes:
        table: [rows, head_dim], cosines then sines.
        rows: [rows] int64, the table's own.
    """

    table: torch.Tensor
    rows: torch.Tensor

    @classmethod
    def of(cls, cos: torch.Tensor, sin: torch.Tensor) -> Angles:
        angles, half = cls((cos, sin)), cos.shape[-1] // 2
        angles.table = torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=-1)
        angles.rows = torch.arange(cos.shape[1], device=cos.device)
        return angles


class FusedGemma3RotaryEmbedding(Gemma3RotaryEmbedding):
    """What layers share, once a pass."""

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Angles:
        return Angles.of(*super().forward(x, position_ids))


class FusedGemma3Attention(Gemma3Attention):
    """Norms of heads, RoPE and the write of K/V in one launch, for K/V that are stored as they are computed."""

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        position_embeddings: Angles,
        forward_batch: ForwardBatch,
        **more: Any,
    ) -> torch.Tensor:
        pool = forward_batch.token_to_kv_pool
        keys, values = pool.get_kv_buffer(self.attn.layer_id)
        ours = isinstance(forward_batch.attn_backend, BlockAttention)
        if not ours or keys.dtype != hidden_states.dtype:
            return super().forward(
                positions, hidden_states, position_embeddings, forward_batch, **more
            )
        qkv, _ = self.qkv_proj(hidden_states)
        q = qk_norm_rope_store(
            qkv,
            self.q_norm.weight,
            self.k_norm.weight,
            self.q_norm.eps,
            position_embeddings.table,
            position_embeddings.rows,
            forward_batch.out_cache_loc,
            keys,
            values,
            less_one=True,
        )
        output, _ = self.o_proj(self.attn(q, None, None, forward_batch, save_kv_cache=False))
        return output


class FusedGemma3DecoderLayer(Gemma3DecoderLayer):
    """A norm with the sum before it and the norm behind that."""

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        position_embeddings_global: Angles,
        position_embeddings_local: Angles,
        forward_batch: ForwardBatch,
        **more: Any,
    ) -> tuple[torch.Tensor]:
        if not isinstance(forward_batch.attn_backend, BlockAttention):
            return super().forward(
                positions,
                hidden_states,
                position_embeddings_global,
                position_embeddings_local,
                forward_batch,
                **more,
            )
        local, eps = self.self_attn.is_sliding, self.input_layernorm.eps
        x = self.self_attn(
            positions=positions,
            hidden_states=norm(hidden_states, self.input_layernorm.weight, eps),
            position_embeddings=position_embeddings_local if local else position_embeddings_global,
            forward_batch=forward_batch,
            **more,
        )
        outer, inner = self.post_attention_layernorm, self.pre_feedforward_layernorm
        total, x = norm_add_norm(x, hidden_states, outer.weight, inner.weight, eps)
        return (norm_add(self.mlp(x), total, self.post_feedforward_layernorm.weight, eps),)


FUSED = {
    Gemma3Attention: FusedGemma3Attention,
    Gemma3DecoderLayer: FusedGemma3DecoderLayer,
    Gemma3RotaryEmbedding: FusedGemma3RotaryEmbedding,
}


def can_fuse_layers_of_gemma3(model: nn.Module) -> bool:
    """Whether a model has such layers, and all are what the kernels compute."""
    layers = [module for module in model.modules() if type(module) is Gemma3DecoderLayer]
    return bool(layers) and all(map(_can_fuse, layers))


def _can_fuse(layer: Gemma3DecoderLayer) -> bool:
    attention = layer.self_attn
    outer = (
        layer.input_layernorm,
        layer.post_attention_layernorm,
        layer.pre_feedforward_layernorm,
        layer.post_feedforward_layernorm,
    )
    heads, dim = (attention.q_norm, attention.k_norm), attention.head_dim
    return (
        type(attention) is Gemma3Attention
        and all(type(each) is Gemma3RMSNorm for each in (*outer, *heads))
        and len({each.eps for each in outer}) == len({each.eps for each in heads}) == 1
        and dim & (dim - 1) == 0
        and dim == attention.rotary_dim == attention.attn.head_dim == attention.attn.v_head_dim
    )
