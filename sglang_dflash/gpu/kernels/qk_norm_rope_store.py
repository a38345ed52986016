"""QK norm, RoPE, contiguous Q and the KV write of a block, in one launch a layer.

Stands for four launches: norm of Q and K, RoPE, `set_kv_buffer` and the copy of Q out of QKV.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dflash.gpu.kernels.launch import starts_early


@triton.jit
def _norm_rope(x1, x2, weight_ptr, cos, sin, half, eps, HALF: tl.constexpr):
    """Halves of heads, [heads, HALF] float32 each: normed, rounded, rotated."""
    variance = (tl.sum(x1 * x1, axis=1) + tl.sum(x2 * x2, axis=1)) / (2 * HALF)
    scale = tl.rsqrt(variance + eps)[:, None]
    dtype = weight_ptr.dtype.element_ty
    w1 = tl.load(weight_ptr + half).to(tl.float32)[None, :]
    w2 = tl.load(weight_ptr + HALF + half).to(tl.float32)[None, :]
    # Rounded between norm and RoPE, because the kernels that this one stands for are two.
    n1 = (x1 * scale * w1).to(dtype).to(tl.float32)
    n2 = (x2 * scale * w2).to(dtype).to(tl.float32)
    return n1 * cos - n2 * sin, n2 * cos + n1 * sin


@triton.jit
def _qk_norm_rope_store(
    qkv_ptr,
    qkv_stride,
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_sin_ptr,
    positions_ptr,
    slots_ptr,
    eps,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token, group = tl.program_id(0), tl.program_id(1)
    first_head = group * HEADS
    head = tl.arange(0, HEADS)[:, None]
    half = tl.arange(0, HALF)
    offset = head * 2 * HALF + half[None, :]
    source = qkv_ptr + token * qkv_stride + first_head * 2 * HALF + offset
    x1, x2 = tl.load(source), tl.load(source + HALF)
    dtype = x1.dtype

    if first_head >= Q_HEADS + KV_HEADS:
        v_slot = tl.load(slots_ptr + token)
        v_target = (
            v_cache_ptr + (v_slot * KV_HEADS + first_head - Q_HEADS - KV_HEADS) * 2 * HALF + offset
        )
        tl.store(v_target, x1, mask=v_slot != 0)
        tl.store(v_target + HALF, x2, mask=v_slot != 0)
    else:
        angles = cos_sin_ptr + tl.load(positions_ptr + token) * 2 * HALF + half
        cos = tl.load(angles).to(tl.float32)[None, :]
        sin = tl.load(angles + HALF).to(tl.float32)[None, :]
        f1, f2 = x1.to(tl.float32), x2.to(tl.float32)
        if first_head >= Q_HEADS:
            y1, y2 = _norm_rope(f1, f2, k_weight_ptr, cos, sin, half, eps, HALF)
            k_slot = tl.load(slots_ptr + token)
            k_target = k_cache_ptr + (k_slot * KV_HEADS + first_head - Q_HEADS) * 2 * HALF + offset
            tl.store(k_target, y1.to(dtype), mask=k_slot != 0)
            tl.store(k_target + HALF, y2.to(dtype), mask=k_slot != 0)
        else:
            z1, z2 = _norm_rope(f1, f2, q_weight_ptr, cos, sin, half, eps, HALF)
            q_target = q_ptr + (token * Q_HEADS + first_head) * 2 * HALF + offset
            tl.store(q_target, z1.to(dtype))
            tl.store(q_target + HALF, z2.to(dtype))


def qk_norm_rope_store(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> torch.Tensor:
    """Writes K and V of `n` tokens to their slots and returns Q, ready for attention.

    Args:
        qkv: [n, (q_heads + 2 * kv_heads) * head_dim], rows contiguous.
        q_weight, k_weight: [head_dim], norms.
        cos_sin_cache: [positions, head_dim], cosines then sines; all of a head is rotated.
        positions, slots: [n] int64; slot 0 is not written (`clean_slot.py`).
        k_cache, v_cache: [slots, kv_heads, head_dim], written.

    Returns:
        [n, q_heads * head_dim], normed and rotated.
    """
    kv_heads, head_dim = k_cache.shape[1:]
    q_heads = qkv.shape[1] // head_dim - 2 * kv_heads
    heads = next(size for size in (4, 2, 1) if q_heads % size == 0 and kv_heads % size == 0)
    early = starts_early(len(qkv))
    q = qkv.new_empty(len(qkv), q_heads * head_dim)
    _qk_norm_rope_store[(len(qkv), (q_heads + 2 * kv_heads) // heads)](
        qkv,
        qkv.stride(0),
        q,
        k_cache,
        v_cache,
        q_weight,
        k_weight,
        cos_sin_cache,
        positions,
        slots,
        eps,
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        HALF=head_dim // 2,
        HEADS=heads,
        EARLY=early,
        launch_pdl=early,
        num_warps=triton.cdiv(heads * head_dim, 128),
    )
    return q


def qk_norm_rope_store_reference(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> torch.Tensor:
    """What `qk_norm_rope_store` does."""
    kv_heads, head_dim = k_cache.shape[1:]
    heads = qkv.view(len(qkv), -1, head_dim)
    q, k, v = heads.split([heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    cos, sin = cos_sin_cache[positions].float()[:, None, :].chunk(2, dim=-1)

    def norm_rope(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x32 = x.float()
        x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
        first, second = (x32 * weight.float()).to(x.dtype).float().chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(
            x.dtype
        )

    own = slots != 0
    k_cache[slots[own]], v_cache[slots[own]] = norm_rope(k, k_weight)[own], v[own]
    return norm_rope(q, q_weight).flatten(1)
