"""Attention of a block in plain PyTorch, for the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


def block_attention(
    query: torch.Tensor,
    output: torch.Tensor,
    layer: RadixAttention,
    forward_batch: ForwardBatch,
    causal: bool,
) -> torch.Tensor:
    """Each request's block over its context and itself.

    Args:
        query: [bs * width, heads, head_dim]; K/V of the block are in the pool already.
        output: [bs * width, heads * v_head_dim], written in place.
        causal: whether a row sees only itself and what is before it (the target), or the whole
            block (the draft model).
    """
    width = forward_batch.spec_info.draft_token_num
    pool, table = forward_batch.token_to_kv_pool, forward_batch.req_to_token_pool.req_to_token
    keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
    blocks = query.view(-1, width, *query.shape[1:]).transpose(1, 2)  # [bs, heads, width, head_dim]
    outputs = output.view(len(blocks), width, -1)

    for i, start in enumerate(forward_batch.seq_lens.tolist()):
        slots = table[forward_batch.req_pool_indices[i], : start + width]
        k, v = (cache[slots].transpose(0, 1).to(query.dtype) for cache in (keys, values))
        attended = scaled_dot_product_attention(
            blocks[i][None],
            k[None],
            v[None],
            attn_mask=_causal_mask(start, width, query.device) if causal else None,
            scale=layer.scaling,
            enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
        )
        outputs[i] = attended[0].transpose(0, 1).flatten(1)
    return output


def _causal_mask(start: int, width: int, device: torch.device) -> torch.Tensor:
    """[width, start + width] bool: row i sees keys up to start + i."""
    return torch.ones(width, start + width, dtype=torch.bool, device=device).tril(diagonal=start)
