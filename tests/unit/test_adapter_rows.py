"""Rows by the adapters of their requests, in Triton's interpreter and on a GPU, beside PyTorch."""

from __future__ import annotations

import pytest
import torch

from sglang_dflash.gpu.kernels.adapter_rows import (
    group_rows,
    group_rows_reference,
    row_places,
    row_places_reference,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Of the adapters at places 0 to 4; there is none at 2, nor at the last, which stands for no adapter.
RANKS = [8, 16, 0, 4, 1, 0]


@pytest.mark.parametrize("most", [16, 32])
@pytest.mark.parametrize("rows", [64, 160, 1024])
@pytest.mark.parametrize("counts", [[5], [0, 40, 0, 9, 1, 3], [64], [1] * 9, [3, 0] * 16, []])
def test_as_pytorch(counts: list[int], rows: int, most: int) -> None:
    """Requests with any number of rows, and none; rows of nobody behind them; places that a pool has and has not."""
    torch.manual_seed(len(counts))
    requests = len(counts) + 2
    ends = torch.full((requests + 1,), sum(counts))
    ends[: len(counts) + 1] = torch.tensor([0, *counts]).cumsum(0)
    places = torch.randint(0, 5, (requests,), dtype=torch.int32)
    ranks, scalings = torch.tensor(RANKS, dtype=torch.int32), torch.rand(len(RANKS))
    given = (ends.int(), places, ranks, scalings)
    expected = group_rows_reference(*given, rows, most)
    found = group_rows(*(each.to(DEVICE) for each in given), rows, most)
    for name, ours, theirs in zip(found._fields, found, expected, strict=True):
        assert torch.equal(ours.cpu(), theirs), name
    assert torch.equal(
        row_places(ends.int().to(DEVICE), places.to(DEVICE), rows, 5).cpu(),
        row_places_reference(ends, places, rows, 5),
    )
    there = expected.rows >= 0
    assert expected.rows[there].sort().values.tolist() == list(range(rows))
    assert (there.int().diff(dim=1) <= 0).all()  # the first ones of a segment
