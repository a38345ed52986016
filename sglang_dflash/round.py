"""One round over a decode batch, from which every stage takes what it needs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from sglang.srt.managers.schedule_batch import ModelWorkerBatch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.model_runner import ModelRunner

from sglang_dflash.spec_input import DFlashVerifyInput


@dataclass(frozen=True)
class Round:
    """A block of `width` rows for each of `bs` requests.

    Row 0 holds the bonus token at position `start`, the committed length; row i is at start + i.

    Attributes:
        batch: SGLang's view of the requests; its `seq_lens` ([bs] int64) are the starts.
        width: rows of a block; a property of the round, at most the checkpoint's block size.
        bonus_tokens: [bs] int64.
        positions: [bs * width] int64, clamped to the context: a row beyond it is never committed.
        slots: [bs * width] int64, KV slot of each row, the same for target and draft model.
    """

    batch: ModelWorkerBatch
    width: int
    bonus_tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor

    @classmethod
    def open(
        cls,
        batch: ModelWorkerBatch,
        bonus_tokens: torch.Tensor,
        width: int,
        req_to_token: torch.Tensor,
        context_len: int,
    ) -> Round:
        """A round over slots that `reserve` has written to `req_to_token`."""
        rows = torch.arange(width, device=batch.seq_lens.device)
        columns = batch.seq_lens[:, None] + rows  # [bs, width]
        slots = req_to_token[batch.req_pool_indices[:, None], columns]
        positions = columns.clamp(max=context_len - 1)
        return cls(batch, width, bonus_tokens, positions.flatten(), slots.flatten().to(torch.int64))

    def forward_batch(self, runner: ModelRunner, tokens: torch.Tensor, capture: CaptureHiddenMode) -> ForwardBatch:
        """The batch with which `runner` runs `tokens` ([bs * width] int64) as the block."""
        spec_info = DFlashVerifyInput(self.width, self.positions, capture)
        batch = replace(
            self.batch,
            forward_mode=ForwardMode.TARGET_VERIFY,
            input_ids=tokens,
            out_cache_loc=self.slots,
            spec_info=spec_info,
            capture_hidden_mode=capture,
        )
        return ForwardBatch.init_new(batch, runner)
