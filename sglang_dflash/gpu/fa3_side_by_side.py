"""FlashAttention 3 over rows of requests that have different numbers of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from sglang.srt.batch_invariant_ops import is_batch_invariant_mode_enabled

from sglang_dflash.gpu.fa3_attention import Fa3BlockAttention

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner


class Fa3SideBySide(Fa3BlockAttention):
    """Causal; where each request's rows end, the device knows."""

    def __init__(
        self,
        runner: ModelRunner,
        cache_lengths: torch.Tensor,
        page_table: torch.Tensor,
        ends: torch.Tensor,
        rows: int,
        short: bool,
    ):
        """
        Args:
            ends: [bs + 1] int32, where each request's rows begin, and end; filled each pass.
            rows: the most that a request can have.
            short: whether contexts are short enough not to split their keys.
        """
        super().__init__(runner, cache_lengths, page_table, 1, causal=True, short=short)
        self.width, self.cu_seqlens_q = rows, ends
        # Deterministic inference wants sums over keys in one order, whatever the batch.
        self.num_splits = 1 if short or is_batch_invariant_mode_enabled() else 0
