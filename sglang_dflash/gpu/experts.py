"""Mixtures of experts inside fused layers: the release's own kernels, without the sum over the ranks."""

from __future__ import annotations

import torch
from sglang.srt.distributed import (
    get_moe_expert_parallel_world_size,
    get_moe_tensor_parallel_world_size,
    get_tensor_model_parallel_world_size,
)
from sglang.srt.layers.moe import (
    get_moe_a2a_backend,
    should_use_flashinfer_cutlass_moe_fp4_allgather,
)
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.models.qwen2_moe import Qwen2MoeSparseMoeBlock
from sglang.srt.models.qwen3_moe import Qwen3MoeSparseMoeBlock
from torch import nn

_SPARSE = (Qwen2MoeSparseMoeBlock, Qwen3MoeSparseMoeBlock)


def is_sparse(mlp: nn.Module) -> bool:
    """Whether it is a mixture of experts that can leave the sum over the ranks to its caller."""
    return any(type(mlp).forward is kind.forward for kind in _SPARSE)


def can_run_experts(mlp: nn.Module) -> bool:
    """Whether the sum of all ranks' parts is what the mixture gives."""
    ranks = get_moe_tensor_parallel_world_size() * get_moe_expert_parallel_world_size()
    return (
        ranks == get_tensor_model_parallel_world_size()
        and get_moe_a2a_backend().is_none()
        and not should_use_flashinfer_cutlass_moe_fp4_allgather()
        and not mlp.experts.reduce_results
    )


def run_experts(mlp: nn.Module, x: torch.Tensor, forward_batch: ForwardBatch) -> torch.Tensor:
    """[rows, hidden] → this rank's part of the same; may write to `x`.

    The release leaves the sum out where it fuses it with the next layer's norm itself.
    """
    return mlp(x, forward_batch, should_allreduce_fusion=True).contiguous()
