"""Target hidden states → the draft model's context K/V.

Every draft layer reads the same feature, so one matrix product gives K and V of all layers, and one
kernel norms, rotates and writes them.
"""

from __future__ import annotations

import torch
from sglang.srt.model_executor.model_runner import ModelRunner

from sglang_dflash.clean_slot import without_slotless
from sglang_dflash.gpu.kernels.context_store import context_store
from sglang_dflash.gpu.rope_table import is_table


def write_context(
    draft: ModelRunner, hidden_states: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
) -> None:
    """Writes context K/V for `n` tokens to the draft pool.

    Args:
        hidden_states: [n, taps * target_hidden], as the target captured them.
        positions: [n] int64.
        slots: [n] int64, the tokens' KV slots; a token without one (0) is not written.
    """
    model, pool = draft.model, draft.token_to_kv_pool
    attention = model.layers[0].self_attn
    kv = model.context_kv(hidden_states)
    eps, cos_sin_cache = model.draft.rms_norm_eps, attention.rotary_emb.cos_sin_cache
    if _can_store(draft, kv):
        context_store(
            kv,
            model.k_norm_weight,
            eps,
            cos_sin_cache,
            positions,
            slots,
            pool.k_data_ptrs,
            pool.v_data_ptrs,
            attention.num_kv_heads,
        )
        return
    keys, values = context_kv(
        kv,
        model.k_norm_weight,
        eps,
        cos_sin_cache[positions],
        attention.num_kv_heads,
        len(model.layers),
    )
    for layer, k, v in zip(model.layers, keys, values, strict=True):
        pool.set_kv_buffer(layer.attn, slots, *without_slotless(slots, k, v))


def _can_store(draft: ModelRunner, kv: torch.Tensor) -> bool:
    """Whether the kernel covers this draft model and its pool."""
    model = draft.model
    attention = model.layers[0].self_attn
    rope = attention.rotary_emb
    powers = (attention.num_kv_heads, attention.head_dim)
    return (
        kv.is_cuda
        and is_table(rope)
        and rope.rotary_dim == attention.head_dim
        and all(n & (n - 1) == 0 for n in powers)
        and draft.token_to_kv_pool.store_dtype == kv.dtype
        and hasattr(draft.token_to_kv_pool, "k_data_ptrs")
    )


def rms_norm_heads(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension, computed in float32.

    Args:
        x: [layers, n, heads, head_dim].
        weight: [layers, head_dim], a norm for each layer.
    """
    x32 = x.float()
    x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (x32 * weight[:, None, None, :].float()).to(x.dtype)


def rotate(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """RoPE with the halves of a head paired (NeoX style), computed in float32.

    Args:
        x: [..., n, heads, head_dim].
        cos_sin: [n, rotary_dim], cosines then sines; dimensions beyond rotary_dim pass through.
    """
    rotary_dim = cos_sin.shape[-1]
    cos, sin = cos_sin.float()[:, None, :].chunk(2, dim=-1)
    first, second = x[..., :rotary_dim].float().chunk(2, dim=-1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([rotated.to(x.dtype), x[..., rotary_dim:]], dim=-1)


def context_kv(
    kv: torch.Tensor,
    k_norm_weight: torch.Tensor | None,
    eps: float,
    cos_sin: torch.Tensor,
    kv_heads: int,
    layers: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of all draft layers for `n` context tokens, as they are stored.

    Args:
        kv: [n, layers * 2 * kv_heads * head_dim], K then V of each layer.
        k_norm_weight: [layers, head_dim], or None where keys are not normed.
        cos_sin: [n, rotary_dim] at the tokens' positions.

    Returns:
        K (normed and rotated) and V, [layers, n, kv_heads, head_dim] each, contiguous.
    """
    head_dim = kv.shape[1] // (layers * 2 * kv_heads)
    k, v = kv.view(len(kv), layers, 2, kv_heads, head_dim).permute(2, 1, 0, 3, 4)
    if k_norm_weight is not None:
        k = rms_norm_heads(k, k_norm_weight, eps)
    return rotate(k, cos_sin).contiguous(), v.contiguous()
