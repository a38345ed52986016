"""Attention of blocks over paged K/V: a few rows a request, all of its keys.

A program computes rows of one KV head, the query heads that share it side by side, over a part of the keys.
Lengths and page table lie on the device: each program finds its part itself, and one that has none leaves. A
second launch puts together what has several parts. How many there may be depends on shapes alone, so a CUDA graph
can hold both.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dflash.gpu.kernels.block_tiles import LONG, Split, Tile, choose_split, choose_tile
from sglang_dflash.gpu.kernels.launch import device_of, starts_early
from sglang_dflash.gpu.kernels.over_keys import key_arguments, over_keys


@triton.jit
def _size_of_parts(
    length,
    fill,
    most,
    WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    KEYS: tl.constexpr,
    LONGEST: tl.constexpr,
):
    """First key that a request's block sees, keys of a part, and how many parts there are."""
    first = length * 0
    if WINDOW >= 0:
        first = tl.maximum(length - WIDTH - WINDOW, 0) // KEYS * KEYS
    if CHUNK > 0:
        first = tl.maximum(length - WIDTH, 0) // CHUNK * CHUNK // KEYS * KEYS
    seen = length - first
    size = tl.maximum(tl.cdiv(seen, most), tl.minimum(tl.cdiv(seen, fill), LONGEST))
    size = tl.maximum(tl.cdiv(size, KEYS) * KEYS, KEYS)
    return first, size, tl.cdiv(seen, size)


