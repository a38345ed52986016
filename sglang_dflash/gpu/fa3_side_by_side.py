"""FlashAttention 3 over rows of requests that have different numbers of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang_dflash.gpu.fa3_attention import Fa3BlockAttention

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

_SMALL_TILE = 64  # rows of FA3's smaller tile, query heads that share a KV head side by side
_FEW_ROWS = 1024  # of a pass, up to which most requests have few of them


class Fa3SideBySide(Fa3BlockAttention):
    """Causal; where each request's rows end, the device knows."""

    def __init__(
        self,
        runner: ModelRunner,
        cache_lengths: torch.Tensor,
        page_table: torch.Tensor,
        ends: torch.Tensor,
        rows: int,
    ):
        """
        Args:
            ends: [bs + 1] int32, where each request's rows begin, and end; filled each pass.
            rows: the most that a request can have.
        """
        super().__init__(runner, cache_lengths, page_table, rows, causal=True, short=True)
        self.ends = self.cu_seqlens_q = ends
        # The launch that would put parts of the keys together has programs for as many rows of every request as one
        # can have, nearly all of them empty: it takes longer than attention itself.
        self.num_splits = 1
        if rows <= _FEW_ROWS:
            config, tp_size = runner.model_config, runner.tp_size
            heads = config.num_attention_heads // tp_size
            self.longest = max(1, _SMALL_TILE * config.get_num_kv_heads(tp_size) // heads)
