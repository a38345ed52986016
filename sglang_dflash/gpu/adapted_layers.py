"""Fused layers of requests that may each have a LoRA adapter.

What adapters add goes into products before anything reads them; the one in front of a gate is the layer's own for that,
whole. All else is what `FusedLayers` runs. Which adapter a row has, the release's LoRA backend has been told.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from sglang.srt.distributed import tensor_model_parallel_all_reduce
from sglang.srt.layers.linear import RowParallelLinear
from sglang.srt.lora.layers import BaseLayerWithLoRA
from torch import nn
from torch.nn.functional import linear as product

from sglang_dflash.gpu.fused_layers import FusedLayers, products_of, whole_product
from sglang_dflash.gpu.kernels.adapter_products import (
    Adapted,
    add_expanded,
    expanded_swiglu,
    shrink,
)
from sglang_dflash.gpu.kernels.adapter_sums import Wide, add_second_halves
from sglang_dflash.gpu.kernels.skinny_matmul import ROOMS, launch, room_for
from sglang_dflash.gpu.kernels.swiglu import swiglu
from sglang_dflash.gpu.tilings import Key, Kind
from sglang_dflash.gpu.wide_products import BUFFERS, buffers_of, slices_of


@dataclass(frozen=True)
class AdaptedLayers(FusedLayers):
    """Decoder layers whose products may have adapters.

    Attributes:
        wide: of LoRA layers whose products have the first matrices of adapters in them.
    """

    wide: Mapping[nn.Module, Wide]

    @classmethod
    def of(cls, fused: FusedLayers, wide: Mapping[nn.Module, Wide]) -> AdaptedLayers | None:
        """The same layers with the release's LoRA layers in them; None where one is not known here."""
        wrapped = [
            module
            for layer in fused.layers
            for module in layer.modules()
            if isinstance(module, BaseLayerWithLoRA)
        ]
        if not all(type(module) in BUFFERS and module.set_lora for module in wrapped):
            return None
        here = {module: wide[module] for module in wrapped if module in wide}
        made = cls(fused.layers, fused.last_norm, fused.tilings, fused.ranks, here)
        made._find_tilings()
        return made

    @property
    def all_are_wide(self) -> bool:
        """Whether no product asks for rows by their adapters."""
        return all(
            linear in self.wide
            for linear, _ in products_of(self, 1)
            if isinstance(linear, BaseLayerWithLoRA)
        )

    def products(self, rows: int, *, fused: bool) -> list[torch.Tensor]:
        """Random rows, the same on all ranks, through one product of each shape that may have an adapter.

        Args:
            fused: as they are in `run`, instead of as the release has them; summed over the ranks either way.

        Returns:
            [rows, out] each, after the gate where one follows.
        """
        adapted = {
            (kind, *(buffer.shape for buffer in buffers_of(linear))): linear
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
        base, info = linear.base_layer, linear.lora_backend.batch_info
        if (wide := self.wide.get(linear)) is not None:
            y = self._wide_product(wide, x)
            return add_second_halves(y, wide, info.owners, swiglu=kind is Kind.SWIGLU)
        its = _adapted(linear), info.grouped
        shrunk = shrink(x, *its)
        if kind is Kind.SWIGLU:
            return expanded_swiglu(whole_product(base, x), shrunk, *its)
        y = super()._product(base, x, kind)
        add_expanded(y if y.dim() == 2 else y[0], shrunk, *its)
        return y

    def _wide_product(self, wide: Wide, x: torch.Tensor) -> torch.Tensor:
        """[rows, in] → [rows, wide], or the parts of it, [parts, rows, wide] float32."""
        key = _wide_key(wide, room_for(len(x)))
        if key is not None and (tiling := self.tilings.get(key)) is not None:
            return launch(x, wide.weight, tiling, False)
        return product(x, wide.weight)

    def _find_tilings(self) -> None:
        weights: dict[Key, list[torch.Tensor]] = {}
        for room in ROOMS:
            for wide in self.wide.values():
                if (key := _wide_key(wide, room)) is not None:
                    weights.setdefault(key, []).append(wide.weight)
        self.tilings.find(weights)


def _wide_key(wide: Wide, room: int | None) -> Key | None:
    """What a tiling is found by; None where there is none for so many rows, or this dtype."""
    if room is None or wide.weight.dtype != torch.bfloat16:
        return None
    return Key(*wide.weight.shape, Kind.SUMMED, room)


def _summed(linear: BaseLayerWithLoRA, y: torch.Tensor) -> torch.Tensor:
    """A product of which other ranks have parts, as the release leaves it."""
    base = linear.base_layer
    parts = isinstance(base, RowParallelLinear) and base.reduce_results and base.tp_size > 1
    return tensor_model_parallel_all_reduce(y) if parts else y


def _adapted(linear: BaseLayerWithLoRA) -> Adapted:
    return Adapted(*buffers_of(linear), linear.output_offset, max(slices_of(linear)))
