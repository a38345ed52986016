"""Rows of queries over keys in pages: the loop that kernels of attention share."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from sglang_dflash.gpu.kernels.block_tiles import Tile

# How K and V are stored, if not as floating-point numbers that Triton knows on every GPU.
FP8 = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


@triton.jit
def numbers(x, FORMAT: tl.constexpr):
    """What the pool stores, as numbers: bytes of FP8 become float16, which holds all that they mean.

    By their bits, because not every GPU that Triton compiles for converts both formats.
    """
    if FORMAT == "e5m2":
        return (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    elif FORMAT == "e4m3":
        bits = x.to(tl.uint16)
        sign, rest = (bits & 0x80) << 8, bits & 0x7F
        # Its exponent counts from 7, that of float16 from 15.
        value = (sign | (rest << 7)).to(tl.float16, bitcast=True) * 256.0
        return tl.where(rest == 0x7F, float("nan"), value).to(tl.float16)
    else:
        return x


@triton.jit
def over_keys(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    sinks_ptr,
    scale,
    cap,
    v_scale,
    row,
    inside,
    head,
    position,
    kv_head,
    part,
    begin,
    end,
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
    """Rows of one request and KV head over a part of its keys, from `begin` to `end`.

    Args:
        table_ptr: of the request.
        row: [ROWS], of the request, query heads of a token side by side; `inside` where there is one.
        head: [ROWS] int64, which head of all of `q_ptr` a row is.
        position: [ROWS], of its token.

    Returns:
        [ROWS, V_DIM_POW2], and the logarithm (of base 2) of the sum of weights that a row's is divided by.
    """
    d, dv = tl.arange(0, DIM_POW2), tl.arange(0, V_DIM_POW2)
    q_mask = inside[:, None] & (d < DIM)[None, :]
    q = tl.load(q_ptr + head[:, None] * DIM + d[None, :], mask=q_mask, other=0.0)

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if HAS_SINKS:
        # A key without a value, which the first part has.
        sink = tl.load(sinks_ptr + kv_head * GROUP + row % GROUP, mask=inside, other=0.0)
        top = tl.where(part == 0, sink.to(tl.float32) * 1.4426950408889634, top)
        total = tl.where(part == 0, 1.0, total)
    y = tl.zeros([ROWS, V_DIM_POW2], tl.float32)
    for at in tl.range(begin, end, KEYS, num_stages=STAGES):
        key = at + tl.arange(0, KEYS)
        there = key < end
        page = tl.load(table_ptr + key // PAGE_SIZE, mask=there, other=0).to(tl.int64)
        slot = (page * PAGE_SIZE + key % PAGE_SIZE) * KV_HEADS + kv_head
        k_mask, v_mask = there[None, :], there[:, None]
        if DIM < DIM_POW2:
            k_mask = k_mask & (d < DIM)[:, None]
        if V_DIM < V_DIM_POW2:
            v_mask = v_mask & (dv < V_DIM)[None, :]
        k = tl.load(k_ptr + slot[None, :] * DIM + d[:, None], mask=k_mask, other=0)
        s = tl.dot(q, numbers(k, FORMAT).to(q.dtype), input_precision="ieee") * scale
        if HAS_CAP:
            s = cap * (2 * tl.sigmoid(s) - 1)  # tanh of half of it
        seen = there[None, :]
        if CAUSAL:
            seen = seen & (key[None, :] <= position[:, None])
        if WINDOW >= 0:
            seen = seen & (key[None, :] + WINDOW >= position[:, None])
        if CHUNK > 0:
            seen = seen & (key[None, :] >= (position // CHUNK * CHUNK)[:, None])
        s = tl.where(seen, s, float("-inf"))

        higher = tl.maximum(top, tl.max(s, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # of a row that has seen nothing
        p, fade = tl.exp2(s - base[:, None]), tl.exp2(top - base)
        total, top = total * fade + tl.sum(p, axis=1), higher
        v = tl.load(v_ptr + slot[:, None] * V_DIM + dv[None, :], mask=v_mask, other=0)
        v = numbers(v, FORMAT).to(q.dtype)
        y = tl.dot(p.to(q.dtype), v, y * fade[:, None], input_precision="ieee")

    total = tl.where(total > 0, total, 1.0)
    return y * (v_scale / total)[:, None], top + tl.log2(total)


def key_arguments(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    tile: Tile,
    *,
    page_size: int,
    scale: float,
    causal: bool,
    window: int = -1,
    chunk: int = 0,
    cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> dict[str, Any]:
    """What a kernel gives on to `over_keys`, by name, and its warps; see `block_attention`."""
    (_, kv_heads, dim), v_dim, log2e = k_cache.shape, v_cache.shape[2], 1 / math.log(2)
    format = FP8.get(k_cache.dtype, "")
    return dict(
        k_ptr=k_cache.view(torch.uint8) if format else k_cache,
        v_ptr=v_cache.view(torch.uint8) if format else v_cache,
        sinks_ptr=sinks,
        scale=scale * k_scale * (2 / cap if cap else log2e),
        cap=cap * log2e,
        v_scale=v_scale,
        KV_HEADS=kv_heads,
        DIM=dim,
        V_DIM=v_dim,
        DIM_POW2=triton.next_power_of_2(dim),
        V_DIM_POW2=triton.next_power_of_2(v_dim),
        PAGE_SIZE=page_size,
        CAUSAL=causal,
        WINDOW=window,
        CHUNK=chunk,
        HAS_CAP=cap > 0,
        HAS_SINKS=sinks is not None,
        FORMAT=format,
        ROWS=tile.rows,
        KEYS=tile.keys,
        STAGES=tile.stages,
        num_warps=tile.warps,
    )
