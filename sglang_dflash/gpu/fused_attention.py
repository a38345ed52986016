"""The attention layer of a block with its small kernels fused, for the draft model and for targets."""

from __future__ import annotations

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
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

    Args:
        positions: [rows] int64.
        qkv: [rows, (heads + 2 * kv_heads) * head_dim].

    Returns:
        [rows, heads * head_dim].
    """
    keys, values = forward_batch.token_to_kv_pool.get_kv_buffer(attention.attn.layer_id)
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
