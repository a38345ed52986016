"""What sliding layers read of contexts where they have a pool of their own: the pages that a window reaches."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from sglang_dflash.two_pools import has_two

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

_ALIGNED = 256  # keys; kernels step over them in smaller tiles, and sum up the same keys alike


class SlidingKeys:
    """A page table that begins where windows do, and lengths counted from there; filled on the device.

    What lies before it has no slot there any more. Windows and rows are the same wherever keys are counted from, and
    chunks if that is where one begins.

    Attributes:
        lengths: [bs] int32, keys of each request, its rows included.
        table: [bs, pages] int32, of the sliding layers' pool.
    """

    def __init__(self, runner: ModelRunner, requests: int, pages: int, rows: int):
        """
        Args:
            pages: that the longest context has.
            rows: the most that a request has.
        """
        self._page_size, self._reach = runner.page_size, runner.sliding_window_size + rows
        self._to_sliding = runner.token_to_kv_pool_allocator.full_to_swa_index_mapping
        chunk = runner.attention_chunk_size or 1
        self._aligned = math.lcm(_ALIGNED, chunk, self._page_size) // self._page_size
        device = self._to_sliding.device
        count = min(pages, self._reach // self._page_size + 2 + self._aligned)
        self.lengths = torch.zeros(requests, dtype=torch.int32, device=device)
        self.table = torch.zeros(requests, count, dtype=torch.int32, device=device)
        self._columns = torch.arange(count, device=device)

    def fill(self, lengths: torch.Tensor, table: torch.Tensor) -> None:
        """
        Args:
            lengths: [bs] int32, keys of each request.
            table: [bs, pages] int32, of the other layers' pool.
        """
        first = (lengths - self._reach).clamp(min=0) // self._page_size
        first = first // self._aligned * self._aligned
        columns = (first[:, None] + self._columns).clamp(max=table.shape[1] - 1)
        slots = table.gather(1, columns).long() * self._page_size
        self.table.copy_(self._to_sliding[slots] // self._page_size)
        self.lengths.copy_(lengths - first * self._page_size)


def sliding_keys(runner: ModelRunner, requests: int, pages: int, rows: int) -> SlidingKeys | None:
    """None where all layers share one pool."""
    there = has_two(runner.token_to_kv_pool)
    return SlidingKeys(runner, requests, pages, rows) if there else None
