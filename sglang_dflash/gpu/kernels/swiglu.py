"""SwiGLU's activation."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dflash.gpu.fp8 import DTYPE, LARGEST, Fp8Rows
from sglang_dflash.gpu.kernels.fp8_row import store_fp8
from sglang_dflash.gpu.kernels.launch import starts_early


@triton.jit
def _swiglu(gate_up_ptr, y_ptr, SIZE: tl.constexpr, TILE: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = i < SIZE
    gate = tl.load(gate_up_ptr + row * 2 * SIZE + i, mask=inside, other=0).to(tl.float32)
    up = tl.load(gate_up_ptr + (row * 2 + 1) * SIZE + i, mask=inside, other=0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(y_ptr + row * SIZE + i, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_fp8(
    gate_up_ptr,
    y_ptr,
    scale_ptr,
    LARGEST: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_POW2: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, SIZE_POW2)
    inside = i < SIZE
    gate = tl.load(gate_up_ptr + row * 2 * SIZE + i, mask=inside, other=0).to(tl.float32)
    up = tl.load(gate_up_ptr + (row * 2 + 1) * SIZE + i, mask=inside, other=0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    store_fp8(y, y_ptr, scale_ptr, row, row * SIZE + i, inside, LARGEST)


def swiglu_fp8(gate_up: torch.Tensor) -> Fp8Rows:
    """silu(gate) * up, quantized: [n, 2 * size], contiguous → [n, size]."""
    n, size = len(gate_up), gate_up.shape[1] // 2
    y = gate_up.new_empty(n, size, dtype=DTYPE)
    scales = gate_up.new_empty(n, 1, dtype=torch.float32)
    pow2 = triton.next_power_of_2(size)
    early = starts_early(n)
    _swiglu_fp8[(n,)](
        gate_up,
        y,
        scales,
        LARGEST=LARGEST,
        SIZE=size,
        SIZE_POW2=pow2,
        EARLY=early,
        launch_pdl=early,
        num_warps=max(1, min(16, pow2 // 512)),
    )
    return Fp8Rows(y, scales, gate_up.dtype)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up: [n, 2 * size], contiguous → [n, size]."""
    n, size = len(gate_up), gate_up.shape[1] // 2
    y = gate_up.new_empty(n, size)
    tile = min(1024, triton.next_power_of_2(size))
    early = starts_early(n)
    _swiglu[(n, triton.cdiv(size, tile))](
        gate_up,
        y,
        SIZE=size,
        TILE=tile,
        EARLY=early,
        launch_pdl=early,
        num_warps=max(1, tile // 256),
    )
    return y


def swiglu_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """What `swiglu` returns."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)
