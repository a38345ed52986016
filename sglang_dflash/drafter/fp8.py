"""A drafter that runs its layers and its LM head in FP8 (`gpu/fp8.py`).

What is accepted is the target's choice whatever was drafted, so that answers stay the same, and drafts are about as
often right. What context K/V are made of stays as it is stored: it is read for as long as a request runs.
"""

from __future__ import annotations

import torch
from torch import nn

from sglang_dflash.gpu.fp8 import Fp8Method, Fp8Weight
from sglang_dflash.gpu.fp8_times import find_ways

_MULTIPLE = 16  # sizes that the kernels take


class Fp8Products:
    """Products of a drafter in FP8, beside what they are otherwise until one of both is kept.

    Attributes:
        in_use: whether they are.
    """

    def __init__(self, model: nn.Module, least: int):
        """
        Args:
            model: a `DFlashDraftModel`, loaded and finished.
            least: elements of a weight that is to be one.
        """
        self._model, self.in_use = model, False
        self._plain = {each: (each.quant_method, each.weight) for each in _linears(model, least)}
        self._fp8 = {each: Fp8Weight(weight) for each, (_, weight) in self._plain.items()}
        head = model.vocabulary.plain_head
        self._head = Fp8Weight(head) if head is not None and _pays(head, least) else None
        weights = [*self._fp8.values(), *([self._head] if self._head else ())]
        find_ways(weights, model.norm.weight.dtype)

    @property
    def any(self) -> bool:
        return bool(self._fp8) or self._head is not None

    def use(self, in_fp8: bool) -> None:
        """Which of both the model runs with; only before `keep`."""
        for linear, weight in self._fp8.items():
            made = Fp8Method(weight), nn.Parameter(weight.values, requires_grad=False)
            linear.quant_method, linear.weight = made if in_fp8 else self._plain[linear]
        self._model.vocabulary.fp8_head = self._head if in_fp8 else None
        self.in_use = in_fp8

    def keep(self) -> None:
        """Frees what is not in use. What is belongs to the model from then on."""
        if self.in_use:
            for linear, weight in self._fp8.items():
                linear.register_buffer("weight_scale", weight.scales, persistent=False)
            if self._head is not None:
                self._model.register_buffer("head_values", self._head.values, persistent=False)
                self._model.register_buffer("head_scales", self._head.scales, persistent=False)
        self._plain, self._fp8, self._head = {}, {}, None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _linears(model: nn.Module, least: int) -> list[nn.Module]:
    made = []
    for layer in model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        made += [attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj]
    return [linear for linear in made if _pays(linear.weight, least)]


def _pays(weight: torch.Tensor, least: int) -> bool:
    return weight.numel() >= least and not any(size % _MULTIPLE for size in weight.shape)
