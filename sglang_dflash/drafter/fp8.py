"""A drafter's matrix products in FP8: half of the bytes to read and half of the time to multiply.

What is accepted is the target's choice whatever was drafted, so that answers stay the same, and drafts are about as
often right. A weight has a scale for each output, what it is multiplied with one for each row, so that the largest
number of either is the largest of FP8. What context K/V are made of stays as it is stored: it is read for as long as a
request runs.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

    from sglang_dflash.drafter.model import DFlashDraftModel

logger = logging.getLogger(__name__)

DTYPE = torch.float8_e4m3fn
_LARGEST = torch.finfo(DTYPE).max
_SMALLEST_SCALE = 1e-12  # of rows of zeros
# Elements of a weight from which on an H200 saves more than quantizing rows takes (2.5 microseconds).
LEAST_ELEMENTS = 16_000_000
_MULTIPLE = 16  # sizes that the kernels take
_CHUNK = 8192  # rows of a weight that are float32 at once
# Where CUTLASS's tiles of the release fit badly, and cuBLAS is faster (H200): rows, and outputs from which on.
_BADLY_FROM, _BADLY_TO, _WIDE = 128, 256, 16384


class Fp8Weight:
    """A weight that multiplies rows which are quantized one by one.

    Attributes:
        values: [out, in] FP8.
        scales: [out, 1] float32.
    """

    def __init__(self, weight: torch.Tensor):
        """
        Args:
            weight: [out, in].
        """
        self.values = torch.empty_like(weight, dtype=DTYPE, memory_format=torch.contiguous_format)
        self.scales = torch.empty(len(weight), 1, dtype=torch.float32, device=weight.device)
        self.fill(weight)

    @torch.no_grad()
    def fill(self, weight: torch.Tensor) -> None:
        """Takes other numbers, in the same memory, which graphs read."""
        for begin in range(0, len(weight), _CHUNK):
            part = slice(begin, begin + _CHUNK)
            self.values[part], self.scales[part] = quantize_rows(weight[part])

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[n, in] → [n, out], of the dtype of `x`."""
        if not x.is_cuda:
            return self._reference(x, bias)
        from sglang.srt.layers.quantization.fp8_kernel import sglang_per_token_quant_fp8
        from sglang.srt.layers.quantization.fp8_utils import fp8_scaled_mm

        values, scales = sglang_per_token_quant_fp8(x.contiguous())
        weight = self.values.t()
        if _BADLY_FROM < len(x) <= _BADLY_TO and len(self.values) >= _WIDE and bias is None:
            return torch._scaled_mm(
                values, weight, scale_a=scales, scale_b=self.scales.t(), out_dtype=x.dtype
            )
        return fp8_scaled_mm(values, weight, scales, self.scales, x.dtype, bias)

    def _reference(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        values, scales = quantize_rows(x)
        y = values.float() @ self.values.float().t() * scales * self.scales.t()
        return (y if bias is None else y + bias.float()).to(x.dtype)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, size] → the same in FP8, and what each row was divided by, [n, 1] float32."""
    x = x.float()
    scales = (x.abs().amax(1, keepdim=True) / _LARGEST).clamp_min(_SMALLEST_SCALE)
    return (x / scales).to(DTYPE), scales


class _Method:
    """How a linear layer of the release multiplies, in FP8."""

    def __init__(self, weight: Fp8Weight):
        self.weight = weight

    def apply(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.weight.product(x, bias)


class Fp8Products:
    """Products of a drafter in FP8, beside what they are otherwise until one of both is kept.

    Attributes:
        in_use: whether they are.
    """

    def __init__(self, model: DFlashDraftModel, least: int):
        """
        Args:
            model: loaded and finished.
            least: elements of a weight that is to be one.
        """
        self._model, self.in_use = model, False
        self._plain = {each: (each.quant_method, each.weight) for each in _linears(model, least)}
        self._fp8 = {each: Fp8Weight(weight) for each, (_, weight) in self._plain.items()}
        head = model.vocabulary.plain_head
        self._head = Fp8Weight(head) if head is not None and _pays(head, least) else None

    @property
    def any(self) -> bool:
        return bool(self._fp8) or self._head is not None

    def use(self, in_fp8: bool) -> None:
        """Which of both the model runs with; only before `keep`."""
        for linear, weight in self._fp8.items():
            made = _Method(weight), nn.Parameter(weight.values, requires_grad=False)
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


def _linears(model: DFlashDraftModel, least: int) -> list[nn.Module]:
    made = []
    for layer in model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        made += [attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj]
    return [linear for linear in made if _pays(linear.weight, least)]


def _pays(weight: torch.Tensor, least: int) -> bool:
    return weight.numel() >= least and not any(size % _MULTIPLE for size in weight.shape)


def least_elements(args: ServerArgs) -> int | None:
    """Elements of weights that run in FP8; None for none.

    By default those of an H100 or H200 whose products take longer than quantizing rows does, but none with
    deterministic inference.
    """
    asked = args.speculative_draft_model_quantization
    if asked == "fp8" and asked != args.quantization:
        return 0
    if asked == "unquant" or args.device != "cuda" or args.enable_deterministic_inference:
        return None
    return LEAST_ELEMENTS if torch.cuda.get_device_capability() == (9, 0) else None


def head_bytes(args: ServerArgs, size: int, vocab_size: int) -> int:
    """What the LM head in FP8 takes beside the target's own, on one rank.

    Args:
        size: hidden.
    """
    least = least_elements(args)
    rows = -(-vocab_size // args.tp_size)
    return 0 if least is None or rows * size < least else rows * (size + 4)
