"""A round that is opened: what every stage takes what it needs from."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.model_executor.model_runner import ModelRunner
from torch import nn

from sglang_dflash.checkpoint.target_class import is_wrapper
from sglang_dflash.round.clean_pool import CleanPool
from sglang_dflash.round.state import RequestState
from sglang_dflash.round.verify_input import DFlashVerifyInput
from sglang_dflash.two_pools import sliding_slots


@dataclass(frozen=True)
class Round:
    """A block of `width` rows for each of `bs` requests.

    Row 0 holds the bonus token at position `start`, the committed length; row i is at start + i.

    Attributes:
        rows: [bs] int64, the requests' rows in `req_to_token`.
        width: rows of a block; a property of the round, at most the checkpoint's block size.
        start: [bs] int64.
        start_bounds: [bs] int64 on the host, no less than `start`; exact if the host waits for results.
        bonus_tokens: [bs] int64.
        positions: [bs * width] int64, clamped to the context: a row beyond it is never committed.
        slots: [bs * width] int64, KV slot of each row, the same for target and draft model; 0 for a
            row that has none.
        cut: whether a row may have no slot.
        tokens: [bs * width] int64, what the draft model reads, if it was made with the rest.
        rope_deltas: [bs] int64, see `RequestState`; None for a target without M-RoPE.
    """

    rows: torch.Tensor
    width: int
    start: torch.Tensor
    start_bounds: torch.Tensor
    bonus_tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    cut: bool = True
    tokens: torch.Tensor | None = None
    rope_deltas: torch.Tensor | None = None

    @classmethod
    def open(
        cls,
        state: RequestState,
        rows: torch.Tensor,
        start_bounds: torch.Tensor,
        width: int,
        req_to_token: torch.Tensor,
        context_len: int,
        cut: bool = True,
    ) -> Round:
        """A round over slots that `reserve` has written to `req_to_token`.

        Padding requests get slot 0, which SGLang keeps for such writes.
        """
        # A round in vain may begin past the longest context; it must stay in its own row of the table.
        start = state.lengths[rows].clamp(max=req_to_token.shape[1] - width)
        columns = start[:, None] + torch.arange(width, device=rows.device)  # [bs, width]
        padding = (rows == state.padding_row)[:, None]
        slots = req_to_token[torch.where(padding, 0, rows[:, None]), columns].to(torch.int64)
        return cls(
            rows=rows,
            width=width,
            start=start,
            start_bounds=start_bounds,
            bonus_tokens=state.bonus_tokens[rows],
            positions=columns.clamp(max=context_len - 1).flatten(),
            slots=torch.where(padding, 0, slots).flatten(),
            cut=cut,
            rope_deltas=state.rope_deltas_of(rows),
        )

    @property
    def rope_positions(self) -> torch.Tensor:
        """[bs * width] int64, by which a target with M-RoPE rotates: one number for time, height and width of text."""
        return (self.positions.view(-1, self.width) + self.rope_deltas[:, None]).flatten()

    def first(self, requests: int) -> Round:
        """The blocks of the first requests, where the others only pad the batch."""
        rows = requests * self.width
        return replace(
            self,
            rows=self.rows[:requests],
            start=self.start[:requests],
            start_bounds=self.start_bounds[:requests],
            bonus_tokens=self.bonus_tokens[:requests],
            positions=self.positions[:rows],
            slots=self.slots[:rows],
            tokens=None if self.tokens is None else self.tokens[:rows],
            rope_deltas=None if self.rope_deltas is None else self.rope_deltas[:requests],
        )

    def forward_batch(
        self, runner: ModelRunner, tokens: torch.Tensor, capture: CaptureHiddenMode
    ) -> ForwardBatch:
        """The batch with which `runner` runs `tokens` ([bs * width] int64) as the block."""
        pool = runner.token_to_kv_pool
        sliding = sliding_slots(pool, self.slots)
        mrope = self.rope_deltas is not None and runner.model_is_mrope
        return ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=len(self.rows),
            input_ids=tokens,
            req_pool_indices=self.rows,
            seq_lens=self.start,
            seq_lens_cpu=self.start_bounds,
            seq_lens_sum=int(self.start_bounds.sum()),
            orig_seq_lens=self.start,
            out_cache_loc=self.slots,
            out_cache_loc_swa=sliding,
            positions=own_positions(runner.model, self.positions),
            mrope_positions=self.rope_positions.repeat(3, 1) if mrope else None,
            req_to_token_pool=runner.req_to_token_pool,
            token_to_kv_pool=CleanPool(pool, sliding) if self.cut or sliding is not None else pool,
            attn_backend=runner.attn_backend,
            spec_algorithm=runner.spec_algorithm,
            spec_info=DFlashVerifyInput(self.width, self.positions, capture),
            capture_hidden_mode=capture,
            num_token_non_padded_cpu=len(tokens),
        )


def own_positions(model: nn.Module, positions: torch.Tensor) -> torch.Tensor:
    """What a model is given as positions ([rows] int64): a copy for wrappers, as Gemma 3's adds 1 to them in place."""
    return positions.clone() if is_wrapper(type(model)) else positions
