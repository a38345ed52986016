"""Attention of a block in a sliding layer: a window of context and the block, in plain PyTorch.

No attention backend of the release has windows that reach forward inside a block, or that begin at
the block and not at each row, so these layers run without one, on every device. Their shapes do not
depend on data, so a CUDA graph can hold them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import scaled_dot_product_attention

from sglang_dflash.checkpoint.formats.config import Sight

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


def window_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: RadixAttention,
    sight: Sight,
    forward_batch: ForwardBatch,
) -> torch.Tensor:
    """Each request's block over its window and itself.

    Args:
        q: [bs * width, heads * head_dim], k, v: [bs * width, kv_heads * head_dim], of the block.
        sight: with a window.

    Returns:
        [bs * width, heads * head_dim]. K/V of the rows are written to their slots.
    """
    heads, kv_heads, dim = layer.tp_q_head_num, layer.tp_k_head_num, layer.head_dim
    starts, width = forward_batch.seq_lens, forward_batch.spec_info.draft_token_num
    batch_size, pool = len(starts), forward_batch.token_to_kv_pool
    k, v = k.view(-1, kv_heads, dim), v.view(-1, kv_heads, dim)
    pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v)

    # On the host it is known how long contexts can be, so short ones need not fill the window.
    longest = int(forward_batch.seq_lens_cpu.max())
    before = torch.arange(-min(sight.window, longest), 0, device=q.device)
    context = starts[:, None] + before  # [bs, window]; negative before the first token
    table = forward_batch.req_to_token_pool.req_to_token
    # Requests that only pad a batch have a row beyond the table, and no context.
    rows = forward_batch.req_pool_indices.clamp(max=len(table) - 1)
    slots = table[rows[:, None], context.clamp(min=0)]

    def with_block(cache: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
        """[bs, kv_heads, window + width, head_dim]."""
        block = block.view(batch_size, width, kv_heads, dim)
        return torch.cat([cache[slots].to(q.dtype), block], dim=1).transpose(1, 2)

    mask = visible(context, starts, width, sight)  # [bs, width, window + width]
    # Query heads that share a KV head become rows of one head: [bs, kv_heads, group * width, head_dim].
    group = heads // kv_heads
    grouped = q.view(batch_size, width, kv_heads, group, dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
    attended = scaled_dot_product_attention(
        grouped,
        with_block(pool.get_key_buffer(layer.layer_id), k),
        with_block(pool.get_value_buffer(layer.layer_id), v),
        attn_mask=mask.repeat(1, group, 1)[:, None],
        scale=layer.scaling,
    )
    attended = attended.view(batch_size, kv_heads, group, width, dim).permute(0, 3, 1, 2, 4)
    return attended.reshape(batch_size * width, heads * dim)


def visible(context: torch.Tensor, starts: torch.Tensor, width: int, sight: Sight) -> torch.Tensor:
    """Which keys each row sees: [bs, width, n + width] bool, the block's own keys last.

    Args:
        context: [bs, n] int64, positions of context tokens; negative ones do not exist.
        starts: [bs] int64, position of row 0.
        sight: its window must be no shorter than `starts - context` where that has to be seen.
    """
    steps = torch.arange(width, device=context.device)
    row = starts[:, None, None] + steps[:, None]  # [bs, width, 1]
    block = (starts[:, None] + steps)[:, None]  # [bs, 1, width]
    # The first position that a row sees.
    first = starts[:, None, None] - sight.window if sight.from_block else row - sight.window + 1
    in_context = (context >= 0)[:, None] & (context[:, None] >= first)
    in_block = (block <= row) if sight.causal else (block >= 0)
    if not sight.from_block:
        in_block = in_block & (block >= first) & (block < row + sight.window)
    return torch.cat(
        [in_context.expand(-1, width, -1), in_block.expand(-1, width, -1)],
        dim=2,
    )
