"""Rows of blocks, or of prompts, through a layer of gated delta nets: a convolution and a recurrence.

Both leave states as they are, and beside them what states are made of later (`delta_net_states.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from sglang_dflash.gpu.kernels.delta_net_step import Shape, rows_of, step_of

if TYPE_CHECKING:
    from sglang.srt.layers.radix_linear_attention import RadixLinearAttention

_CHANNELS = 256


@triton.jit
def _open_gates(
    a_ptr,
    b_ptr,
    rate_ptr,
    dt_bias_ptr,
    gates_ptr,
    a_stride,
    b_stride,
    begin,
    end,
    HEADS: tl.constexpr,
    HEADS_POW2: tl.constexpr,
):
    """What is left of states at each row, and how much of its values goes in."""
    head = tl.arange(0, HEADS_POW2)
    inside = head < HEADS
    rate = -tl.exp(tl.load(rate_ptr + head, mask=inside, other=0).to(tl.float32))
    dt_bias = tl.load(dt_bias_ptr + head, mask=inside, other=0).to(tl.float32)
    for row in range(begin, end):
        x = tl.load(a_ptr + row * a_stride + head, mask=inside, other=0).to(tl.float32) + dt_bias
        softplus = tl.where(x <= 20.0, tl.log(1.0 + tl.exp(x)), x)
        tl.store(gates_ptr + 2 * row * HEADS + head, tl.exp(rate * softplus), mask=inside)
        y = tl.load(b_ptr + row * b_stride + head, mask=inside, other=0).to(tl.float32)
        written = 1.0 / (1.0 + tl.exp(-y))
        tl.store(gates_ptr + (2 * row + 1) * HEADS + head, written, mask=inside)


@triton.jit
def _convolve(
    mixed_ptr,
    a_ptr,
    b_ptr,
    windows_ptr,
    slots_ptr,
    bounds_ptr,
    weight_ptr,
    bias_ptr,
    rate_ptr,
    dt_bias_ptr,
    kept_ptr,
    convolved_ptr,
    gates_ptr,
    mixed_stride,
    a_stride,
    b_stride,
    CHANNELS: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_POW2: tl.constexpr,
    BIAS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request, part = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots_ptr + request).to(tl.int64)
    begin, end = rows_of(bounds_ptr, request, slot)
    if part == PARTS:
        ptrs = (a_ptr, b_ptr, rate_ptr, dt_bias_ptr, gates_ptr)
        _open_gates(*ptrs, a_stride, b_stride, begin, end, HEADS, HEADS_POW2)
    else:
        channel = part * BLOCK + tl.arange(0, BLOCK)
        inside = channel < CHANNELS
        window = windows_ptr + (slot * CHANNELS + channel) * 3
        dtype = kept_ptr.dtype.element_ty
        x0 = tl.load(window, mask=inside, other=0).to(dtype)
        x1 = tl.load(window + 1, mask=inside, other=0).to(dtype)
        x2 = tl.load(window + 2, mask=inside, other=0).to(dtype)
        w0 = tl.load(weight_ptr + channel * 4, mask=inside, other=0)
        w1 = tl.load(weight_ptr + channel * 4 + 1, mask=inside, other=0)
        w2 = tl.load(weight_ptr + channel * 4 + 2, mask=inside, other=0)
        w3 = tl.load(weight_ptr + channel * 4 + 3, mask=inside, other=0)
        bias = tl.zeros([BLOCK], tl.float32)
        if BIAS:
            bias = tl.load(bias_ptr + channel, mask=inside, other=0).to(tl.float32)
        for row in range(begin, end):
            x3 = tl.load(mixed_ptr + row * mixed_stride + channel, mask=inside, other=0)
            # Products in the model's own precision, as the release's kernels of steps have them.
            y = bias + x0 * w0
            y += x1 * w1
            y += x2 * w2
            y += x3 * w3
            y = y / (1.0 + tl.exp(-y))
            tl.store(kept_ptr + row * CHANNELS + channel, x3, mask=inside)
            tl.store(convolved_ptr + row * CHANNELS + channel, y, mask=inside)
            x0, x1, x2 = x1, x2, x3


def convolve(
    layer: RadixLinearAttention,
    mixed: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    windows: torch.Tensor,
    slots: torch.Tensor,
    bounds: torch.Tensor,
    kept: torch.Tensor,
    convolved: torch.Tensor,
    gates: torch.Tensor,
) -> None:
    """What a layer's recurrence reads, and what its states will be made of.

    Args:
        mixed: [rows, channels], queries, keys and values before the convolution.
        a, b: [rows, v_heads], of decay and of what is written.
        windows: [slots, channels, 3], contiguous: inputs before these rows, which stay as they are.
        slots: [requests] int32; 0 for one whose rows only pad the pass.
        bounds: [requests + 1] int32, rows at which each request begins, and where the last one ends.
        kept: [rows, channels], gets `mixed`.
        convolved: [rows, channels], gets what the convolution makes of it.
        gates: [rows, 2, v_heads] float32, gets decay and share of each row.
    """
    channels, heads = mixed.shape[1], a.shape[1]
    parts = triton.cdiv(channels, _CHANNELS)
    _convolve[len(slots), parts + 1](
        mixed,
        a,
        b,
        windows,
        slots,
        bounds,
        layer.conv_weights,
        layer.bias,
        layer.A_log,
        layer.dt_bias,
        kept,
        convolved,
        gates,
        mixed.stride(0),
        a.stride(0),
        b.stride(0),
        CHANNELS=channels,
        HEADS=heads,
        HEADS_POW2=triton.next_power_of_2(heads),
        BIAS=layer.bias is not None,
        PARTS=parts,
        BLOCK=_CHANNELS,
        num_warps=2,
    )


@triton.jit
def _recur(
    states_ptr,
    convolved_ptr,
    gates_ptr,
    out_ptr,
    slots_ptr,
    bounds_ptr,
    scale,
    CHANNELS: tl.constexpr,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_POW2: tl.constexpr,
    V_BLOCK: tl.constexpr,
):
    request = tl.program_id(1)
    parts: tl.constexpr = (V_DIM + V_BLOCK - 1) // V_BLOCK
    head, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    k = tl.arange(0, K_POW2)
    v = part * V_BLOCK + tl.arange(0, V_BLOCK)
    k_inside, v_inside = k < K_DIM, v < V_DIM
    slot = tl.load(slots_ptr + request).to(tl.int64)
    begin, end = rows_of(bounds_ptr, request, slot)
    own = ((slot * V_HEADS + head) * V_DIM + v[None, :]) * K_DIM + k[:, None]
    inside = k_inside[:, None] & v_inside[None, :]
    state = tl.load(states_ptr + own, mask=inside, other=0).to(tl.float32)
    for row in range(begin, end):
        at, gates = convolved_ptr + row * CHANNELS, gates_ptr + 2 * row * V_HEADS
        places = (head, k, v, k_inside, v_inside)
        state = step_of(state, at, gates, *places, K_HEADS, V_HEADS, K_DIM, V_DIM)
        query = at + head // (V_HEADS // K_HEADS) * K_DIM + k
        query = tl.load(query, mask=k_inside, other=0).to(tl.float32)
        query = query / (tl.sqrt(tl.sum(query * query) + 1e-6)) * scale
        out = tl.sum(state * query[:, None], 0)
        to = out_ptr + (row * V_HEADS + head) * V_DIM + v
        tl.store(to, out.to(out_ptr.dtype.element_ty), mask=v_inside)


def recur(
    states: torch.Tensor,
    convolved: torch.Tensor,
    gates: torch.Tensor,
    slots: torch.Tensor,
    bounds: torch.Tensor,
) -> torch.Tensor:
    """A layer's rows behind its recurrence, which leaves states as they are.

    Args:
        states: [slots, v_heads, v_dim, k_dim], contiguous.
        convolved: [rows, channels].
        gates: [rows, 2, v_heads] float32.
        slots, bounds: as for `convolve`.

    Returns:
        [1, rows, v_heads, v_dim] of the dtype of `convolved`; zeros of rows that only pad the pass.
    """
    shape = Shape.of(convolved, states).narrow(len(slots))
    out = convolved.new_zeros(1, len(convolved), shape.v_heads, shape.v_dim)
    given = (states, convolved, gates, out, slots, bounds, shape.k_dim**-0.5)
    grid = (shape.programs, len(slots))
    _recur[grid](*given, **shape.constants(), num_warps=1, num_stages=3)
    return out
