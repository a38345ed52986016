"""The hash behind seeded draws, for a CPU: the release has it as a Triton kernel only."""

from __future__ import annotations

import torch

_LOW = 0xFFFFFFFF


def murmur_hash32(
    seeds: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor
) -> torch.Tensor:
    """MurmurHash3 (x86, 32 bit, seed 0) of seed, position and column as 16 bytes.

    Args:
        seeds: [n] int64 or uint64.
        positions: [n] int.
        columns: [m] int.

    Returns:
        [n, m] uint32.
    """
    seeds, positions = seeds.to(torch.int64), positions.to(torch.int64)
    state = torch.zeros_like(seeds)
    for word in (seeds & _LOW, (seeds >> 32) & _LOW, positions & _LOW):
        state = _mix(state, word)
    state = _mix(state[:, None], columns.to(torch.int64)[None, :] & _LOW) ^ 16
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = ((state ^ (state >> shift)) * factor) & _LOW
    return (state ^ (state >> 16)).to(torch.uint32)


def _mix(state: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
    """Takes 32 more bits in. Products may wrap around: their low 32 bits stay right."""
    word = _rotate((word * 0xCC9E2D51) & _LOW, 15)
    state = _rotate(state ^ ((word * 0x1B873593) & _LOW), 13)
    return (state * 5 + 0xE6546B64) & _LOW


def _rotate(word: torch.Tensor, bits: int) -> torch.Tensor:
    return ((word << bits) | (word >> (32 - bits))) & _LOW
