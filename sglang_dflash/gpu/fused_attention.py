"""The attention layer of a block with its small kernels fused, for the draft model and for targets."""

from __future__ import annotations

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.models.utils import apply_qk_norm
from torch import nn

from sglang_dflash.gpu.kernels.qk_norm_rope_store import qk_norm_rope_store
from sglang_dflash.gpu.rope_table import is_table


def can_fuse(attention: nn.Module) -> bool:
    """Whether an attention layer is what the kernel computes: QK norm, then RoPE over whole heads."""
    rope = getattr(attention, "rotary_emb", None)
    if getattr(attention, "q_norm", None) is None or not is_table(rope):
        return False
    sight = getattr(attention, "sight", None)  # of a draft layer
    return (
        rope.rotary_dim == rope.head_size
        and rope.head_size & (rope.head_size - 1) == 0
        and attention.q_norm.variance_epsilon == attention.k_norm.variance_epsilon
        and attention.attn.head_dim == attention.attn.v_head_dim
        and (sight is None or sight.window is None)
    )


def fused_attention(
    attention: nn.Module, positions: torch.Tensor, x: torch.Tensor, forward_batch: ForwardBatch
) -> torch.Tensor:
    """[rows, hidden] → [rows, hidden], K/V of the rows written to their slots on the way."""
    qkv, _ = attention.qkv_proj(x)
    q = norm_rope_store(attention, positions, qkv, forward_batch)
    output, _ = attention.o_proj(attention.attn(q, None, None, forward_batch, save_kv_cache=False))
    return output


def norm_rope_store(
    attention: nn.Module, positions: torch.Tensor, qkv: torch.Tensor, forward_batch: ForwardBatch
) -> torch.Tensor:
    """Q of a block, ready for attention; K/V of its rows are written to their slots.

    One kernel where K/V are stored as they are computed. FP8 is rounded by the pool, with the layer's scales, as
    it is in plain decoding.

    Args:
        positions: [rows] int64.
        qkv: [rows, (heads + 2 * kv_heads) * head_dim].

    Returns:
        [rows, heads * head_dim].
    """
    layer, pool = attention.attn, forward_batch.token_to_kv_pool
    keys, values = pool.get_kv_buffer(layer.layer_id)
    if keys.dtype != qkv.dtype:
        size = keys.shape[1] * keys.shape[2]
        q, k, v = qkv.split([qkv.shape[1] - 2 * size, size, size], dim=-1)
        q, k = apply_qk_norm(q, k, attention.q_norm, attention.k_norm, layer.head_dim)
        q, k = attention.rotary_emb(positions, q, k)
        k, v = (x.reshape(-1, *keys.shape[1:]) for x in (k, v))
        pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v, layer.k_scale, layer.v_scale)
        return q
    return qk_norm_rope_store(
        qkv,
        attention.q_norm.weight,
        attention.k_norm.weight,
        attention.q_norm.variance_epsilon,
        attention.rotary_emb.cos_sin_cache,
        positions,
        forward_batch.out_cache_loc,
        keys,
        values,
    )
