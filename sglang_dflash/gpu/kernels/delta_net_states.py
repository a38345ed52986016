"""States of gated delta nets, made of what rows left, when it is known how many of them count.

A state after each row would take sixteen times the memory of a request's own, and as much writing in every round. What
it is made of is little beside one: so a pass leaves that, and states are made of it in all layers at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dflash.gpu.kernels.delta_net_step import Shape, step_of

_BLOCK = 256  # channels of a program


@triton.jit
def _bring_states(
    states_ptr,
    convolved_ptr,
    gates_ptr,
    slots_ptr,
    begins_ptr,
    counts_ptr,
    tracked_ptr,
    on_the_way_ptr,
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
    count, on_the_way, tracked = tl.load(counts_ptr + request), 0, slot
    if TRACK:
        on_the_way = tl.load(on_the_way_ptr + request).to(tl.int32)
        tracked = tl.load(tracked_ptr + request).to(tl.int64)
    for step in range(0, count):
        row = first + step
        at, gates = convolved_ptr + row * CHANNELS, gates_ptr + 2 * row * V_HEADS
        places = (head, k, v, k_inside, v_inside)
        state = step_of(state, at, gates, *places, K_HEADS, V_HEADS, K_DIM, V_DIM)
        if TRACK:
            if step + 1 == on_the_way:
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
    on_the_way_ptr,
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
        on_the_way = tl.load(on_the_way_ptr + request)
        if on_the_way > 0:
            y0 = _after(window, at, on_the_way, inside, CHANNELS)
            y1 = _after(window, at, on_the_way + 1, inside, CHANNELS)
            y2 = _after(window, at, on_the_way + 2, inside, CHANNELS)
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
    on_the_way: torch.Tensor | None,
) -> None:
    """Makes states of all layers those after the rows that count; see `round/linear_states.py`."""
    layers, rows, channels = kept.shape
    shape, track = Shape.of(kept, states), tracked is not None
    given = (slots, begins, counts, tracked, on_the_way)
    _bring_states[shape.programs, len(slots), layers](
        states,
        convolved,
        gates,
        *given,
        states.stride(0),
        rows,
        **shape.constants(),
        TRACK=track,
        num_warps=1,
        num_stages=3,
    )
    _bring_windows[triton.cdiv(channels, _BLOCK), len(slots), layers](
        windows,
        kept,
        *given,
        windows.stride(0),
        rows,
        CHANNELS=channels,
        TRACK=track,
        BLOCK=_BLOCK,
        num_warps=2,
    )
