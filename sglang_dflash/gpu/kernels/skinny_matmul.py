"""Matrix products of few rows, which take as long as reading the weights does.

Weights are the left operand, so that the matrix unit's 64 rows are theirs. A program loads its first
tile before it waits for the kernel before it: weights never depend on that one, and the memory stays
busy from kernel to kernel. A product that is split over its inner dimension leaves its parts to the
kernels after it, which add them, and SwiGLU is applied where gate and up meet.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sglang_dflash.gpu.kernels.launch import can_overlap

# Rows that the kernel is compiled for. More are too many for programs that each read all of them.
ROOMS = (16, 32, 64, 128)
MOST_ROWS = ROOMS[-1]


def room_for(rows: int) -> int | None:
    """The least of `ROOMS` that holds so many rows; None for more than `MOST_ROWS`."""
    return next((room for room in ROOMS if rows <= room), None)


class Tiling(NamedTuple):
    """How a product is cut: weight rows and columns of a tile, columns of the tile loaded first,
    parts of the inner dimension, tiles under way, warps."""

    rows: int
    columns: int
    first: int
    parts: int
    stages: int
    warps: int

    def fits(self, size: int, depth: int) -> bool:
        """Whether it cuts a product whole: `size` weight rows (of the gate alone) of `depth` columns."""
        powers = (self.rows, self.columns, self.first, self.warps)
        if min(self) < 1 or any(n & (n - 1) for n in powers):
            return False
        if size % self.rows or depth % self.parts:
            return False
        rest = depth // self.parts - self.first
        return rest >= 0 and rest % self.columns == 0


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
        x: of at most `MOST_ROWS` rows.
        weight: [N, K], or [2 * N, K] with SwiGLU (the gate first), contiguous; the tiling fits it.
    """
    grid, y, arguments, options = _call(x, weight, tiling, with_swiglu)
    _skinny[grid](*arguments, **options)
    return y


def compile_only(x: torch.Tensor, weight: torch.Tensor, tiling: Tiling, with_swiglu: bool) -> None:
    """Compiles what `launch` would run."""
    grid, _, arguments, options = _call(x, weight, tiling, with_swiglu)
    _skinny.warmup(*arguments, grid=grid, **options)


def _call(
    x: torch.Tensor, weight: torch.Tensor, tiling: Tiling, with_swiglu: bool
) -> tuple[tuple[int], torch.Tensor, tuple, dict]:
    """Grid, output, arguments and options of a launch."""
    rows, depth = x.shape
    size = weight.shape[0] // 2 if with_swiglu else weight.shape[0]
    if tiling.parts > 1:
        y = torch.empty(tiling.parts, rows, size, dtype=torch.float32, device=x.device)
    else:
        y = x.new_empty(rows, size)
    early = can_overlap()
    options = dict(
        N=size,
        K=depth,
        ROWS=room_for(rows),
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
    return (size // tiling.rows * tiling.parts,), y, (x, weight, y, rows), options
