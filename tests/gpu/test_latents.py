"""FA3 over latents of MLA against sums in float32."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

from sglang_dflash.gpu.fa3_latents import LATENT, ROTATED, Fa3LatentAttention
from tests.gpu.test_block_attention import needs_hopper

HEADS, SIZE, LONGEST = 16, LATENT + ROTATED, 40_960


@needs_hopper
@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("width", [1, 4, 8, 16])
@pytest.mark.parametrize("lengths", [[216], [16, 17, 500, 2048, 1024], [9000], [40, 300] * 20])
def test_as_sums(lengths: list[int], width: int, page_size: int) -> None:
    """Rows see what is before them, whatever the pages that lie between."""
    torch.manual_seed(0)
    pages = [-(-length // page_size) for length in lengths]
    pool = MLATokenToKVPool(
        sum(pages) * page_size, page_size, torch.bfloat16, LATENT, ROTATED, 1, "cuda", False
    )
    keys = pool.get_key_buffer(0)
    keys.copy_(torch.randn(keys.shape, device="cuda", dtype=torch.bfloat16))
    table = torch.zeros(len(lengths), LONGEST // page_size, dtype=torch.int32, device="cuda")
    order = 1 + torch.randperm(sum(pages), device="cuda").to(torch.int32)
    for row, own in zip(table, order.split(pages), strict=True):
        row[: len(own)] = own
    counts = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    runner = SimpleNamespace(token_to_kv_pool=pool, page_size=page_size, tp_size=1)
    runner.model_config = SimpleNamespace(get_num_kv_heads=lambda tp_size: 1)
    attention = Fa3LatentAttention(runner, counts, table, width, True, False)
    layer = RadixAttention(HEADS, SIZE, 192**-0.5, 1, 0, v_head_dim=LATENT)
    q = torch.randn(len(lengths) * width, HEADS, SIZE, device="cuda", dtype=torch.bfloat16)
    batch = SimpleNamespace(token_to_kv_pool=pool)
    attention.prepare()
    made = attention.forward(q.flatten(1), None, None, layer, batch)
    made = made.view(-1, width, HEADS, LATENT)
    for number, length in enumerate(lengths):
        ids = torch.arange(length, device="cuda")
        slots = table[number, ids // page_size].long() * page_size + ids % page_size
        seen = keys[slots].view(length, SIZE).float()
        own = q.view(-1, width, HEADS, SIZE)[number].float()
        scores = torch.einsum("whs,ks->whk", own, seen) * layer.scaling
        last = length - width + torch.arange(width, device="cuda")
        hidden = ids > last[:, None, None]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        expected = torch.einsum("whk,kl->whl", weights, seen[:, :LATENT])
        torch.testing.assert_close(made[number].float(), expected, atol=2e-2, rtol=2e-2)
