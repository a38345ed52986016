"""Matrix products in FP8 (e4m3): half of the bytes of bfloat16 to read, and half of the time to multiply.

A weight has a scale for each output, what it multiplies one for each row, so that the largest number of either is the
largest of FP8.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

# Elements of a weight from which on an H200 saves more than quantizing rows takes (2.5 microseconds).
LEAST_ELEMENTS = 16_000_000
DTYPE = torch.float8_e4m3fn
LARGEST = torch.finfo(DTYPE).max
SMALLEST_SCALE = 1e-12  # of rows of zeros
_CHUNK = 8192  # rows of a weight that are float32 at once
# Numbers of rows for which CUTLASS's tiles of the release fit badly: others are tried there for wide weights.
_BADLY_FROM, _BADLY_TO, _STEP, _WIDE = 128, 256, 32, 8192
_TIMES = 3


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
    """

    def __init__(self, weight: torch.Tensor):
        """
        Args:
            weight: [out, in].
        """
        self.values = torch.empty_like(weight, dtype=DTYPE, memory_format=torch.contiguous_format)
        self.scales = torch.empty(len(weight), 1, dtype=torch.float32, device=weight.device)
        self.fill(weight)
        self._ways: dict[int, str] = {}

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
        most = -(-len(rows) // _STEP) * _STEP
        way = _cutlass if bias is not None else _WAYS[self._ways.get(most, _FIRST)]
        return way(self, rows, bias)

    @torch.no_grad()
    def find_ways(self, dtype: torch.dtype) -> None:
        """Looks for what takes the least time where tiles fit badly; before graphs are captured.

        Args:
            dtype: of the rows before they are quantized.
        """
        if not self.values.is_cuda or len(self.values) < _WIDE:
            return
        for most in range(_BADLY_FROM + _STEP, _BADLY_TO + 1, _STEP):
            # Blocks without their bonus tokens have no round number of rows.
            x = torch.ones(most - 1, self.values.shape[1], dtype=dtype, device=self.values.device)
            rows = quantize_rows(x)
            times = {
                name: _milliseconds(lambda: way(self, rows, None))  # noqa: B023
                for name, way in _WAYS.items()
            }
            self._ways[most] = min(times, key=times.__getitem__)
        logger.debug("FP8 products of %s rows: %s", len(self.values), self._ways)


def _cutlass(weight: Fp8Weight, rows: Fp8Rows, bias: torch.Tensor | None) -> torch.Tensor:
    from sglang.srt.layers.quantization.fp8_utils import fp8_scaled_mm

    values = weight.values.t()
    return fp8_scaled_mm(rows.values, values, rows.scales, weight.scales, rows.dtype, bias)


def _scaled_mm(weight: Fp8Weight, rows: Fp8Rows, _: torch.Tensor | None) -> torch.Tensor:
    scales = dict(scale_a=rows.scales, scale_b=weight.scales.t())
    return torch._scaled_mm(rows.values, weight.values.t(), out_dtype=rows.dtype, **scales)


def _padded(weight: Fp8Weight, rows: Fp8Rows, _: torch.Tensor | None) -> torch.Tensor:
    """As many rows as that has a good tile for."""
    missing = _BADLY_TO - len(rows)
    values = rows.values.new_empty(_BADLY_TO, rows.values.shape[1])
    values[: len(rows)] = rows.values
    scales = torch.nn.functional.pad(rows.scales, (0, 0, 0, missing))
    return _scaled_mm(weight, Fp8Rows(values, scales, rows.dtype), None)[: len(rows)]


_FIRST = "CUTLASS"
_WAYS: dict[str, Callable[[Fp8Weight, Fp8Rows, torch.Tensor | None], torch.Tensor]] = {
    _FIRST: _cutlass,
    "PyTorch": _scaled_mm,
    "PyTorch, padded": _padded,
}


def _milliseconds(run: Callable[[], object]) -> float:
    run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(_TIMES):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


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
