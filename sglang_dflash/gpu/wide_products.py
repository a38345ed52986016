"""Matrix products that compute the first half of all LoRA adapters with them.

The first matrices of the adapters at all places lie below a product's weight, as more rows of it. So one product gives
for each row also what all adapters make of it, and only the second matrices, of the row's own adapter, are left.
These few rows cost what reading them costs; a launch of its own costs more.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.lora.layers import (
    BaseLayerWithLoRA,
    ColumnParallelLinearWithLoRA,
    MergedColumnParallelLinearWithLoRA,
    QKVParallelLinearWithLoRA,
    RowParallelLinearWithLoRA,
)
from torch import nn

from sglang_dflash.gpu.kernels.adapter_sums import Wide

if TYPE_CHECKING:
    from sglang.srt.lora.mem_pool import LoRAMemoryPool

# Of each kind of product: its two buffers of adapters.
BUFFERS = {
    QKVParallelLinearWithLoRA: ("A_buffer_qkv", "B_buffer_qkv"),
    MergedColumnParallelLinearWithLoRA: ("A_buffer_gate_up", "B_buffer_gate_up"),
    ColumnParallelLinearWithLoRA: ("A_buffer", "B_buffer"),
    RowParallelLinearWithLoRA: ("A_buffer", "B_buffer"),
}
# Ranks of the adapters at all places, all of which a launch multiplies for every row: measured with 144. Of many more
# it is faster to leave out what a row does not need.
_MOST = 256
_ROUND = 64  # rows that a tile of a product has, at most those that all have
_LEAST_TILE, _MOST_TILE = 16, 64  # columns that a program adds to


def buffers_of(linear: BaseLayerWithLoRA) -> tuple[torch.Tensor, torch.Tensor]:
    """First and second matrices of all adapters of a product, as the release keeps them."""
    first, second = BUFFERS[type(linear)]
    return getattr(linear, first), getattr(linear, second)


def slices_of(linear: BaseLayerWithLoRA) -> list[int]:
    """Columns of each of the products that lie side by side in one."""
    size = buffers_of(linear)[1].shape[1]
    return list(getattr(linear.base_layer, "output_partition_sizes", [size]))


def widen_products(model: nn.Module, pool: LoRAMemoryPool) -> dict[nn.Module, Wide]:
    """Puts first matrices below the weights of a target's products, where that pays.

    Before graphs are captured: weights and matrices move. Both stay what they are to the release, which goes on
    reading and writing them.

    Args:
        model: with the release's LoRA layers.
        pool: that has the adapters of these layers.

    Returns:
        By LoRA layer.
    """
    made = {}
    for linear in _widened(model):
        made[linear] = _widen(linear, pool)
        if made[linear].weight.is_cuda:
            torch.cuda.empty_cache()  # none of what was freed is as large as what comes next
    return made


def _widened(model: nn.Module) -> Iterator[BaseLayerWithLoRA]:
    for module in model.modules():
        if type(module) in BUFFERS and module.set_lora and _can_widen(module):
            yield module


def _can_widen(linear: BaseLayerWithLoRA) -> bool:
    base, (a, b) = linear.base_layer, buffers_of(linear)
    plain = isinstance(base.quant_method, UnquantizedLinearMethod) and base.bias is None
    if not plain or not base.weight.is_contiguous() or base.weight.dtype != a.dtype:
        return False
    slices = slices_of(linear)
    few = b.shape[0] * b.shape[2] <= _MOST and len(slices) <= 3 and sum(slices) == b.shape[1]
    return few and gcd(*slices) % _LEAST_TILE == 0


def _widen(linear: BaseLayerWithLoRA, pool: LoRAMemoryPool) -> Wide:
    base, (a, b), slices = linear.base_layer, buffers_of(linear), slices_of(linear)
    (size, depth), added = base.weight.shape, a.shape[0] * a.shape[1]
    weight = base.weight.new_zeros(-(-(size + added) // _ROUND) * _ROUND, depth)
    below = weight[size : size + added].view(a.shape)
    weight[:size].copy_(base.weight.data)
    below.copy_(a)
    base.weight.data = weight[:size]
    for layers in pool.A_buffer.values():
        layers[:] = [below if each is a else each for each in layers]
    setattr(linear, BUFFERS[type(linear)][0], below)
    begins = tuple(sum(slices[:n]) for n in range(len(slices)))
    common = gcd(*slices)
    return Wide(weight, b, begins, min(_MOST_TILE, common & -common))
