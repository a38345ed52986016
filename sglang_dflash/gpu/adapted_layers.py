"""Fused layers of requests that may each have a LoRA adapter.

Products with adapters are the layer's own, whole, and what adapters add goes into them before anything reads them; all
else is what `FusedLayers` runs. Which adapter a row has, the release's LoRA backend has been told.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from sglang.srt.lora.layers import (
    BaseLayerWithLoRA,
    ColumnParallelLinearWithLoRA,
    MergedColumnParallelLinearWithLoRA,
    QKVParallelLinearWithLoRA,
    RowParallelLinearWithLoRA,
)
from sglang.srt.lora.utils import LoRABatchInfo
from torch import nn

from sglang_dflash.gpu.fused_layers import FusedLayers, whole_product
from sglang_dflash.gpu.kernels.adapter_products import (
    Adapted,
    Segments,
    adapted_swiglu,
    add_adapted,
)
from sglang_dflash.gpu.tilings import Kind

# Of each kind of product: its two buffers of adapters.
_BUFFERS = {
    QKVParallelLinearWithLoRA: ("A_buffer_qkv", "B_buffer_qkv"),
    MergedColumnParallelLinearWithLoRA: ("A_buffer_gate_up", "B_buffer_gate_up"),
    ColumnParallelLinearWithLoRA: ("A_buffer", "B_buffer"),
    RowParallelLinearWithLoRA: ("A_buffer", "B_buffer"),
}


@dataclass(frozen=True)
class AdaptedLayers(FusedLayers):
    """Decoder layers whose products may have adapters."""

    @classmethod
    def of(cls, fused: FusedLayers) -> AdaptedLayers | None:
        """The same layers with the release's LoRA layers in them; None where one is not known here."""
        wrapped = [
            module
            for layer in fused.layers
            for module in layer.modules()
            if isinstance(module, BaseLayerWithLoRA)
        ]
        if not all(type(module) in _BUFFERS and module.set_lora for module in wrapped):
            return None
        return cls(fused.layers, fused.last_norm, fused.tilings, fused.ranks)

    def _product(self, linear: nn.Module, x: torch.Tensor, kind: Kind) -> torch.Tensor:
        if not isinstance(linear, BaseLayerWithLoRA):
            return super()._product(linear, x, kind)
        y = whole_product(linear.base_layer, x)
        given = (y, x, _adapted(linear), _segments(linear.lora_backend.batch_info))
        if kind is Kind.SWIGLU:
            return adapted_swiglu(*given)
        add_adapted(*given)
        return y


def _adapted(linear: BaseLayerWithLoRA) -> Adapted:
    a, b = (getattr(linear, name) for name in _BUFFERS[type(linear)])
    slices = getattr(linear.base_layer, "output_partition_sizes", [b.shape[1]])
    return Adapted(a, b, linear.output_offset, max(slices))


def _segments(info: LoRABatchInfo) -> Segments:
    """Of rows that lie in their requests' order, as those of `AdapterBuffers` do."""
    longest = max(16, triton.next_power_of_2(info.max_len))
    return Segments(info.seg_indptr, info.weight_indices, info.lora_ranks, info.scalings, longest)
