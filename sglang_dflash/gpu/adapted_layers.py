"""Fused layers of requests that may each have a LoRA adapter.

What adapters add goes into products before anything reads them; the one in front of a gate is the layer's own for that,
whole. All else is what `FusedLayers` runs. Which adapter a row has, the release's LoRA backend has been told.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sglang.srt.distributed import tensor_model_parallel_all_reduce
from sglang.srt.layers.linear import RowParallelLinear
from sglang.srt.lora.layers import (
    BaseLayerWithLoRA,
    ColumnParallelLinearWithLoRA,
    MergedColumnParallelLinearWithLoRA,
    QKVParallelLinearWithLoRA,
    RowParallelLinearWithLoRA,
)
from torch import nn

from sglang_dflash.gpu.fused_layers import FusedLayers, products_of, whole_product
from sglang_dflash.gpu.kernels.adapter_products import (
    Adapted,
    add_expanded,
    expanded_swiglu,
    shrink,
)
from sglang_dflash.gpu.kernels.swiglu import swiglu
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

    def products(self, rows: int, *, fused: bool) -> list[torch.Tensor]:
        """Random rows, the same on all ranks, through one product of each shape that may have an adapter.

        Args:
            fused: as they are in `run`, instead of as the release has them; summed over the ranks either way.

        Returns:
            [rows, out] each, after the gate where one follows.
        """
        adapted = {
            (kind, *(buffer.shape for buffer in _buffers(linear))): linear
            for linear, kind in products_of(self, rows)
            if isinstance(linear, BaseLayerWithLoRA)
        }
        generator, made = torch.Generator().manual_seed(0), []
        for (kind, a, _), linear in adapted.items():
            weight = self.last_norm.weight
            x = torch.randn(rows, a[-1], generator=generator).to(weight.device, weight.dtype)
            if fused:
                y = self._product(linear, x, kind)
                made.append(_summed(linear, y.sum(0).to(x.dtype) if y.dim() == 3 else y))
            else:
                y = linear(x)[0]
                made.append(swiglu(y) if kind is Kind.SWIGLU else y)
        return made

    def _product(self, linear: nn.Module, x: torch.Tensor, kind: Kind) -> torch.Tensor:
        if not isinstance(linear, BaseLayerWithLoRA):
            return super()._product(linear, x, kind)
        base, its = linear.base_layer, (_adapted(linear), linear.lora_backend.batch_info.grouped)
        shrunk = shrink(x, *its)
        if kind is Kind.SWIGLU:
            return expanded_swiglu(whole_product(base, x), shrunk, *its)
        y = super()._product(base, x, kind)
        add_expanded(y if y.dim() == 2 else y[0], shrunk, *its)
        return y


def _summed(linear: BaseLayerWithLoRA, y: torch.Tensor) -> torch.Tensor:
    """A product of which other ranks have parts, as the release leaves it."""
    base = linear.base_layer
    parts = isinstance(base, RowParallelLinear) and base.reduce_results and base.tp_size > 1
    return tensor_model_parallel_all_reduce(y) if parts else y


def _buffers(linear: BaseLayerWithLoRA) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = _BUFFERS[type(linear)]
    return getattr(linear, first), getattr(linear, second)


def _adapted(linear: BaseLayerWithLoRA) -> Adapted:
    a, b = _buffers(linear)
    slices = getattr(linear.base_layer, "output_partition_sizes", [b.shape[1]])
    return Adapted(a, b, linear.output_offset, max(slices))
