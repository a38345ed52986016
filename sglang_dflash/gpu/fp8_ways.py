"""How rows in FP8 are multiplied: by the release's CUTLASS kernels or by PyTorch, as they are or filled up to a tile.

None is the fastest everywhere. On an H200 CUTLASS takes 366 µs for 84 rows and Qwen3-8B's LM head, whose weights are
read in 150, and 195 for 128; 575 for 270 rows, and 340 if they are filled up. So each is timed (`gpu/fp8_times.py`).
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import product
from typing import NamedTuple

import torch

TILE = 128  # rows
# Rows up to which one way is taken, from the step before on: the more there are, the less some of them change.
STEPS = (*range(8, 256, 8), *range(256, 512, 16), *range(512, 1025, 32))


class Way(NamedTuple):
    """Whose kernel, and whether rows are filled up to whole tiles."""

    kernel: str
    filled: bool


class Operands(NamedTuple):
    """What is multiplied.

    Attributes:
        rows: [n, in] FP8, contiguous.
        row_scales: [n, 1] float32.
        weight: [out, in] FP8, contiguous.
        weight_scales: [out, 1] float32.
    """

    rows: torch.Tensor
    row_scales: torch.Tensor
    weight: torch.Tensor
    weight_scales: torch.Tensor


def _cutlass(given: Operands, dtype: torch.dtype, bias: torch.Tensor | None) -> torch.Tensor:
    from sglang.srt.layers.quantization.fp8_utils import fp8_scaled_mm

    scales = given.row_scales, given.weight_scales
    return fp8_scaled_mm(given.rows, given.weight.t(), *scales, dtype, bias)


def _pytorch(given: Operands, dtype: torch.dtype, _: torch.Tensor | None) -> torch.Tensor:
    scales = dict(scale_a=given.row_scales, scale_b=given.weight_scales.t())
    return torch._scaled_mm(given.rows, given.weight.t(), out_dtype=dtype, **scales)


_KERNELS = {"CUTLASS": _cutlass, "PyTorch": _pytorch}
WAYS = [Way(*each) for each in product(_KERNELS, (False, True))]
FIRST = WAYS[0]


def multiply(
    given: Operands, dtype: torch.dtype, way: Way, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """[n, in] × [out, in] → [n, out] of a dtype.

    Args:
        bias: [out], which only CUTLASS's kernels add.
    """
    count = len(given.rows)
    given = filled_up(given) if way.filled else given
    return _KERNELS[way.kernel](given, dtype, bias)[:count]


def filled_up(given: Operands) -> Operands:
    """With whole tiles of rows; what fills them up may be anything."""
    missing = -len(given.rows) % TILE
    rows = given.rows.new_empty(len(given.rows) + missing, given.rows.shape[1])
    rows[: len(given.rows)] = given.rows
    scales = torch.nn.functional.pad(given.row_scales, (0, 0, 0, missing))
    return given._replace(rows=rows, row_scales=scales)


def step_of(rows: int) -> int | None:
    """The step that so many rows belong to; None for more than any has."""
    place = bisect_left(STEPS, rows)
    return STEPS[place] if place < len(STEPS) else None
