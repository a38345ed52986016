"""`--speculative-dflash-draft-window-size`: the draft model looks at the end of long contexts only.

What lies before the window stays in the pool, for the target and for whoever shares the prefix; the
draft model is given a table of slots that begins at the window, and lengths counted from there. So
every attention backend reads the window and nothing more. Positions stay those of the whole context,
and the host learns nothing of where a window begins.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

from sglang_dflash.checkpoint.formats.config import Sight
from sglang_dflash.round.block_model import BlockModel
from sglang_dflash.round.opened import Round

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang_dflash.drafter.model import DFlashDraftModel


class DraftWindow:
    """Where the windows of a round's requests begin, and the slots in them.

    Attributes:
        size: tokens of context before the block. A window begins with a page, so the draft model sees up
            to a page less one token more.
        pool: stands for the target's `req_to_token` in the draft model's attention backend.
    """

    def __init__(self, size: int, width: int, page_size: int, whole: ReqToTokenPool):
        """
        Args:
            width: rows of the widest block.
            whole: the target's.
        """
        self.size, self.page_size = size, page_size
        self.longest = size + page_size - 1
        columns = -(-(self.longest + width) // page_size) * page_size
        # One row more, for the requests that only pad a batch.
        self.pool = ReqToTokenPool(whole.size + 1, columns, whole.device, enable_memory_saver=False)
        self._whole = whole.req_to_token

    def first(self, start: torch.Tensor) -> torch.Tensor:
        """Position at which the window before a block begins: [bs] int64 → the same."""
        return (start - self.size).clamp(min=0) // self.page_size * self.page_size

    def look(self, round: Round) -> Round:
        """The round as the draft model sees it; fills its table."""
        first = self.first(round.start)
        table = self.pool.req_to_token
        columns = torch.arange(table.shape[1], device=first.device)
        source = (first[:, None] + columns).clamp(max=self._whole.shape[1] - 1)
        rows = round.rows.clamp(max=len(self._whole) - 1)
        padding = (round.rows >= len(self._whole))[:, None]
        table[round.rows] = torch.where(padding, 0, self._whole[rows[:, None], source])
        return replace(
            round,
            start=round.start - first,
            start_bounds=round.start_bounds.clamp(max=self.longest),
        )

    def page(self, seen: Round, cache_lengths: torch.Tensor, page_table: torch.Tensor) -> None:
        """Fills what paged attention reads of a round that `look` gave.

        Args:
            cache_lengths: [bs] int32, written: keys from the window's first to the block's last.
            page_table: [bs, pages] int32, written.
        """
        first_slots = self.pool.req_to_token[seen.rows, :: self.page_size]
        page_table.copy_(first_slots[:, : page_table.shape[1]] // self.page_size)
        cache_lengths.copy_(seen.start + seen.width)

    @property
    def pages(self) -> int:
        """Pages that window and block can touch."""
        return self.pool.req_to_token.shape[1] // self.page_size

    def narrow(self, model: DFlashDraftModel) -> None:
        """Layers with a longer window of their own see what the others do."""
        for layer in model.layers:
            attention = layer.self_attn
            if attention.sight.window is not None and attention.sight.window >= self.size:
                attention.sight = Sight(causal=attention.sight.causal)


class WindowedModel(BlockModel):
    """The draft model behind its window."""

    def __init__(self, runner: ModelRunner, window: DraftWindow):
        super().__init__(runner)
        self.window = window

    def run(self, round: Round, tokens: torch.Tensor, capture: CaptureHiddenMode) -> Any:
        return super().run(self.window.look(round), tokens, capture)
