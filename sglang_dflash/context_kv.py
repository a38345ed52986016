"""Target hidden states → the draft model's context K/V.

Every draft layer reads the same feature, so one matrix product gives K and V of all layers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sglang.srt.model_executor.model_runner import ModelRunner


def write_context(
    draft: ModelRunner, hidden_states: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
) -> None:
    """Writes context K/V for `n` tokens to the draft pool.

    Args:
        hidden_states: [n, taps * target_hidden], as the target captured them.
        positions: [n] int64.
        slots: [n] int64, the tokens' KV slots (0: written nowhere that is read).
    """
    keys, values = draft.model.context_kv(hidden_states, positions)
    for layer, k, v in zip(draft.model.layers, keys, values):
        draft.token_to_kv_pool.set_kv_buffer(layer.attn, slots, k, v)


def rms_norm_heads(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension, computed in float32.

    Args:
        x: [layers, n, heads, head_dim].
        weight: [layers, head_dim], a norm for each layer.
    """
    x32 = x.float()
    x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return x32.to(x.dtype) * weight[:, None, None, :]


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
    features: torch.Tensor,
    kv_weight: torch.Tensor,
    k_norm_weight: torch.Tensor,
    eps: float,
    cos_sin: torch.Tensor,
    kv_heads: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of all draft layers for `n` context tokens.

    Args:
        features: [n, hidden], the normed projection of the target's hidden states.
        kv_weight: [layers * 2 * kv_heads * head_dim, hidden], K then V of each layer.
        k_norm_weight: [layers, head_dim].
        cos_sin: [n, rotary_dim] at the tokens' positions.

    Returns:
        K (normed and rotated) and V, [layers, n, kv_heads, head_dim] each, contiguous.
    """
    layers, head_dim = k_norm_weight.shape
    kv = F.linear(features, kv_weight).view(len(features), layers, 2, kv_heads, head_dim)
    k, v = kv.permute(2, 1, 0, 3, 4)  # [layers, n, kv_heads, head_dim] each
    k = rotate(rms_norm_heads(k, k_norm_weight, eps), cos_sin)
    return k.contiguous(), v.contiguous()
