"""Attention in plain PyTorch, for the CPU: of blocks, and of whatever the release's own does not compute there.

That knows no windows, no chunks, no sinks and no pool of sliding layers' own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import scaled_dot_product_attention

from sglang_dflash.chunks import chunk_of
from sglang_dflash.two_pools import is_sliding, sliding_slots

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


def computes(
    layer: RadixAttention,
    forward_batch: ForwardBatch,
    sinks: torch.Tensor | None,
    chunk_size: int | None,
) -> bool:
    """Whether `attention` is needed, because the release's own is not right."""
    verifies = forward_batch.forward_mode.is_target_verify()
    some_keys = _window_of(layer) is not None or chunk_of(layer, chunk_size) > 0
    return verifies or some_keys or sinks is not None


def attention(
    query: torch.Tensor,
    output: torch.Tensor,
    layer: RadixAttention,
    forward_batch: ForwardBatch,
    causal: bool,
    sinks: torch.Tensor | None = None,
    chunk_size: int | None = None,
) -> torch.Tensor:
    """Each request's rows over its context and themselves.

    Args:
        query: [rows, heads, head_dim]; K/V of the rows are in the pool already.
        output: [rows, heads * v_head_dim], written in place.
        causal: whether a row sees only itself and what is before it (the target), or all rows of its request (the
            draft model).
        sinks: [heads], scores of a key without a value.
        chunk_size: of chunks of the context, in a model that has layers with some.
    """
    pool, table = forward_batch.token_to_kv_pool, forward_batch.req_to_token_pool.req_to_token
    keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
    outputs, row = output.view(len(query), layer.tp_q_head_num, -1), 0
    rows_of = zip(forward_batch.req_pool_indices, *_spans(forward_batch), strict=True)
    for request, start, width in rows_of:
        slots = table[request, : start + width]
        if is_sliding(pool, layer.layer_id):
            slots = sliding_slots(pool, slots)
        q = query[row : row + width].transpose(0, 1)  # [heads, width, head_dim]
        k, v = (cache[slots].transpose(0, 1).to(query.dtype) for cache in (keys, values))
        reach = (_window_of(layer), chunk_of(layer, chunk_size))
        seen = _seen(start, width, *reach, query.device) if causal else None
        attended = attend(q, k, v, seen, layer.scaling, sinks)
        outputs[row : row + width] = attended.transpose(0, 1)
        row += width
    return output


def _spans(batch: ForwardBatch) -> Iterator[list[int]]:
    """Tokens before the rows of each request, and how many rows it has."""
    if batch.forward_mode.is_target_verify():
        yield batch.seq_lens.tolist()
        yield [batch.spec_info.draft_token_num] * len(batch.seq_lens)
    elif batch.forward_mode.is_decode():
        yield (batch.seq_lens - 1).tolist()
        yield [1] * len(batch.seq_lens)
    else:
        yield batch.extend_prefix_lens.tolist()
        yield batch.extend_seq_lens.tolist()


def _window_of(layer: RadixAttention) -> int | None:
    """Keys before itself that a row of a layer sees; None for all."""
    window = layer.sliding_window_size
    return None if window is None or window < 0 else window


def _seen(
    start: int, width: int, window: int | None, chunk: int, device: torch.device
) -> torch.Tensor:
    """[width, start + width] bool: row i sees keys up to start + i, as far back as window and chunk reach."""
    seen = torch.ones(width, start + width, dtype=torch.bool, device=device).tril(diagonal=start)
    if chunk:
        key = torch.arange(start + width, device=device)
        seen &= key >= (key[start:] // chunk * chunk)[:, None]
    return seen if window is None else seen.triu(diagonal=start - window)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor | None,
    scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """[heads, width, head_dim] over [kv_heads, keys, head_dim] → [heads, width, v_head_dim]."""
    if sinks is None:
        given = (x[None] for x in (q, k, v))
        return scaled_dot_product_attention(
            *given, attn_mask=seen, scale=scale, enable_gqa=len(q) != len(k)
        )[0]
    k, v = (x.repeat_interleave(len(q) // len(k), dim=0) for x in (k, v))
    scores = (q @ k.transpose(1, 2)).float() * scale
    scores = scores if seen is None else scores.masked_fill(~seen, -torch.inf)
    sink = sinks.float()[:, None, None].expand(-1, q.shape[1], 1)
    weights = torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]
    return weights.to(v.dtype) @ v
