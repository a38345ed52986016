"""Mixtures whose shared experts have a gate: it is one kernel instead of a product, a sigmoid and a multiplication."""

from __future__ import annotations

import torch
from sglang.srt.batch_invariant_ops import is_batch_invariant_mode_enabled
from sglang.srt.models.qwen2_moe import Qwen2MoeSparseMoeBlock
from torch import nn

from sglang_dflash.gpu.kernels.shared_gate import gate_shared


class FusedGateBlock(Qwen2MoeSparseMoeBlock):
    """The release's block of experts, its gate fused."""

    def _forward_shared_experts(self, hidden_states: torch.Tensor) -> torch.Tensor:
        made = self.shared_expert(hidden_states)
        return gate_shared(hidden_states, self.shared_expert_gate.weight, made)


def can_fuse_gate(block: nn.Module) -> bool:
    """Whether a block's gate is what the kernel computes.

    Deterministic inference has its own products, of which plain decoding makes the gate.
    """
    gate = getattr(block, "shared_expert_gate", None)
    return (
        type(block) is Qwen2MoeSparseMoeBlock
        and block.shared_expert is not None
        and type(gate) is nn.Linear
        and gate.bias is None
        and not is_batch_invariant_mode_enabled()
    )
