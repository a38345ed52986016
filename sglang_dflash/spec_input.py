"""The structs that travel on SGLang's batches as `spec_info`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType


@dataclass
class DFlashDraftInput(SpecInput):
    """What a request carries from one round to the next.

    Attributes:
        bonus_tokens: [bs] int64, the last token of each request, which no model has run yet.
    """

    bonus_tokens: torch.Tensor

    def __post_init__(self) -> None:
        super().__init__(SpecInputType.DFLASH_DRAFT)

    def get_spec_adjust_token_coefficient(self) -> tuple[int, int]:
        return 1, 1

    def filter_batch(self, new_indices: torch.Tensor, has_been_filtered: bool = False) -> None:
        """Keeps the requests at `new_indices` ([n] int64).

        `has_been_filtered` is EAGLE's: its first worker drops finished requests itself. Ours
        leaves that to the batch, so the bonus tokens always have the batch's length.
        """
        self.bonus_tokens = self.bonus_tokens[new_indices]

    def merge_batch(self, other: DFlashDraftInput) -> None:
        """Appends the requests of `other`."""
        self.bonus_tokens = torch.cat([self.bonus_tokens, other.bonus_tokens])


@dataclass
class DFlashVerifyInput(SpecInput):
    """A block per request, run by the draft model or by the target.

    Attributes:
        draft_token_num: width of the block, the bonus token included.
        positions: [bs * draft_token_num] int64, position of each row.
        capture_hidden_mode: FULL for the target (its hidden states become context), else NULL.
    """

    draft_token_num: int
    positions: torch.Tensor
    capture_hidden_mode: CaptureHiddenMode

    # Attention backends of the release read these; a block is a chain and needs no tree mask.
    custom_mask: None = None
    topk: int = 1

    def __post_init__(self) -> None:
        super().__init__(SpecInputType.DFLASH_VERIFY)

    @property
    def num_tokens_per_req(self) -> int:
        return self.draft_token_num

    def get_spec_adjust_token_coefficient(self) -> tuple[int, int]:
        return self.draft_token_num, self.draft_token_num
