"""Triton's attention of blocks against the PyTorch code that it stands for, on random input.

Without a GPU it runs in Triton's interpreter.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_dflash.gpu.kernels.block_attention import block_attention, block_attention_reference
from sglang_dflash.gpu.kernels.block_tiles import (
    LONG,
    MOST_PARTS,
    MOST_PROGRAMS,
    TILES,
    WHOLE,
    Split,
    Tile,
    choose_split,
    choose_tile,
)
from sglang_dflash.gpu.kernels.over_keys import FP8
from tests.unit.paged_keys import DEVICE, DTYPES, SMALL, TOLERANCE, pool

ROOT = Path(__file__).parents[2]
LENGTHS = (4, 31, 32, 33, 90, 0)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def compare(
    lengths: Sequence[int] = LENGTHS,
    width: int = 4,
    page_size: int = 1,
    kv_heads: int = 1,
    group: int = 2,
    dim: int = 64,
    v_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    split: Split = WHOLE,
    tile: Tile | None = SMALL,
    sinks: bool = False,
    **options: Any,
) -> None:
    """The kernel and its reference on the same input."""
    k, v, table = pool(lengths, page_size, kv_heads, dim, v_dim or dim, kv_dtype or dtype)
    q = torch.randn(len(lengths) * width, kv_heads * group, dim, device=DEVICE).to(dtype)
    given = (q, k, v, table, torch.tensor(lengths, dtype=torch.int32, device=DEVICE))
    options = {"causal": True, "scale": dim**-0.5, "width": width, "page_size": page_size} | options
    if sinks:
        options["sinks"] = torch.randn(kv_heads * group, device=DEVICE)
    made = block_attention(*given, split=split, tile=tile, **options)
    expected = block_attention_reference(*given, **options)
    assert made.isfinite().all()
    torch.testing.assert_close(made, expected, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("split", [WHOLE, Split(4, 4), Split(2, 8)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lengths(dtype: torch.dtype, split: Split, causal: bool) -> None:
    """From none to several steps and pages, at their borders and beside them."""
    compare(dtype=dtype, split=split, causal=causal)


@pytest.mark.parametrize("page_size", [1, 16, 64, 256])
@pytest.mark.parametrize("split", [WHOLE, Split(4, 4)])
def test_pages(page_size: int, split: Split) -> None:
    compare(page_size=page_size, split=split)


@pytest.mark.parametrize(
    ("width", "kv_heads", "group"), [(16, 1, 1), (16, 2, 4), (5, 1, 3), (2, 3, 7), (16, 1, 5)]
)
def test_heads(width: int, kv_heads: int, group: int) -> None:
    """Rows that fill tiles, and rows that do not; one tile and several."""
    compare((width, 60), width, kv_heads=kv_heads, group=group, split=Split(2, 2))


@pytest.mark.parametrize("split", [WHOLE, Split(4, 4)])
@pytest.mark.parametrize(
    ("dim", "v_dim"), [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (64, 96)]
)
def test_sizes_of_heads(dim: int, v_dim: int, split: Split) -> None:
    """As they run: with the tile that is chosen for them."""
    compare((16, 150), 16, dim=dim, v_dim=v_dim, split=split, tile=None)


@pytest.mark.parametrize(
    "options",
    [
        {"window": 0},
        {"window": 20},
        {"window": 70, "causal": False},
        {"cap": 0.5},
        {"cap": 30.0, "window": 33},
        {"sinks": True},
        {"sinks": True, "window": 10, "cap": 2.0},
        {"chunk": 32},
        {"chunk": 7, "sinks": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("split", [WHOLE, Split(4, 4)])
def test_windows_caps_and_sinks(options: dict[str, Any], split: Split) -> None:
    compare(page_size=4, split=split, **options)


@pytest.mark.parametrize("split", [WHOLE, Split(4, 4)])
@pytest.mark.parametrize("kv_dtype", FP8, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fp8(dtype: torch.dtype, kv_dtype: torch.dtype, split: Split) -> None:
    compare(dtype=dtype, kv_dtype=kv_dtype, split=split)
    compare(dtype=dtype, kv_dtype=kv_dtype, split=split, k_scale=0.5, v_scale=1.5)


@pytest.mark.parametrize("kv_dtype", FP8, ids=str)
def test_every_byte_of_fp8(kv_dtype: torch.dtype) -> None:
    """As a request's only value, which comes out as it is: subnormal numbers, infinities and NaN, too."""
    stored = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(kv_dtype)
    v = stored.view(16, 1, 16)
    table = torch.arange(16, dtype=torch.int32, device=DEVICE)[:, None]
    q = torch.zeros(16, 1, 16, device=DEVICE)
    lengths = torch.ones(16, dtype=torch.int32, device=DEVICE)
    options = dict(width=1, page_size=1, scale=1.0, causal=True, split=WHOLE, tile=SMALL)
    made = block_attention(q, torch.zeros_like(v), v, table, lengths, **options)
    # Of what is not finite only that it is not: nothing times it is NaN in the rows beside it.
    expected = stored.float().view(16, 1, 16)
    assert torch.equal(made[expected.isfinite()], expected[expected.isfinite()])
    assert not made[~expected.isfinite()].isfinite().any()


@pytest.mark.parametrize("groups", [1, 8, 64, 256, 2048])
@pytest.mark.parametrize("longest", [100, 2048, 40960, 10**6])
def test_split(groups: int, longest: int) -> None:
    split = choose_split(groups, longest, 132)
    assert split.fill <= split.most <= MOST_PARTS
    assert split.fill & (split.fill - 1) == split.most & (split.most - 1) == 0
    assert split.fill * groups <= 2 * 132 or split.fill == 1
    assert split.most * groups <= MOST_PROGRAMS or split.most == split.fill
    room = split.most < min(MOST_PARTS, MOST_PROGRAMS // groups)
    assert not room or split.most * LONG >= longest  # enough for parts of the length that is meant


def test_tiles_fit() -> None:
    """Into the memory that a program may have: of an H200, and of the GPUs with least."""
    for head_dim in (64, 80, 128, 192, 256):
        for rows in (2, 16, 40, 64, 128):
            for itemsize in (2, 4):
                for memory in (232_448, 101_376):
                    tile = choose_tile(head_dim, rows, itemsize, memory)
                    size = next(size for size in TILES if head_dim <= size)
                    used = (tile.rows + 2 * tile.stages * tile.keys) * size * itemsize
                    assert used <= memory or tile.stages == 1
    assert choose_tile(128, 64, 2, 232_448) == TILES[128][-1]


def test_one_order_of_sums() -> None:
    """With `WHOLE` a request's result is the same to the bit, whoever is beside it."""
    lengths = (70, 40, 20)
    k, v, table = pool(lengths, 1, 2, 64, 64, torch.float32)
    q = torch.randn(3 * 4, 4, 64, device=DEVICE)
    lengths = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    options = dict(width=4, page_size=1, scale=0.1, causal=True, split=WHOLE, tile=SMALL)
    together = block_attention(q, k, v, table, lengths, **options)
    for i in range(3):
        alone = block_attention(
            q[4 * i : 4 * i + 4], k, v, table[i : i + 1], lengths[i : i + 1], **options
        )
        assert torch.equal(together[4 * i : 4 * i + 4], alone)


def test_compiles() -> None:
    """For the GPUs of several generations, which need not be here."""
    command = [sys.executable, "-m", "tests.unit.compiled"]
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
