"""Whether fused layers add what the release's LoRA layers add: looked at once, before rounds are captured.

Each product by itself, not one layer after the other: random adapters write where a model's own weights write nothing,
a norm may make that thousands of times as large, and of sums there most is rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from sglang.srt.lora.utils import LoRABatchInfo

from sglang_dflash.gpu.adapted_layers import AdaptedLayers
from sglang_dflash.round.adapter_buffers import AdapterBuffers
from sglang_dflash.round.fused_check import Way

_COUNTS = (1, 2, 5)  # of rows of requests side by side, besides blocks


class TrialRows:
    """Random rows of requests with LoRA adapters.

    Attributes:
        rows: how many.
    """

    def __init__(self, buffers: AdapterBuffers, info: LoRABatchInfo, rows: int):
        self.rows, self._buffers, self._info = rows, buffers, info

    @torch.no_grad()
    def run(self, way: Way) -> list[torch.Tensor]:
        """Products that such rows have."""
        with self._buffers.over(self._info):
            made = [product.float() for product in way.run(self.rows)]
        if made and made[0].is_cuda:
            torch.cuda.synchronize()  # shows a GPU that failed here, and not later
        return made


def trial_rows(buffers: AdapterBuffers, requests: int, width: int) -> list[TrialRows]:
    """Blocks of one request and of some, and requests of which each has another number of rows.

    Args:
        requests: the most of blocks.
        width: rows of a block.
    """
    most = len(buffers.places)
    blocks = sorted({1, min(requests, most)})
    trials = [TrialRows(buffers, buffers.blocks(n, width), n * width) for n in blocks]
    counts = [*_COUNTS, width, 2 * width + 3][-most:]
    ends = torch.tensor([0, *counts], device=buffers.places.device).cumsum(0)
    return [*trials, TrialRows(buffers, buffers.tiles(ends, sum(counts)), sum(counts))]


def product_ways(layers: AdaptedLayers, names: Sequence[str]) -> list[Way]:
    """The products of fused layers, and the release's; see `first_right`.

    Args:
        names: of both.
    """
    return [
        Way(name, lambda: None, partial(layers.products, fused=fused))
        for name, fused in zip(names, (True, False), strict=True)
    ]
