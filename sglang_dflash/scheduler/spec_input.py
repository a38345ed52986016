"""The structs that travel on SGLang's batches as `spec_info`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType

from sglang_dflash.scheduler.reserve import reserve

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch


@dataclass
class DFlashDraftInput(SpecInput):
    """What SGLang's batch carries from one round to the next: only a note that there is a next.

    Bonus tokens and lengths stay in `RequestState`, by request, so nothing has to follow the batch
    when it is filtered or merged.

    Attributes:
        lookahead: tokens beyond those known to be committed that the next round may run: the width
            of a round, and once more for a round whose result the host has not seen yet.
        new_seq_lens: [bs] int64, what the overlapped scheduler takes as the batch's lengths.
    """

    lookahead: int
    new_seq_lens: torch.Tensor | None = None

    # The overlapped scheduler waits on this event if there is one. There is none: the host never
    # needs the result of the round that was just launched.
    verify_done: None = None

    def __post_init__(self) -> None:
        super().__init__(SpecInputType.DFLASH_DRAFT)

    def get_spec_adjust_token_coefficient(self) -> tuple[int, int]:
        return 1, 1

    def filter_batch(self, new_indices: torch.Tensor, has_been_filtered: bool = False) -> None:
        """Nothing is kept by position."""

    def merge_batch(self, other: DFlashDraftInput) -> None:
        """Nothing is kept by position."""

    def prepare_for_decode(self, batch: ScheduleBatch) -> None:
        """Called by the overlapped scheduler before it launches the next round."""
        reserve(batch, self.lookahead)


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

    def generate_attn_arg_prefill(
        self,
        req_pool_indices: torch.Tensor,
        paged_kernel_lens: torch.Tensor,
        paged_kernel_lens_sum: int,
        req_to_token: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        """What flashinfer plans with: KV slots and where each request's begin, rows, and no mask.

        Args:
            paged_kernel_lens: [bs] int64, the starts; the block itself comes on top.
            paged_kernel_lens_sum: no less than their sum.
        """
        from sglang.srt.layers.attention.utils import create_flashinfer_kv_indices_triton

        batch_size, width = len(req_pool_indices), self.draft_token_num
        device, lengths = req_pool_indices.device, paged_kernel_lens + self.draft_token_num
        kv_indptr = torch.zeros(batch_size + 1, dtype=torch.int32, device=device)
        kv_indptr[1:] = torch.cumsum(lengths, dim=0)
        kv_indices = torch.empty(
            paged_kernel_lens_sum + batch_size * width + 256, dtype=torch.int32, device=device
        )
        create_flashinfer_kv_indices_triton[(batch_size,)](
            req_to_token,
            req_pool_indices,
            lengths,
            kv_indptr,
            None,
            kv_indices,
            req_to_token.shape[1],
        )
        qo_indptr = torch.arange(
            0, (batch_size + 1) * width, width, dtype=torch.int32, device=device
        )
        return kv_indices, kv_indptr, qo_indptr, None
