"""K and V in pages of a pool, for attention of random queries over them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_dflash.gpu.kernels.block_tiles import Tile

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter multiplies bfloat16 as the integers in which it keeps them.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
TOLERANCE = {torch.float32: 5e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
SMALL = Tile(16, 16, 4, 2)


def pool(
    lengths: Sequence[int], page_size: int, heads: int, dim: int, v_dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """K, V and page table of requests whose pages lie in random order; what no request has is NaN."""
    pages = -(-max(*lengths, 1) // page_size)
    table = torch.randperm(len(lengths) * pages + 1)[1:].view(len(lengths), pages)
    slots = (len(lengths) * pages + 1) * page_size
    own = torch.zeros(slots, dtype=torch.bool)
    for request, length in enumerate(lengths):
        key = torch.arange(length)
        own[table[request, key // page_size] * page_size + key % page_size] = True
    caches = []
    for size in (dim, v_dim):
        cache = torch.randn(slots, heads, size)
        cache[~own] = float("nan")
        caches.append(cache.to(dtype).to(DEVICE))
    return (*caches, table.to(torch.int32).to(DEVICE))
