"""Matrix products in FP8 (e4m3): half of the bytes of bfloat16 to read, and half of the time to multiply.

A weight has a scale for each output, what it multiplies one for each row, so that the largest number of either is the
largest of FP8.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from sglang_dflash.gpu.fp8_ways import FIRST, Operands, Way, multiply, step_of

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

# Elements of a weight from which on an H200 saves more than quantizing rows takes (2.5 microseconds).
LEAST_ELEMENTS = 16_000_000
DTYPE = torch.float8_e4m3fn
LARGEST = torch.finfo(DTYPE).max
SMALLEST_SCALE = 1e-12  # of rows of zeros
_CHUNK = 8192  # rows of a weight that are float32 at once


@dataclass(frozen=True)
class Fp8Rows:
    """Rows that are quantized.

    Attributes:
        values: [n, size] FP8.
        scales: [n, 1] float32, what each row was divided by.
        dtype: of what is made of them.
    """

    values: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype

    def __len__(self) -> int:
        return len(self.values)


def quantize_rows(x: torch.Tensor) -> Fp8Rows:
    """Of [n, size]."""
    if x.is_cuda and x.dtype != torch.float32:
        from sglang.srt.layers.quantization.fp8_kernel import sglang_per_token_quant_fp8

        return Fp8Rows(*sglang_per_token_quant_fp8(x.contiguous()), x.dtype)
    x32 = x.float()
    scales = (x32.abs().amax(1, keepdim=True) / LARGEST).clamp_min(SMALLEST_SCALE)
    return Fp8Rows((x32 / scales).to(DTYPE), scales, x.dtype)


class Fp8Weight:
    """A weight that multiplies rows in FP8.

    Attributes:
        values: [out, in] FP8.
        scales: [out, 1] float32.
        ways: how so many rows are multiplied, by their step (`gpu/fp8_times.py`); in the first way where none is named.
    """

    def __init__(self, weight: torch.Tensor):
        """
        Args:
            weight: [out, in].
        """
        self.values = torch.empty_like(weight, dtype=DTYPE, memory_format=torch.contiguous_format)
        self.scales = torch.empty(len(weight), 1, dtype=torch.float32, device=weight.device)
        self.fill(weight)
        self.ways: dict[int, Way] = {}

    @torch.no_grad()
    def fill(self, weight: torch.Tensor) -> None:
        """Takes other numbers, in the same memory, which graphs read."""
        for begin in range(0, len(weight), _CHUNK):
            part = slice(begin, begin + _CHUNK)
            rows = quantize_rows(weight[part])
            self.values[part], self.scales[part] = rows.values, rows.scales

    def product(self, x: torch.Tensor | Fp8Rows, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[n, in] → [n, out], of the dtype of `x`."""
        rows = x if isinstance(x, Fp8Rows) else quantize_rows(x)
        if not rows.values.is_cuda:
            y = rows.values.float() @ self.values.float().t() * rows.scales * self.scales.t()
            return (y if bias is None else y + bias.float()).to(rows.dtype)
        way = FIRST if bias is not None else self.ways.get(step_of(len(rows)), FIRST)
        return self.multiply(rows, way, bias)

    def multiply(self, rows: Fp8Rows, way: Way, bias: torch.Tensor | None = None) -> torch.Tensor:
        """`product` on a GPU, in one way."""
        given = Operands(rows.values, rows.scales, self.values, self.scales)
        return multiply(given, rows.dtype, way, bias)


class Fp8Method:
    """How a linear layer of the release multiplies, in FP8."""

    def __init__(self, weight: Fp8Weight):
        self.weight = weight

    def apply(
        self, layer: nn.Module, x: torch.Tensor | Fp8Rows, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.weight.product(x, bias)


def reads_fp8(linear: nn.Module | None) -> bool:
    """Whether a layer takes `Fp8Rows`."""
    return isinstance(getattr(linear, "quant_method", None), Fp8Method)


def least_elements(args: ServerArgs) -> int | None:
    """Elements of a drafter's weights that run in FP8; None for none.

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
