"""Attention of blocks against softmax written out."""

from types import SimpleNamespace

import pytest
import torch

from sglang_dflash.cpu.block_attention import block_attention

HEADS, DIM, SLOTS, COLUMNS = 4, 8, 64, 40


def dense(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: int) -> torch.Tensor:
    """One row of one head over the first `seen` keys."""
    weights = torch.softmax(keys[:seen] @ query / DIM**0.5, dim=0)
    return weights @ values[:seen]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("width", [2, 5])
def test_against_softmax(causal: bool, kv_heads: int, width: int) -> None:
    torch.manual_seed(0)
    starts = [0, 3, 20]
    keys, values = torch.randn(2, SLOTS, kv_heads, DIM)
    table = torch.randint(0, SLOTS, (5, COLUMNS), dtype=torch.int32)
    rows = torch.tensor([4, 0, 2])
    query = torch.randn(len(starts) * width, HEADS, DIM)
    layer = SimpleNamespace(
        layer_id=0, scaling=DIM**-0.5, tp_q_head_num=HEADS, tp_k_head_num=kv_heads
    )
    batch = SimpleNamespace(
        spec_info=SimpleNamespace(draft_token_num=width),
        token_to_kv_pool=SimpleNamespace(
            get_key_buffer=lambda _: keys, get_value_buffer=lambda _: values
        ),
        req_to_token_pool=SimpleNamespace(req_to_token=table),
        req_pool_indices=rows,
        seq_lens=torch.tensor(starts),
    )
    result = block_attention(query, torch.empty(len(query), HEADS * DIM), layer, batch, causal)

    for i, start in enumerate(starts):
        slots = table[rows[i], : start + width]
        for row in range(width):
            seen = start + row + 1 if causal else start + width
            for head in range(HEADS):
                kv_head = head * kv_heads // HEADS
                expected = dense(
                    query[i * width + row, head], keys[slots, kv_head], values[slots, kv_head], seen
                )
                actual = result[i * width + row, head * DIM : (head + 1) * DIM]
                torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)
