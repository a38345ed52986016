"""Attention of rows side by side over paged K/V: requests of any number of rows each, each over its own keys.

A program computes a tile of rows of one request and KV head, over all keys that they see or a part of them. Which tile
that is stands in a plan (`tile_plan.py`), which is made once for all layers. A second launch puts together what has
several parts. How many programs there are depends on shapes alone, so a CUDA graph can hold both launches.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from sglang_dflash.gpu.kernels.block_attention import block_attention_reference
from sglang_dflash.gpu.kernels.over_keys import key_arguments, over_keys
from sglang_dflash.gpu.kernels.tile_plan import Plan, entry_of

_COMBINED = 16  # rows that a program puts together


@triton.jit
def _keys_of_tile(
    first,
    size,
    width,
    length,
    GROUP: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """First and last key that a tile sees (the latter not included), and how many parts they are."""
    position = length - width + first // GROUP
    begin, end = length * 0, length
    if WINDOW >= 0:
        # All tiles step over keys at the same places, so that a row's sum does not depend on its neighbours.
        begin = tl.maximum(position - WINDOW, 0) // KEYS * KEYS
    if CHUNK > 0:
        begin = tl.maximum(position, 0) // CHUNK * CHUNK // KEYS * KEYS
    if CAUSAL:
        end = tl.minimum(length - width + (first + ROWS - 1) // GROUP + 1, length)
    return begin, end, tl.maximum(tl.cdiv(end - begin, size), 1)


@triton.jit
def _attend(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    parts_ptr,
    weights_ptr,
    plan_ptr,
    page_table_ptr,
    page_table_stride,
    sinks_ptr,
    scale,
    cap,
    v_scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    DIM_POW2: tl.constexpr,
    V_DIM_POW2: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    FORMAT: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
):
    entry, kv_head = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS
    request, first, part, size, token, width, length = entry_of(plan_ptr, entry)
    if request < 0:
        return
    seen, last, parts = _keys_of_tile(
        first, size, width, length, GROUP, CAUSAL, WINDOW, CHUNK, ROWS, KEYS
    )
    if part >= parts:
        return
    begin = seen + part * size
    end = tl.minimum(begin + size, last)

    row = first + tl.arange(0, ROWS)
    inside = row < width * GROUP
    # Rows of a token lie side by side, as its heads do.
    head = (token + row // GROUP).to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + row % GROUP
    y, weight = over_keys(
        q_ptr,
        k_ptr,
        v_ptr,
        page_table_ptr + request.to(tl.int64) * page_table_stride,
        sinks_ptr,
        scale,
        cap,
        v_scale,
        row,
        inside,
        head,
        length - width + row // GROUP,
        kv_head,
        part,
        begin,
        end,
        KV_HEADS=KV_HEADS,
        GROUP=GROUP,
        DIM=DIM,
        V_DIM=V_DIM,
        DIM_POW2=DIM_POW2,
        V_DIM_POW2=V_DIM_POW2,
        PAGE_SIZE=PAGE_SIZE,
        CAUSAL=CAUSAL,
        WINDOW=WINDOW,
        CHUNK=CHUNK,
        HAS_CAP=HAS_CAP,
        HAS_SINKS=HAS_SINKS,
        FORMAT=FORMAT,
        ROWS=ROWS,
        KEYS=KEYS,
        STAGES=STAGES,
    )
    dv = tl.arange(0, V_DIM_POW2)
    mask = inside[:, None] & (dv < V_DIM)[None, :]
    if parts <= 1:
        out = out_ptr + head[:, None] * V_DIM + dv[None, :]
        tl.store(out, y.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        own = (entry * KV_HEADS + kv_head) * ROWS + tl.arange(0, ROWS)
        tl.store(parts_ptr + own[:, None] * V_DIM + dv[None, :], y, mask=mask)
        tl.store(weights_ptr + own, weight, mask=inside)


@triton.jit
def _combine(
    out_ptr,
    parts_ptr,
    weights_ptr,
    plan_ptr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    V_DIM: tl.constexpr,
    V_DIM_POW2: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    COMBINED: tl.constexpr,
):
    """Puts the parts of a tile together, whose entries lie side by side; the first part's program does."""
    entry, kv_head = tl.program_id(0), tl.program_id(1)
    request, first, part, size, token, width, length = entry_of(plan_ptr, entry)
    if (request < 0) | (part > 0):
        return
    _, _, parts = _keys_of_tile(
        first, size, width, length, GROUP, CAUSAL, WINDOW, CHUNK, ROWS, KEYS
    )
    if parts <= 1:
        return  # written already
    of_tile = tl.program_id(2) * COMBINED + tl.arange(0, COMBINED)
    row, dv = first + of_tile, tl.arange(0, V_DIM_POW2)
    inside = row < width * GROUP
    mask = inside[:, None] & (dv < V_DIM)[None, :]
    top = tl.full([COMBINED], float("-inf"), tl.float32)
    total = tl.zeros([COMBINED], tl.float32)
    y = tl.zeros([COMBINED, V_DIM_POW2], tl.float32)
    for i in tl.range(parts, num_stages=3):
        own = ((entry + i) * KV_HEADS + kv_head) * ROWS + of_tile
        weight = tl.load(weights_ptr + own, mask=inside, other=float("-inf"))
        value = tl.load(parts_ptr + own[:, None] * V_DIM + dv[None, :], mask=mask, other=0.0)
        higher = tl.maximum(top, weight)
        base = tl.where(higher == float("-inf"), 0.0, higher)  # of a row that has seen nothing
        fade, share = tl.exp2(top - base), tl.exp2(weight - base)
        y = y * fade[:, None] + value * share[:, None]
        total, top = total * fade + share, higher
    y = y / tl.where(total > 0, total, 1.0)[:, None]
    head = (token + row // GROUP).to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + row % GROUP
    tl.store(out_ptr + head[:, None] * V_DIM + dv[None, :], y.to(out_ptr.dtype.element_ty), mask)


def side_by_side_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    plan: Plan,
    **options: Any,
) -> torch.Tensor:
    """Each request's rows over its context and themselves, whose K/V are in the cache already.

    Args:
        q: [rows, heads, head_dim], contiguous.
        k_cache, v_cache: [slots, kv_heads, head_dim], contiguous; as `block_attention` reads them.
        page_table: [bs, pages] int32, read as far as the lengths go.
        plan: made for these heads.
        options: `page_size`, `scale`, `causal`, `window`, `chunk`, `cap`, `sinks`, `k_scale`, `v_scale`, as
            `block_attention` has them.

    Returns:
        [rows, heads, v_head_dim] of the dtype of `q`.
    """
    heads, kv_heads, v_dim, tile = q.shape[1], *v_cache.shape[1:], plan.tile
    keys = key_arguments(k_cache, v_cache, tile, **options)
    group = heads // kv_heads
    out = q.new_empty(len(q), heads, v_dim)
    each = (plan.split, kv_heads, tile.rows)
    parts = torch.empty(*each, v_dim, dtype=torch.float32, device=q.device)
    weights = torch.empty(each, dtype=torch.float32, device=q.device)
    _attend[(len(plan.entries) * kv_heads,)](
        q_ptr=q,
        out_ptr=out,
        parts_ptr=parts,
        weights_ptr=weights,
        plan_ptr=plan.entries,
        page_table_ptr=page_table,
        page_table_stride=page_table.stride(0),
        GROUP=group,
        **keys,
    )
    if plan.split:
        names = ("KV_HEADS", "V_DIM", "V_DIM_POW2", "CAUSAL", "WINDOW", "CHUNK", "ROWS", "KEYS")
        same = {name: keys[name] for name in names}
        grid = (plan.split, kv_heads, tile.rows // _COMBINED)
        given = (out, parts, weights, plan.entries)
        _combine[grid](*given, GROUP=group, COMBINED=_COMBINED, num_warps=4, **same)
    return out


def side_by_side_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    ends: torch.Tensor,
    cache_lengths: torch.Tensor,
    **options: Any,
) -> torch.Tensor:
    """What `side_by_side_attention` returns, computed in float32; `ends` and `cache_lengths` as a plan has them."""
    out, ends = q.new_zeros(*q.shape[:2], v_cache.shape[2]), ends.tolist()
    for i, (begin, end) in enumerate(zip(ends, ends[1:], strict=False)):
        of_request = (
            q[begin:end],
            k_cache,
            v_cache,
            page_table[i : i + 1],
            cache_lengths[i : i + 1],
        )
        out[begin:end] = block_attention_reference(*of_request, width=end - begin, **options)
    return out
