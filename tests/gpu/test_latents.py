"""FA3 over latents of MLA against sums in float32."""

from __future__ import annotations

from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

from sglang_dflash.gpu.fa3_latents import (
    LATENT,
    ROTATED,
    Fa3LatentAttention,
    Fa3LatentSideBySide,
)
from tests.gpu.test_block_attention import needs_hopper

HEADS, SIZE, LONGEST = 16, LATENT + ROTATED, 40_960


class World:
    """Requests with so many keys, which lie in pages of a pool wherever."""

    def __init__(self, lengths: list[int], page_size: int):
        torch.manual_seed(0)
        pages = [-(-length // page_size) for length in lengths]
        pool = MLATokenToKVPool(
            sum(pages) * page_size, page_size, torch.bfloat16, LATENT, ROTATED, 1, "cuda", False
        )
        self.keys = pool.get_key_buffer(0)
        self.keys.copy_(torch.randn(self.keys.shape, device="cuda", dtype=torch.bfloat16))
        shape = (len(lengths), LONGEST // page_size)
        self.table = torch.zeros(shape, dtype=torch.int32, device="cuda")
        order = 1 + torch.randperm(sum(pages), device="cuda").to(torch.int32)
        for row, own in zip(self.table, order.split(pages), strict=True):
            row[: len(own)] = own
        self.counts = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        self.runner = SimpleNamespace(token_to_kv_pool=pool, page_size=page_size, tp_size=1)
        self.runner.model_config = SimpleNamespace(get_num_kv_heads=lambda tp_size: 1)
        self.layer = RadixAttention(HEADS, SIZE, 192**-0.5, 1, 0, v_head_dim=LATENT)
        self.batch = SimpleNamespace(token_to_kv_pool=pool)

    def compare(self, attention: Fa3LatentAttention, widths: list[int]) -> None:
        """Of rows side by side, so many of each request."""
        q = torch.randn(sum(widths), HEADS, SIZE, device="cuda", dtype=torch.bfloat16)
        attention.prepare()
        made = attention.forward(q.flatten(1), None, None, self.layer, self.batch)
        each = zip(made.view(-1, HEADS, LATENT).split(widths), q.split(widths), strict=True)
        for number, (own, rows) in enumerate(each):
            expected = self._sums(number, rows.float())
            torch.testing.assert_close(own.float(), expected, atol=2e-2, rtol=2e-2)

    def _sums(self, number: int, rows: torch.Tensor) -> torch.Tensor:
        length, page_size = int(self.counts[number]), self.runner.page_size
        ids = torch.arange(length, device="cuda")
        slots = self.table[number, ids // page_size].long() * page_size + ids % page_size
        seen = self.keys[slots].view(length, SIZE).float()
        scores = torch.einsum("whs,ks->whk", rows, seen) * self.layer.scaling
        last = length - len(rows) + torch.arange(len(rows), device="cuda")
        weights = scores.masked_fill(ids > last[:, None, None], -torch.inf).softmax(-1)
        return torch.einsum("whk,kl->whl", weights, seen[:, :LATENT])


@needs_hopper
@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("width", [1, 4, 8, 16])
@pytest.mark.parametrize("lengths", [[216], [16, 17, 500, 2048, 1024], [9000], [40, 300] * 20])
def test_as_sums(lengths: list[int], width: int, page_size: int) -> None:
    """Rows see what is before them, whatever the pages that lie between."""
    world = World(lengths, page_size)
    attention = Fa3LatentAttention(world.runner, world.counts, world.table, width, True, False)
    world.compare(attention, [width] * len(lengths))


@needs_hopper
@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize(
    "requests",
    [
        [(16, 216), (16, 3000), (60, 60), (300, 900)],
        [(1, 40), (5, 77), (16, 500), (1, 2048)],
        [(2000, 9000), (48, 48)],
    ],
)
def test_side_by_side(requests: list[tuple[int, int]], page_size: int) -> None:
    """Blocks, some rows of blocks, prompts and chunks of them in one pass."""
    widths, lengths = (list(each) for each in zip(*requests, strict=True))
    world = World(lengths, page_size)
    ends = torch.tensor([0, *accumulate(widths)], dtype=torch.int32, device="cuda")
    given = (world.runner, world.counts, world.table, ends, sum(widths))
    world.compare(Fa3LatentSideBySide(*given), widths)
