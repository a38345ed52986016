"""Matrix products of up to 16 rows, which take as long as reading the weights does.

Weights are the left operand, so that the matrix unit's 64 rows are theirs. A program loads its first
tile before it waits for the kernel before it: weights never depend on that one, and the memory stays
busy from kernel to kernel. A product that is split over its inner dimension leaves its parts to the
kernel after it (`add_norm`), and SwiGLU is applied where gate and up meet.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch.nn.functional import linear

from sglang_dflash.gpu.kernels.launch import device_of, starts_early
from sglang_dflash.gpu.kernels.swiglu import swiglu

MOST_ROWS = 16


class Tiling(NamedTuple):
    """How a product is cut: weight rows and columns of a tile, columns of the tile loaded first,
    parts of the inner dimension, tiles under way, warps."""

    rows: int
    columns: int
    first: int
    parts: int
    stages: int
    warps: int


# By the shape of the weight: where an H200 was faster with it than with cuBLAS.
TILINGS = {
    (6144, 4096): Tiling(64, 128, 128, 1, 5, 4),  # Qwen3-8B: QKV
    (4096, 4096): Tiling(64, 128, 128, 2, 5, 4),  # output of attention
    (24576, 4096): Tiling(64, 64, 128, 1, 4, 4),  # gate and up
    (4096, 12288): Tiling(64, 128, 128, 2, 5, 4),  # down
}


@triton.jit
def _skinny(
    x_ptr,
    weight_ptr,
    y_ptr,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    FIRST: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    SWIGLU: tl.constexpr,
    EARLY: tl.constexpr,
):
    program = tl.program_id(0)
    part = program % PARTS
    DEPTH: tl.constexpr = K // PARTS
    n = (program // PARTS) * TILE_N + tl.arange(0, TILE_N)
    row = tl.arange(0, ROWS)
    inside = row[None, :] < rows
    weight = weight_ptr + n[:, None].to(tl.int64) * K + part * DEPTH
    x = x_ptr + row[None, :] * K + part * DEPTH

    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    first = tl.arange(0, FIRST)
    w0 = tl.load(weight + first[None, :], eviction_policy="evict_first")
    if SWIGLU:
        u0 = tl.load(weight + N * K + first[None, :], eviction_policy="evict_first")
    if EARLY:
        tl.extra.cuda.gdc_wait()

    x0 = tl.load(x + first[:, None], mask=inside, other=0.0)
    y = tl.dot(w0, x0, tl.zeros([TILE_N, ROWS], tl.float32))
    up = tl.zeros([TILE_N, ROWS], tl.float32)
    if SWIGLU:
        up = tl.dot(u0, x0, up)
    k = tl.arange(0, TILE_K)
    for at in tl.range(FIRST, DEPTH, TILE_K, num_stages=STAGES):
        xk = tl.load(x + (at + k)[:, None], mask=inside, other=0.0)
        w = tl.load(weight + (at + k)[None, :], eviction_policy="evict_first")
        y = tl.dot(w, xk, y)
        if SWIGLU:
            u = tl.load(weight + N * K + (at + k)[None, :], eviction_policy="evict_first")
            up = tl.dot(u, xk, up)

    dtype = y_ptr.dtype.element_ty
    if SWIGLU:
        # Rounded as the product before the activation is.
        gate = y.to(dtype).to(tl.float32)
        y = gate / (1.0 + tl.exp(-gate)) * up.to(dtype).to(tl.float32)
    tl.store(y_ptr + (part * rows + row[None, :]) * N + n[:, None], y.to(dtype), mask=inside)


def launch(
    x: torch.Tensor, weight: torch.Tensor, tiling: Tiling, with_swiglu: bool
) -> torch.Tensor:
    """The kernel: [n, K] → [n, N], or [parts, n, N] float32 if the tiling has several parts.

    Args:
        weight: [N, K], or [2 * N, K] with SwiGLU; N and K are multiples of what the tiling cuts.
    """
    rows, depth = x.shape
    size = weight.shape[0] // 2 if with_swiglu else weight.shape[0]
    if tiling.parts > 1:
        y = torch.empty(tiling.parts, rows, size, dtype=torch.float32, device=x.device)
    else:
        y = x.new_empty(rows, size)
    early = starts_early(rows)
    _skinny[(size // tiling.rows * tiling.parts,)](
        x,
        weight,
        y,
        rows,
        N=size,
        K=depth,
        ROWS=MOST_ROWS,
        TILE_N=tiling.rows,
        TILE_K=tiling.columns,
        FIRST=tiling.first,
        PARTS=tiling.parts,
        STAGES=tiling.stages,
        SWIGLU=with_swiglu,
        EARLY=early,
        launch_pdl=early,
        num_warps=tiling.warps,
    )
    return y


def _tiling(x: torch.Tensor, weight: torch.Tensor) -> Tiling | None:
    skinny = x.is_cuda and len(x) <= MOST_ROWS and x.dtype == weight.dtype == torch.bfloat16
    # Other GPUs have other memories, and less for a program: tiles under way may not fit.
    measured = skinny and device_of(x.device).capability == (9, 0)
    return TILINGS.get(tuple(weight.shape)) if measured else None


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight.T: [n, K] and [N, K], contiguous.

    Returns:
        [n, N] of the dtype of `x`, or the parts of it, [parts, n, N] float32, which `add_norm` adds.
    """
    tiling = _tiling(x, weight)
    return linear(x, weight) if tiling is None else launch(x, weight, tiling, False)


def product_swiglu(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """SwiGLU of x @ weight.T, whose first half is the gate: [n, K] and [2 * N, K] → [n, N]."""
    tiling = _tiling(x, weight)
    return swiglu(linear(x, weight)) if tiling is None else launch(x, weight, tiling, True)
