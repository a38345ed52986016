"""What kernels over gated delta nets share: a row's step, and the shape of their heads."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl


@triton.jit
def rows_of(bounds_ptr, request, slot):
    """Where rows of a request begin and end; of those that pad a pass, whose slot is 0, none are computed."""
    begin, end = tl.load(bounds_ptr + request), tl.load(bounds_ptr + request + 1)
    return begin, tl.where(slot == 0, begin, end)


@triton.jit
def step_of(
    state,
    at,
    gates,
    head,
    k,
    v,
    k_inside,
    v_inside,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
):
    """A part of a head's state behind a row, [k, v], of what the convolution made of it, `at`, and of its gates."""
    keys: tl.constexpr = K_HEADS * K_DIM
    key = at + keys + head // (V_HEADS // K_HEADS) * K_DIM + k
    key = tl.load(key, mask=k_inside, other=0).to(tl.float32)
    key = key / (tl.sqrt(tl.sum(key * key) + 1e-6))
    value = tl.load(at + 2 * keys + head * V_DIM + v, mask=v_inside, other=0).to(tl.float32)
    state *= tl.load(gates + head)
    value -= tl.sum(state * key[:, None], 0)
    value *= tl.load(gates + V_HEADS + head)
    return state + key[:, None] * value[None, :]


# Programs of one warp that give each of a GPU's schedulers about one.
_PROGRAMS = 512
_LEAST, _MOST = 8, 32  # values of a head that a program computes


class Shape(NamedTuple):
    """Of the heads of layers, as kernels know it.

    Attributes:
        block: values of a head that a program computes.
    """

    channels: int
    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    block: int

    @classmethod
    def of(cls, convolved: torch.Tensor, states: torch.Tensor) -> Shape:
        """From [..., channels] and [..., v_heads, v_dim, k_dim]."""
        channels, (v_heads, v_dim, k_dim) = convolved.shape[-1], states.shape[-3:]
        k_heads = (channels - v_heads * v_dim) // (2 * k_dim)
        block = min(triton.next_power_of_2(v_dim), _MOST)
        return cls(channels, k_heads, v_heads, k_dim, v_dim, block)

    def narrow(self, requests: int) -> Shape:
        """The same with more programs, if so few requests have too few: each then has less to do in a row's step."""
        block = self.block
        while block > _LEAST and requests * self._replace(block=block).programs < _PROGRAMS:
            block //= 2
        return self._replace(block=block)

    @property
    def programs(self) -> int:
        """Of one request in one layer."""
        return self.v_heads * triton.cdiv(self.v_dim, self.block)

    def constants(self) -> dict[str, int]:
        return dict(
            CHANNELS=self.channels,
            K_HEADS=self.k_heads,
            V_HEADS=self.v_heads,
            K_DIM=self.k_dim,
            V_DIM=self.v_dim,
            K_POW2=triton.next_power_of_2(self.k_dim),
            V_BLOCK=self.block,
        )
