"""Attention of blocks of few rows through what stands for a backend, against the PyTorch code that it stands for."""

from __future__ import annotations

from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch

from sglang_dflash.gpu.kernels.block_attention import block_attention_reference
from sglang_dflash.gpu.kernels.side_by_side import side_by_side_reference
from sglang_dflash.gpu.narrow_attention import NarrowBlockAttention, NarrowSideBySide
from tests.unit.paged_keys import DEVICE, DTYPES, TOLERANCE, pool

HEADS, KV_HEADS, DIM = 8, 2, 64
LAYER = SimpleNamespace(scaling=DIM**-0.5, logit_cap=0.0, sliding_window_size=None, k_scale=None)
RUNNER = SimpleNamespace(page_size=16, token_to_kv_pool=None, attention_chunk_size=None)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def on_device(numbers: list[int]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks(dtype: torch.dtype, width: int, causal: bool) -> None:
    """Of a few keys, of many steps, and of none, as what pads a batch has."""
    lengths = [width, 127 + width, 300, 0]
    k, v, table = pool(lengths, 16, KV_HEADS, DIM, DIM, dtype)
    q = torch.randn(len(lengths) * width, HEADS, DIM, device=DEVICE).to(dtype)
    attention = NarrowBlockAttention(RUNNER, on_device(lengths), table, width, causal, False)
    attention.prepare()
    made = attention.attend(q, k, v, LAYER, causal)
    options = dict(width=width, page_size=16, scale=LAYER.scaling, causal=causal)
    expected = block_attention_reference(q, k, v, table, on_device(lengths), **options)
    torch.testing.assert_close(made, expected, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_side_by_side(dtype: torch.dtype) -> None:
    """Of one row and of several, and more that only fill a pass up."""
    counts, lengths = [1, 4, 2, 3, 9], [40, 300, 2, 129, 9]
    k, v, table = pool(lengths, 16, KV_HEADS, DIM, DIM, dtype)
    q = torch.randn(sum(counts), HEADS, DIM, device=DEVICE).to(dtype)
    ends, lengths = on_device(list(accumulate(counts, initial=0))), on_device(lengths)
    attention = NarrowSideBySide(RUNNER, lengths, table, ends, len(q))
    attention.prepare()
    made = attention.attend(q, k, v, LAYER, True)
    options = dict(page_size=16, scale=LAYER.scaling, causal=True)
    expected = side_by_side_reference(q, k, v, table, ends, lengths, **options)
    torch.testing.assert_close(made, expected, rtol=0, atol=TOLERANCE[dtype])
