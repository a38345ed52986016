"""The attention layer of a block with its small kernels fused, for the draft model and for targets."""

from __future__ import annotations

import torch
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.models.utils import apply_qk_norm
from torch import nn

from sglang_dflash.gpu.kernels.qk_norm_rope_store import qk_norm_rope_store
from sglang_dflash.gpu.rope_table import is_table


def can_fuse(attention: nn.Module) -> bool:
    """Whether an attention layer is what the kernel computes: QK norm or none, then RoPE over whole heads."""
    rope = getattr(attention, "rotary_emb", None)
    if not is_table(rope):
        return False
    q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    sight = getattr(attention, "sight", None)  # of a draft layer
    head_dim = attention.attn.head_dim
    return (
        _normed_alike(q_norm, k_norm, head_dim)
        and rope.rotary_dim == rope.head_size == head_dim == attention.attn.v_head_dim
        and head_dim & (head_dim - 1) == 0
        and (sight is None or sight.window is None)
    )


def _normed_alike(q_norm: nn.Module | None, k_norm: nn.Module | None, head_dim: int) -> bool:
    """Whether both are norms of a head, with one epsilon, or neither is there."""
    if q_norm is None or k_norm is None:
        return q_norm is k_norm
    return (
        is_plain_norm(q_norm)
        and is_plain_norm(k_norm)
        and q_norm.weight.shape == k_norm.weight.shape == (head_dim,)
        and q_norm.variance_epsilon == k_norm.variance_epsilon
    )


def is_plain_norm(norm: nn.Module) -> bool:
    """Whether it is RMSNorm over whole rows, rounded once."""
    return (
        type(norm) is RMSNorm
        and norm.variance_size_override is None
        and not norm.cast_x_before_out_mul
        and not norm.fp32_residual
    )


def fused_attention(
    attention: nn.Module, positions: torch.Tensor, x: torch.Tensor, forward_batch: ForwardBatch
) -> torch.Tensor:
    """[rows, hidden] → [rows, hidden], K/V of the rows written to their slots on the way."""
    qkv, _ = attention.qkv_proj(x)
    q = norm_rope_store(attention, positions, qkv, x.dtype, forward_batch)
    output, _ = attention.o_proj(attention.attn(q, None, None, forward_batch, save_kv_cache=False))
    return output


def norm_rope_store(
    attention: nn.Module,
    positions: torch.Tensor,
    qkv: torch.Tensor,
    dtype: torch.dtype,
    forward_batch: ForwardBatch,
) -> torch.Tensor:
    """Q of a block, ready for attention; K/V of its rows are written to their slots.

    One kernel where K/V are stored as they are computed. FP8 is rounded by the pool, with the layer's scales, as
    it is in plain decoding.

    Args:
        positions: [rows] int64.
        qkv: [rows, (heads + 2 * kv_heads) * head_dim], or the parts of it, [parts, rows, ...] float32.
        dtype: of the model.

    Returns:
        [rows, heads * head_dim] of that dtype.
    """
    keys, values = forward_batch.token_to_kv_pool.get_kv_buffer(attention.attn.layer_id)
    if keys.dtype != dtype:
        whole = qkv.sum(0).to(dtype) if qkv.dim() == 3 else qkv
        return _norm_rope_store_by_pool(attention, positions, whole, forward_batch)
    q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    return qk_norm_rope_store(
        qkv,
        None if q_norm is None else q_norm.weight,
        None if k_norm is None else k_norm.weight,
        0.0 if q_norm is None else q_norm.variance_epsilon,
        attention.rotary_emb.cos_sin_cache,
        positions,
        forward_batch.out_cache_loc,
        keys,
        values,
    )


def _norm_rope_store_by_pool(
    attention: nn.Module, positions: torch.Tensor, qkv: torch.Tensor, forward_batch: ForwardBatch
) -> torch.Tensor:
    """`norm_rope_store` in the release's own steps."""
    layer, pool = attention.attn, forward_batch.token_to_kv_pool
    size = layer.tp_k_head_num * layer.head_dim
    q, k, v = qkv.split([qkv.shape[1] - 2 * size, size, size], dim=-1)
    if getattr(attention, "q_norm", None) is not None:
        q, k = apply_qk_norm(q, k, attention.q_norm, attention.k_norm, layer.head_dim)
    q, k = attention.rotary_emb(positions, q, k)
    k, v = (x.reshape(-1, layer.tp_k_head_num, layer.head_dim) for x in (k, v))
    pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v, layer.k_scale, layer.v_scale)
    return q