# One compilation for all batch sizes.
@triton.jit(do_not_specialize=["fill", "most"])
def _attend(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    parts_ptr,
    weights_ptr,
    page_table_ptr,
    page_table_stride,
    lengths_ptr,
    sinks_ptr,
    scale,
    cap,
    v_scale,
    fill,
    most,
    WIDTH: tl.constexpr,
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
    LONGEST: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    tile, request, part = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    kv_head = tile % KV_HEADS
    row = tile // KV_HEADS * ROWS + tl.arange(0, ROWS)
    length = tl.load(lengths_ptr + request)
    first, size, parts = _size_of_parts(length, fill, most, WIDTH, WINDOW, CHUNK, KEYS, LONGEST)
    if part >= tl.maximum(parts, 1):
        return
    begin = first + part * size
    end = tl.minimum(begin + size, length)

    inside = row < WIDTH * GROUP
    # Rows of a token lie side by side, as its heads do.
    head = (request * WIDTH + row // GROUP) * (KV_HEADS * GROUP) + kv_head * GROUP + row % GROUP
    y, weight = over_keys(
        q_ptr,
        k_ptr,
        v_ptr,
        page_table_ptr + request * page_table_stride,
        sinks_ptr,
        scale,
        cap,
        v_scale,
        row,
        inside,
        head,
        length - WIDTH + row // GROUP,
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
        own = ((request * KV_HEADS + kv_head) * most + part) * (WIDTH * GROUP) + row
        tl.store(parts_ptr + own[:, None] * V_DIM + dv[None, :], y, mask=mask)
        tl.store(weights_ptr + own, weight, mask=inside)


@triton.jit(do_not_specialize=["fill"])
def _combine(
    out_ptr,
    parts_ptr,
    weights_ptr,
    lengths_ptr,
    fill,
    WIDTH: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    V_DIM: tl.constexpr,
    V_DIM_POW2: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    MOST: tl.constexpr,
    LONGEST: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    kv_head, request = tl.program_id(1), tl.program_id(2).to(tl.int64)
    length = tl.load(lengths_ptr + request)
    _, _, parts = _size_of_parts(length, fill, MOST, WIDTH, WINDOW, CHUNK, KEYS, LONGEST)
    if parts <= 1:
        return  # written already
    part, dv = tl.arange(0, MOST), tl.arange(0, V_DIM_POW2)
    inside = row < WIDTH * GROUP
    at = ((request * KV_HEADS + kv_head) * MOST + part[:, None]) * (WIDTH * GROUP) + row[None, :]
    mask = (part < parts)[:, None] & inside[None, :]
    weight = tl.load(weights_ptr + at, mask=mask, other=float("-inf"))
    top = tl.max(weight, axis=0)
    weight = tl.exp2(weight - tl.where(top == float("-inf"), 0.0, top)[None, :])
    total = tl.sum(weight, axis=0)
    weight = weight / tl.where(total > 0, total, 1.0)[None, :]
    y = tl.load(
        parts_ptr + at[:, :, None] * V_DIM + dv[None, None, :],
        mask=mask[:, :, None] & (dv < V_DIM)[None, None, :],
        other=0.0,
    )
    y = tl.sum(y * weight[:, :, None], axis=0)
    head = (request * WIDTH + row // GROUP) * (KV_HEADS * GROUP) + kv_head * GROUP + row % GROUP
    out = out_ptr + head[:, None] * V_DIM + dv[None, :]
    mask = inside[:, None] & (dv < V_DIM)[None, :]
    tl.store(out, y.to(out_ptr.dtype.element_ty), mask=mask)


def block_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    cache_lengths: torch.Tensor,
    *,
    width: int,
    page_size: int,
    scale: float,
    causal: bool,
    window: int = -1,
    chunk: int = 0,
    cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    split: Split | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Each request's block over its context and itself, whose K/V are in the cache already.

    Args:
        q: [bs * width, heads, head_dim], contiguous.
        k_cache, v_cache: [slots, kv_heads, head_dim], contiguous; v's heads may have another size. Of the dtype of
            `q`, of another that a product takes, or FP8.
        page_table: [bs, pages] int32, read as far as the lengths go.
        cache_lengths: [bs] int32, keys of each request, its block included; 0 for none, and zeros come out.
        scale: of the products.
        causal: whether a row sees only itself and what is before it, or the whole block.
        window: keys before itself that a row sees; -1 for all.
        chunk: keys of a chunk of the context, of which a row sees none before its own; 0 for all.
        cap: soft cap of the scaled products; 0 for none.
        sinks: [heads], scores of a key without a value.
        k_scale, v_scale: what stored K and V are multiplied with.
        split: by default what occupies the device; `WHOLE` sums in one order, whatever the batch.

    Returns:
        [bs * width, heads, v_head_dim] of the dtype of `q`.
    """
    requests, heads, (_, kv_heads, dim) = len(cache_lengths), q.shape[1], k_cache.shape
    v_dim, group, rows = v_cache.shape[2], heads // kv_heads, width * (heads // kv_heads)
    device = device_of(q.device)
    tile = tile or choose_tile(max(dim, v_dim), rows, q.itemsize, device.shared_memory)
    tiles, longest = triton.cdiv(rows, tile.rows) * kv_heads, page_table.shape[1] * page_size
    split = split or choose_split(requests * tiles, longest, device.multiprocessors)
    keys = key_arguments(
        k_cache,
        v_cache,
        tile,
        page_size=page_size,
        scale=scale,
        causal=causal,
        window=window,
        chunk=chunk,
        cap=cap,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    own = dict(WIDTH=width, GROUP=group, LONGEST=LONG)
    own |= dict(EARLY=starts_early(len(q)), launch_pdl=starts_early(len(q)))
    out = q.new_empty(len(q), heads, v_dim)
    each = (requests, kv_heads, split.most if split.most > 1 else 0, rows)
    parts = torch.empty(*each, v_dim, dtype=torch.float32, device=q.device)
    weights = torch.empty(each, dtype=torch.float32, device=q.device)
    _attend[(tiles, requests, split.most)](
        q_ptr=q,
        out_ptr=out,
        parts_ptr=parts,
        weights_ptr=weights,
        page_table_ptr=page_table,
        page_table_stride=page_table.stride(0),
        lengths_ptr=cache_lengths,
        fill=split.fill,
        most=split.most,
        **keys,
        **own,
    )
    if split.most > 1:
        # So many elements as 128 threads hold.
        names = ("KV_HEADS", "V_DIM", "V_DIM_POW2", "WINDOW", "CHUNK", "KEYS")
        dims = {name: keys[name] for name in names}
        at_once = max(1, 8192 // (split.most * dims["V_DIM_POW2"]))
        at_once = min(at_once, triton.next_power_of_2(rows))
        grid = (triton.cdiv(rows, at_once), kv_heads, requests)
        given = (out, parts, weights, cache_lengths, split.fill)
        _combine[grid](*given, MOST=split.most, ROWS=at_once, num_warps=4, **dims, **own)
    return out


def block_attention_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    cache_lengths: torch.Tensor,
    *,
    width: int,
    page_size: int,
    scale: float,
    causal: bool,
    window: int = -1,
    chunk: int = 0,
    cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """What `block_attention` returns, computed in float32."""
    heads, group = q.shape[1], q.shape[1] // k_cache.shape[1]
    out = q.new_zeros(len(q), heads, v_cache.shape[2])
    for request, length in enumerate(cache_lengths.tolist()):
        key = torch.arange(length, device=q.device)
        slots = page_table[request, key // page_size].long() * page_size + key % page_size
        k, v = (
            cache[slots].to(q.dtype).float().repeat_interleave(group, dim=1)
            for cache in (k_cache, v_cache)
        )
        rows = slice(request * width, (request + 1) * width)
        s = torch.einsum("qhd,khd->hqk", q[rows].float(), k) * (scale * k_scale)
        if cap:
            s = cap * torch.tanh(s / cap)
        position = length - width + torch.arange(width, device=q.device)[:, None]
        seen = (key <= position) if causal else (key >= 0).expand(width, -1)
        if window >= 0:
            seen = seen & (key + window >= position)
        if chunk > 0:
            seen = seen & (key >= position // chunk * chunk)
        s = s.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            s = torch.cat([s, sinks.float()[:, None, None].expand(-1, width, 1)], dim=-1)
        p = s.softmax(dim=-1)[..., :length].nan_to_num(0.0)
        out[rows] = (torch.einsum("hqk,khd->qhd", p, v) * v_scale).to(q.dtype)
    return out
