"""Attention of blocks of few rows, of many requests, beside FA3's of all others.

FA3's smallest tile has 64 rows, of which such blocks fill a few, and takes all of a multiprocessor's shared memory.
Triton's with 16 leave room for a second program, so that one loads keys while the other computes.
"""

from __future__ import annotations

import torch

from sglang_dflash.gpu.kernels.block_tiles import WHOLE, Split, Tile
from sglang_dflash.gpu.kernels.tile_plan import Plan, make_plan
from sglang_dflash.gpu.triton_attention import TritonBlockAttention
from sglang_dflash.gpu.triton_side_by_side import TritonSideBySide

TILE = Tile(16, 128, 4, 2)
TILE_HEAD = 128  # the largest that it is for
# KV heads of all requests, for each multiprocessor, from which on programs that each have all keys are faster than FA3.
PROGRAMS = 1.5


class NarrowBlockAttention(TritonBlockAttention):
    """Each program has all rows of a request and KV head, and all of their keys."""

    tile = TILE

    def split(self) -> Split:
        return WHOLE


class NarrowSideBySide(TritonSideBySide):
    """The same of requests that have different numbers of rows."""

    def _plan(
        self, q: torch.Tensor, lengths: torch.Tensor, kv_heads: int, dim: int, v_dim: int
    ) -> Plan:
        rows, heads, _ = q.shape
        return make_plan(self.ends, lengths, rows, heads // kv_heads, TILE, 0)
