"""LoRA on a CPU: the release's torch_native backend without pinned memory, with what it lacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.lora.backend.torch_backend import (
    TorchNativeLoRABackend,
    TorchNativeLoRABatchInfo,
)
from sglang.srt.lora.torch_ops import sgemm_lora_a_fwd, sgemm_lora_b_fwd
from sglang.srt.lora.utils import generate_sequence_lengths, get_lm_head_pruned_lens

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class CpuLoRABackend(TorchNativeLoRABackend):
    """Of its batch infos the copies on the host are the only ones; a segment is a request, or a row of a head."""

    def prepare_lora_batch(
        self,
        forward_batch: ForwardBatch,
        weight_indices: list[int],
        lora_ranks: list[int],
        scalings: list[float],
        use_cuda_graph: bool,
    ) -> None:
        lengths = generate_sequence_lengths(forward_batch, device="cpu").tolist()
        rest = torch.tensor(lora_ranks, dtype=torch.int32), torch.tensor(scalings)
        self.batch_info = batch_info(lengths, weight_indices, *rest)
        self.lm_head_batch_info = self.lm_head_pass_batch_infos = None
        if (pruned := get_lm_head_pruned_lens(forward_batch)) is None:
            return
        self.lm_head_batch_info = batch_info(pruned, weight_indices, *rest)
        passes = self._get_lm_head_pass_segments(weight_indices, pruned)
        if passes is not None:
            self.lm_head_pass_batch_infos = [
                batch_info(lengths, indices, *rest) for indices, lengths in passes
            ]

    def run_lora_a_sgemm(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        pruned_batch_info: TorchNativeLoRABatchInfo | None = None,
        **rest: Any,
    ) -> torch.Tensor:
        info = pruned_batch_info or self.batch_info
        return sgemm_lora_a_fwd(
            x,
            weights,
            info.weight_indices_cpu,
            info.seg_lens_cpu,
            info.lora_ranks_cpu,
            info.scalings_cpu,
        )

    def run_lora_b_sgemm(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        base_output: torch.Tensor | None = None,
        pruned_batch_info: TorchNativeLoRABatchInfo | None = None,
        **rest: Any,
    ) -> torch.Tensor:
        info = pruned_batch_info or self.batch_info
        return sgemm_lora_b_fwd(
            x,
            weights,
            info.weight_indices_cpu,
            info.seg_lens_cpu,
            info.lora_ranks_cpu,
            torch.tensor([0, weights.shape[-2]]),
            base_output,
        )

    def run_lora_a_embedding(
        self, input_ids: torch.Tensor, weights: torch.Tensor, **rest: Any
    ) -> torch.Tensor:
        """A's columns of each row's token, scaled as the other products with A are: [rows, largest rank]."""
        info = self.batch_info
        owners = info.weight_indices_cpu.repeat_interleave(info.seg_lens_cpu).long()
        # Rows that are nobody's may have a place behind the last, of rank 0.
        columns = weights[owners.clamp(max=len(weights) - 1), :, input_ids]
        rank = torch.arange(weights.shape[1])
        there = rank < info.lora_ranks_cpu[owners, None]
        return columns * (info.scalings_cpu[owners, None] * there).to(columns.dtype)


def batch_info(
    lengths: Sequence[int],
    weight_indices: Sequence[int],
    ranks: torch.Tensor,
    scalings: torch.Tensor,
) -> TorchNativeLoRABatchInfo:
    """Segments of so many rows, and whose adapter each has.

    Args:
        ranks, scalings: [adapters of a batch], of each adapter.
    """
    seg_lens = torch.tensor(lengths, dtype=torch.int32)
    indptr = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    indptr[1:] = seg_lens.cumsum(0)
    indices = torch.tensor(weight_indices, dtype=torch.int32)
    return TorchNativeLoRABatchInfo(
        use_cuda_graph=False,
        bs=len(lengths),
        num_segments=len(lengths),
        seg_indptr=indptr,
        weight_indices=indices,
        lora_ranks=ranks,
        scalings=scalings,
        max_len=max(lengths),
        seg_lens=seg_lens,
        permutation=None,
        expected_tokens=sum(lengths),
        lora_ranks_cpu=ranks,
        seg_indptr_cpu=indptr,
        seg_lens_cpu=seg_lens,
        weight_indices_cpu=indices,
        scalings_cpu=scalings,
    )
