"""Windows of a block: the mask against its definition, and the attention against one row at a time."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_dflash.checkpoint.formats.config import Sight
from sglang_dflash.drafter.window_attention import visible, window_attention

SIGHTS = [
    Sight(causal=causal, window=window, from_block=from_block)
    for causal in (True, False)
    for from_block in (True, False)
    for window in (1, 3, 8, 30)
]


def sees(sight: Sight, row: int, key: int, start: int) -> bool:
    """The definition: whether a row at position `row` sees a key at position `key`."""
    if key < 0 or sight.causal and key > row:
        return False
    if sight.from_block:
        return key >= start - sight.window
    return abs(row - key) < sight.window


@pytest.mark.parametrize("sight", SIGHTS, ids=str)
def test_visible(sight: Sight) -> None:
    starts, width, longest = torch.tensor([0, 1, 5, 20]), 6, 25
    before = torch.arange(-min(sight.window, longest), 0)
    mask = visible(starts[:, None] + before, starts, width, sight)
    for i, start in enumerate(starts.tolist()):
        for row in range(start, start + width):
            seen = {key for key in range(start + width) if sees(sight, row, key, start)}
            keys = torch.cat([start + before, torch.arange(start, start + width)])
            assert {int(key) for key in keys[mask[i, row - start]]} == seen


@pytest.mark.parametrize("sight", SIGHTS, ids=str)
def test_window_attention(sight: Sight) -> None:
    """Slots in any order, heads that share KV heads, and a request that only pads the batch."""
    torch.manual_seed(0)
    heads, kv_heads, dim, width, context = 6, 2, 4, 5, 40
    starts = torch.tensor([0, 2, 17, 33, 0])
    requests = len(starts) - 1
    slots = 1 + torch.randperm(requests * context).view(requests, context)
    pool = Pool(requests * context + 1, kv_heads, dim)
    positions = starts[:requests, None] + torch.arange(width)
    block_slots = torch.cat([slots.gather(1, positions), torch.zeros(1, width, dtype=torch.int64)])
    batch = SimpleNamespace(
        seq_lens=starts,
        seq_lens_cpu=starts,
        req_pool_indices=torch.arange(len(starts)),  # the last row is beyond the table
        out_cache_loc=block_slots.flatten(),
        spec_info=SimpleNamespace(draft_token_num=width),
        token_to_kv_pool=pool,
        req_to_token_pool=SimpleNamespace(req_to_token=slots.to(torch.int32)),
    )
    layer = SimpleNamespace(
        layer_id=0, tp_q_head_num=heads, tp_k_head_num=kv_heads, head_dim=dim, scaling=0.3
    )
    q = torch.randn(len(starts) * width, heads * dim)
    k, v = torch.randn(2, len(starts) * width, kv_heads * dim)
    output = window_attention(q, k, v, layer, sight, batch).view(-1, width, heads, dim)
    assert output.isfinite().all()
    for i, start in enumerate(starts[:requests].tolist()):
        for row in range(start, start + width):
            seen = [key for key in range(start + width) if sees(sight, row, key, start)]
            for head in range(heads):
                keys = pool.keys[slots[i, seen], head // 3]
                values = pool.values[slots[i, seen], head // 3]
                query = q.view(-1, width, heads, dim)[i, row - start, head]
                expected = (0.3 * keys @ query).softmax(0) @ values
                torch.testing.assert_close(output[i, row - start, head], expected)


class Pool:
    """Keys and values by slot."""

    def __init__(self, slots: int, kv_heads: int, dim: int):
        self.keys, self.values = torch.randn(2, slots, kv_heads, dim)

    def set_kv_buffer(self, layer, slots, k, v) -> None:
        self.keys[slots], self.values[slots] = k, v

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.keys

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.values
