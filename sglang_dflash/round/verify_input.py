"""What a forward batch says of its block: the struct that travels on it as `spec_info`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType


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
