"""K norm (where keys are normed), RoPE and the KV write of context tokens, for all draft layers in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _context_store(
    kv_ptr,
    k_pointers_ptr,
    v_pointers_ptr,
    k_weight_ptr,
    cos_sin_ptr,
    positions_ptr,
    slots_ptr,
    eps,
    LAYERS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
):
    token, layer = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dtype = kv_ptr.dtype.element_ty
    head = tl.arange(0, KV_HEADS)[:, None]
    half = tl.arange(0, HALF)
    offset = head * 2 * HALF + half[None, :]
    size: tl.constexpr = KV_HEADS * 2 * HALF
    source = kv_ptr + (token * LAYERS + layer) * 2 * size + offset
    slot = tl.load(slots_ptr + token)
    target, own = slot * size + offset, slot != 0

    v_cache = tl.load(v_pointers_ptr + layer).to(tl.int64).to(tl.pointer_type(dtype))
    tl.store(v_cache + target, tl.load(source + size), mask=own)
    tl.store(v_cache + target + HALF, tl.load(source + size + HALF), mask=own)

    x1 = tl.load(source).to(tl.float32)
    x2 = tl.load(source + HALF).to(tl.float32)
    if NORM:
        variance = (tl.sum(x1 * x1, axis=1) + tl.sum(x2 * x2, axis=1)) / (2 * HALF)
        scale = tl.rsqrt(variance + eps)[:, None]
        weight = k_weight_ptr + layer * 2 * HALF + half
        x1 = (x1 * scale * tl.load(weight).to(tl.float32)[None, :]).to(dtype).to(tl.float32)
        x2 = (x2 * scale * tl.load(weight + HALF).to(tl.float32)[None, :]).to(dtype).to(tl.float32)
    angles = cos_sin_ptr + tl.load(positions_ptr + token) * 2 * HALF + half
    cos = tl.load(angles).to(tl.float32)[None, :]
    sin = tl.load(angles + HALF).to(tl.float32)[None, :]
    k_cache = tl.load(k_pointers_ptr + layer).to(tl.int64).to(tl.pointer_type(dtype))
    tl.store(k_cache + target, (x1 * cos - x2 * sin).to(dtype), mask=own)
    tl.store(k_cache + target + HALF, (x2 * cos + x1 * sin).to(dtype), mask=own)


def context_store(
    kv: torch.Tensor,
    k_norm_weight: torch.Tensor | None,
    eps: float,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_pointers: torch.Tensor,
    v_pointers: torch.Tensor,
    kv_heads: int,
) -> None:
    """Writes K (normed, unless there are no norms, and rotated) and V of `n` tokens to the slots of every layer.

    Args:
        kv: [n, layers * 2 * kv_heads * head_dim], K then V of each layer, contiguous.
        k_norm_weight: [layers, head_dim]; None where keys are not normed.
        cos_sin_cache: [positions, head_dim], cosines then sines; all of a head is rotated.
        positions, slots: [n] int64; slot 0 is not written (`clean_slot.py`).
        k_pointers, v_pointers: [layers] uint64, addresses of [slots, kv_heads, head_dim] buffers of
            the dtype of `kv`.
    """
    layers = len(k_pointers)
    head_dim = kv.shape[1] // (layers * 2 * kv_heads)
    _context_store[(len(kv), layers)](
        kv,
        k_pointers,
        v_pointers,
        k_norm_weight,
        cos_sin_cache,
        positions,
        slots,
        eps,
        LAYERS=layers,
        KV_HEADS=kv_heads,
        HALF=head_dim // 2,
        NORM=k_norm_weight is not None,
        num_warps=4,
    )
