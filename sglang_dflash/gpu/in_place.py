"""Layers of a target that take fewer launches while blocks are captured, where it cannot be fused whole.

Prefill and whatever else the release runs stay as they are, but for gates of shared experts: only a block whose
attention is ours takes the other way.
"""

from __future__ import annotations

from sglang.srt.models.qwen2_moe import Qwen2MoeSparseMoeBlock
from sglang.srt.models.qwen3 import Qwen3Attention
from torch import nn

from sglang_dflash.gpu import gemma3
from sglang_dflash.gpu.fused_attention import can_fuse
from sglang_dflash.gpu.qwen3 import FusedQwen3Attention
from sglang_dflash.gpu.shared_experts import FusedGateBlock, can_fuse_gate

_FUSED: dict[type[nn.Module], type[nn.Module]] = {
    Qwen3Attention: FusedQwen3Attention,
    Qwen2MoeSparseMoeBlock: FusedGateBlock,
}
_FUSED |= gemma3.FUSED
_BACK = {fused: release for release, fused in _FUSED.items()}


def fuse_in_place(model: nn.Module) -> int:
    """Makes those layers of a model fused ones that can be; how many there are."""
    found = [module for module in model.modules() if type(module) is Qwen3Attention]
    found = [attention for attention in found if can_fuse(attention)]
    found += filter(can_fuse_gate, model.modules())
    if gemma3.can_fuse_layers_of_gemma3(model):
        found += [module for module in model.modules() if type(module) in gemma3.FUSED]
    for module in found:
        module.__class__ = _FUSED[type(module)]  # the same weights under the same names
    return len(found)


def restore(model: nn.Module) -> None:
    """Makes them again what they were."""
    for module in model.modules():
        module.__class__ = _BACK.get(type(module), type(module))
