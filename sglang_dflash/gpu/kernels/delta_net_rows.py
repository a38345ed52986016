"""Rows of blocks through gated delta nets, whose states wait until it is known how many of the rows count.

A state after each row would take sixteen times the memory of a request's own, and as much writing in every round. What
it is made of is a thousandth of that: so a pass leaves the inputs of its rows, and states are made of them when a
round is over, in all layers at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

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
    begin, end = tl.load(bounds_ptr + request), tl.load(bounds_ptr + request + 1)
    if part == PARTS:
        ptrs = (a_ptr, b_ptr, rate_ptr, dt_bias_ptr, gates_ptr)
        _open_gates(*ptrs, a_stride, b_stride, begin, end, HEADS, HEADS_POW2)
    else:
        channel = part * BLOCK + tl.arange(0, BLOCK)
        inside = channel < CHANNELS
        window = windows_ptr + (tl.load(slots_ptr + request).to(tl.int64) * CHANNELS + channel) * 3
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
        slots: [requests] int32.
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
def _bring_states(
    states_ptr,
    convolved_ptr,
    gates_ptr,
    slots_ptr,
    begins_ptr,
    counts_ptr,
    tracked_ptr,
    tracked_counts_ptr,
    layer_stride,
    rows,
    CHANNELS: tl.constexpr,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_POW2: tl.constexpr,
    V_BLOCK: tl.constexpr,
    TRACK: tl.constexpr,
):
    request, layer = tl.program_id(1), tl.program_id(2).to(tl.int64)
    parts: tl.constexpr = (V_DIM + V_BLOCK - 1) // V_BLOCK
    head, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    k = tl.arange(0, K_POW2)
    v = part * V_BLOCK + tl.arange(0, V_BLOCK)
    k_inside, v_inside = k < K_DIM, v < V_DIM
    inside = k_inside[:, None] & v_inside[None, :]
    size: tl.constexpr = V_HEADS * V_DIM * K_DIM
    own = (head * V_DIM + v[None, :]) * K_DIM + k[:, None]
    states_ptr += layer * layer_stride
    slot = tl.load(slots_ptr + request).to(tl.int64)
    state = tl.load(states_ptr + slot * size + own, mask=inside, other=0).to(tl.float32)
    first = layer * rows + tl.load(begins_ptr + request)
    count, tracked_count = tl.load(counts_ptr + request), 0
    tracked = slot
    if TRACK:
        tracked_count = tl.load(tracked_counts_ptr + request).to(tl.int32)
        tracked = tl.load(tracked_ptr + request).to(tl.int64)
    keys: tl.constexpr = K_HEADS * K_DIM
    for step in range(0, count):
        row = first + step
        at = convolved_ptr + row * CHANNELS
        key = at + keys + head // (V_HEADS // K_HEADS) * K_DIM + k
        key = tl.load(key, mask=k_inside, other=0).to(tl.float32)
        key = key / (tl.sqrt(tl.sum(key * key) + 1e-6))
        value = tl.load(at + 2 * keys + head * V_DIM + v, mask=v_inside, other=0).to(tl.float32)
        state *= tl.load(gates_ptr + 2 * row * V_HEADS + head)
        value -= tl.sum(state * key[:, None], 0)
        value *= tl.load(gates_ptr + (2 * row + 1) * V_HEADS + head)
        state += key[:, None] * value[None, :]
        if TRACK:
            if step + 1 == tracked_count:
                to = states_ptr + tracked * size + own
                tl.store(to, state.to(states_ptr.dtype.element_ty), mask=inside)
    tl.store(states_ptr + slot * size + own, state.to(states_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _after(window, rows, n, inside, CHANNELS: tl.constexpr):
    """What was read `n` rows behind the oldest of a window."""
    old = tl.load(window + n, mask=inside & (n < 3), other=0)
    new = tl.load(rows + (n - 3) * CHANNELS, mask=inside & (n >= 3), other=0)
    return tl.where(n < 3, old, new.to(old.dtype))


@triton.jit
def _bring_windows(
    windows_ptr,
    kept_ptr,
    slots_ptr,
    begins_ptr,
    counts_ptr,
    tracked_ptr,
    tracked_counts_ptr,
    layer_stride,
    rows,
    CHANNELS: tl.constexpr,
    TRACK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request, layer = tl.program_id(1), tl.program_id(2).to(tl.int64)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    windows_ptr += layer * layer_stride
    window = windows_ptr + (tl.load(slots_ptr + request).to(tl.int64) * CHANNELS + channel) * 3
    first = layer * rows + tl.load(begins_ptr + request)
    at = kept_ptr + first * CHANNELS + channel
    count = tl.load(counts_ptr + request)
    x0 = _after(window, at, count, inside, CHANNELS)
    x1 = _after(window, at, count + 1, inside, CHANNELS)
    x2 = _after(window, at, count + 2, inside, CHANNELS)
    if TRACK:
        tracked_count = tl.load(tracked_counts_ptr + request)
        if tracked_count > 0:
            y0 = _after(window, at, tracked_count, inside, CHANNELS)
            y1 = _after(window, at, tracked_count + 1, inside, CHANNELS)
            y2 = _after(window, at, tracked_count + 2, inside, CHANNELS)
            slot = tl.load(tracked_ptr + request).to(tl.int64)
            to = windows_ptr + (slot * CHANNELS + channel) * 3
            tl.store(to, y0, mask=inside)
            tl.store(to + 1, y1, mask=inside)
            tl.store(to + 2, y2, mask=inside)
    tl.store(window, x0, mask=inside)
    tl.store(window + 1, x1, mask=inside)
    tl.store(window + 2, x2, mask=inside)


def bring(
    states: torch.Tensor,
    windows: torch.Tensor,
    kept: torch.Tensor,
    convolved: torch.Tensor,
    gates: torch.Tensor,
    slots: torch.Tensor,
    begins: torch.Tensor,
    counts: torch.Tensor,
    tracked: torch.Tensor | None,
    tracked_counts: torch.Tensor | None,
) -> None:
    """Makes states of all layers those after the rows that count; see `round/linear_states.py`."""
    layers, rows, channels = kept.shape
    _, _, heads, v_dim, k_dim = states.shape
    k_heads = (channels - heads * v_dim) // (2 * k_dim)
    given = (slots, begins, counts, tracked, tracked_counts)
    block = min(triton.next_power_of_2(v_dim), 32)
    _bring_states[heads * triton.cdiv(v_dim, block), len(slots), layers](
        states,
        convolved,
        gates,
        *given,
        states.stride(0),
        rows,
        CHANNELS=channels,
        K_HEADS=k_heads,
        V_HEADS=heads,
        K_DIM=k_dim,
        V_DIM=v_dim,
        K_POW2=triton.next_power_of_2(k_dim),
        V_BLOCK=block,
        TRACK=tracked is not None,
        num_warps=1,
        num_stages=3,
    )
    _bring_windows[triton.cdiv(channels, _CHANNELS), len(slots), layers](
        windows,
        kept,
        *given,
        windows.stride(0),
        rows,
        CHANNELS=channels,
        TRACK=tracked is not None,
        BLOCK=_CHANNELS,
        num_warps=2,
    )
