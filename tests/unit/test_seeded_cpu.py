"""The hash of seeded draws against MurmurHash3 on bytes, written down once more in plain integers."""

from __future__ import annotations

import struct

import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_dflash.cpu.seeded_draws import murmur_hash32


def on_bytes(data: bytes) -> int:
    """MurmurHash3_x86_32 with seed 0 of a whole number of 32-bit words."""
    state = 0
    for (word,) in struct.iter_unpack("<I", data):
        word = word * 0xCC9E2D51 % 2**32
        word = (word << 15 | word >> 17) % 2**32
        state ^= word * 0x1B873593 % 2**32
        state = (state << 13 | state >> 19) % 2**32
        state = (state * 5 + 0xE6546B64) % 2**32
    state ^= len(data)
    state = (state ^ state >> 16) * 0x85EBCA6B % 2**32
    state = (state ^ state >> 13) * 0xC2B2AE35 % 2**32
    return state ^ state >> 16


def test_published_value() -> None:
    assert on_bytes(b"test") == 0xBA6BD213


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**31 - 1), st.lists(st.integers(0, 2**18)))
def test_against_bytes(seed: int, position: int, columns: list[int]) -> None:
    hashed = murmur_hash32(
        torch.tensor([seed, 42]), torch.tensor([position, 7]), torch.tensor(columns).long()
    )
    expected = [
        [on_bytes(struct.pack("<QII", s, p, column)) for column in columns]
        for s, p in ((seed, position), (42, 7))
    ]
    assert hashed.dtype == torch.uint32
    assert hashed.tolist() == expected
