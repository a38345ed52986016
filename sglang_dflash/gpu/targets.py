"""Targets in few launches while blocks are captured: Llama's, Qwen's, and mixtures of experts of Qwen's.

Prefill and whatever else the release runs stay as they are. A target is taken by the code that its parts run:
a model class of the release's that inherits its forward passes from these is as good as they are, and one that
changes any of them (residuals with factors, other norms, gated attention) is left to the release.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from sglang.srt.distributed import get_tensor_model_parallel_world_size
from sglang.srt.layers.communicator import LayerCommunicator, ScatterMode
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.models.llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaMLP,
    LlamaModel,
)
from sglang.srt.models.qwen2 import (
    Qwen2Attention,
    Qwen2DecoderLayer,
    Qwen2ForCausalLM,
    Qwen2MLP,
    Qwen2Model,
)
from sglang.srt.models.qwen2_moe import (
    Qwen2MoeAttention,
    Qwen2MoeDecoderLayer,
    Qwen2MoeForCausalLM,
    Qwen2MoeModel,
)
from sglang.srt.models.qwen3 import Qwen3Attention, Qwen3DecoderLayer, Qwen3ForCausalLM
from sglang.srt.models.qwen3_moe import (
    Qwen3MoeAttention,
    Qwen3MoeDecoderLayer,
    Qwen3MoeForCausalLM,
)
from torch import nn

from sglang_dflash.gpu.adapted_layers import AdaptedLayers
from sglang_dflash.gpu.experts import is_sparse
from sglang_dflash.gpu.fused_layers import FusedLayers, fuse_layers
from sglang_dflash.gpu.kernels.adapter_sums import Wide
from sglang_dflash.gpu.rank_sums import RankSums
from sglang_dflash.gpu.tilings import Tilings

MODELS = (
    LlamaForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    Qwen2MoeForCausalLM,
    Qwen3MoeForCausalLM,
)
BODIES = (LlamaModel, Qwen2Model, Qwen2MoeModel)
LAYERS = (
    LlamaDecoderLayer,
    Qwen2DecoderLayer,
    Qwen3DecoderLayer,
    Qwen2MoeDecoderLayer,
    Qwen3MoeDecoderLayer,
)
ATTENTION = (
    LlamaAttention,
    Qwen2Attention,
    Qwen3Attention,
    Qwen2MoeAttention,
    Qwen3MoeAttention,
)
MLPS = (LlamaMLP, Qwen2MLP)
# What forward passes of attention call of their own class, where it has them.
_STEPS = (
    "forward",
    "forward_prepare",
    "forward_prepare_native",
    "apply_qk_norm_rope",
    "forward_core",
)


@dataclass(frozen=True)
class Body:
    """All of a target but its head, its layers fused."""

    model: nn.Module
    layers: FusedLayers

    def __call__(
        self, ids: torch.Tensor, positions: torch.Tensor, batch: ForwardBatch
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Token ids, positions → hidden states [rows, hidden] and those of the tapped layers."""
        x = self.model.embed_tokens(ids)
        return self.layers.run(x, positions, batch, self.model.layers_to_capture)

    def adapted(self, wide: Mapping[nn.Module, Wide]) -> Body | None:
        """The same with the release's LoRA layers, which must be in the target; None where it has others.

        Args:
            wide: of LoRA layers whose products have adapters in them.
        """
        layers = AdaptedLayers.of(self.layers, wide)
        return None if layers is None else replace(self, layers=layers)


def fused_body(
    model: nn.Module, tilings: Tilings, ranks: RankSums | None, rows: Iterable[int] = ()
) -> Body | None:
    """All of a target but its head, its layers fused; None where they cannot be; see `fuse_layers`."""
    if not can_fuse_target(model):
        return None
    body = model.model
    layers = fuse_layers(body.layers, body.norm, tilings, ranks, rows)
    return None if layers is None else Body(body, layers)


def can_fuse_target(model: nn.Module) -> bool:
    """Whether a target computes what fused layers do, as far as its code tells."""
    body = getattr(model, "model", None)
    if not _runs(model, MODELS) or not _runs(body, BODIES) or body.pp_group.world_size > 1:
        return False
    return all(
        _runs(layer, LAYERS)
        and _runs(layer.self_attn, ATTENTION, _STEPS)
        and (is_sparse(layer.mlp) or _runs(layer.mlp, MLPS))
        and _sums_over_all_ranks(getattr(layer, "layer_communicator", None))
        for layer in body.layers
    )


def _runs(
    module: nn.Module | None, classes: tuple[type, ...], steps: tuple[str, ...] = ("forward",)
) -> bool:
    """Whether a module runs the code of one of the classes."""
    return any(
        isinstance(module, kind)
        and all(getattr(type(module), step, None) is getattr(kind, step, None) for step in steps)
        for kind in classes
    )


def _sums_over_all_ranks(communicator: LayerCommunicator | None) -> bool:
    """Whether every rank has all rows, and all ranks' parts of a row are summed up."""
    if communicator is None:
        return True
    modes, context = communicator.layer_scatter_modes, communicator._context
    return (
        modes.mlp_mode == ScatterMode.FULL
        and modes.layer_output_mode == ScatterMode.TP_ATTN_FULL
        and context.attn_tp_size == context.tp_size == get_tensor_model_parallel_world_size()
    )
