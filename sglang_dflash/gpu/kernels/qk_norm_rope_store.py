"""QK norm (where a model has it), RoPE, contiguous Q and the KV write of a block, in one launch a layer.

Stands for four launches: norm of Q and K, RoPE, `set_kv_buffer` and the copy of Q out of QKV; and for
the sum of a split matrix product.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dflash.gpu.kernels.launch import starts_early


@triton.jit
def _whole(source, part_size, q_ptr, PARTS: tl.constexpr):
    """Elements of QKV, their parts added."""
    x = tl.load(source)
    for part in tl.static_range(1, PARTS):
        x += tl.load(source + part * part_size)
    return x.to(q_ptr.dtype.element_ty)  # rounded as a whole product would be


@triton.jit
def _norm_rope(
    x1,
    x2,
    weight_ptr,
    cos,
    sin,
    half,
    eps,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
    LESS: tl.constexpr,
):
    """Halves of heads, [heads, HALF] each: normed, rounded, rotated; float32."""
    dtype = x1.dtype
    n1, n2 = x1.to(tl.float32), x2.to(tl.float32)
    if NORM:
        variance = (tl.sum(n1 * n1, axis=1) + tl.sum(n2 * n2, axis=1)) / (2 * HALF)
        scale = tl.rsqrt(variance + eps)[:, None]
        w1 = LESS + tl.load(weight_ptr + half).to(tl.float32)[None, :]
        w2 = LESS + tl.load(weight_ptr + HALF + half).to(tl.float32)[None, :]
        # Rounded between norm and RoPE, because the kernels that this one stands for are two.
        n1 = (n1 * scale * w1).to(dtype).to(tl.float32)
        n2 = (n2 * scale * w2).to(dtype).to(tl.float32)
    return n1 * cos - n2 * sin, n2 * cos + n1 * sin


@triton.jit
def _qk_norm_rope_store(
    qkv_ptr,
    qkv_stride,
    part_size,
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
    PARTS: tl.constexpr,
    NORM: tl.constexpr,
    LESS: tl.constexpr,
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
    x1 = _whole(source, part_size, q_ptr, PARTS)
    x2 = _whole(source + HALF, part_size, q_ptr, PARTS)
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
        if first_head >= Q_HEADS:
            y1, y2 = _norm_rope(x1, x2, k_weight_ptr, cos, sin, half, eps, HALF, NORM, LESS)
            k_slot = tl.load(slots_ptr + token)
            k_target = k_cache_ptr + (k_slot * KV_HEADS + first_head - Q_HEADS) * 2 * HALF + offset
            tl.store(k_target, y1.to(dtype), mask=k_slot != 0)
            tl.store(k_target + HALF, y2.to(dtype), mask=k_slot != 0)
        else:
            z1, z2 = _norm_rope(x1, x2, q_weight_ptr, cos, sin, half, eps, HALF, NORM, LESS)
            q_target = q_ptr + (token * Q_HEADS + first_head) * 2 * HALF + offset
            tl.store(q_target, z1.to(dtype))
            tl.store(q_target + HALF, z2.to(dtype))


def qk_norm_rope_store(
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    less_one: bool = False,
) -> torch.Tensor:
    """Writes K and V of `n` tokens to their slots and returns Q, ready for attention.

    Args:
        qkv: [n, (q_heads + 2 * kv_heads) * head_dim], rows contiguous; or the parts of it,
            [parts, n, ...] float32, contiguous.
        q_weight, k_weight: [head_dim], norms; both None where heads are not normed.
        cos_sin_cache: [positions, head_dim], cosines then sines; all of a head is rotated.
        positions, slots: [n] int64; slot 0 is not written (`clean_slot.py`).
        k_cache, v_cache: [slots, kv_heads, head_dim], written; head_dim is a power of two.
        less_one: whether weights of norms are stored less one.

    Returns:
        [n, q_heads * head_dim] of the dtype of the caches, normed and rotated.
    """
    kv_heads, head_dim = k_cache.shape[1:]
    n, size = qkv.shape[-2:]
    q_heads = size // head_dim - 2 * kv_heads
    heads = next(many for many in (4, 2, 1) if q_heads % many == 0 and kv_heads % many == 0)
    early = starts_early(n)
    q = k_cache.new_empty(n, q_heads * head_dim)
    _qk_norm_rope_store[(n, (q_heads + 2 * kv_heads) // heads)](
        qkv,
        qkv.stride(-2),
        n * size,
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
        PARTS=len(qkv) if qkv.dim() == 3 else 1,
        NORM=q_weight is not None,
        LESS=1.0 if less_one else 0.0,
        EARLY=early,
        launch_pdl=early,
        num_warps=triton.cdiv(heads * head_dim, 128),
    )
    return q


def qk_norm_rope_store_reference(
    qkv: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    less_one: bool = False,
) -> torch.Tensor:
    """What `qk_norm_rope_store` does."""
    kv_heads, head_dim = k_cache.shape[1:]
    whole = (qkv.sum(0) if qkv.dim() == 3 else qkv).to(k_cache.dtype)
    heads = whole.view(len(whole), -1, head_dim)
    q, k, v = heads.split([heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    cos, sin = cos_sin_cache[positions].float()[:, None, :].chunk(2, dim=-1)

    def norm_rope(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        normed = x.float()
        if weight is not None:
            scale = torch.rsqrt(normed.square().mean(-1, keepdim=True) + eps)
            normed = (normed * scale * (less_one + weight.float())).to(x.dtype).float()
        first, second = normed.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(
            x.dtype
        )

    own = slots != 0
    k_cache[slots[own]], v_cache[slots[own]] = norm_rope(k, k_weight)[own], v[own]
    return norm_rope(q, q_weight).flatten(1)
