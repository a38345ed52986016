"""The largest elements of rows, and what all others come to, by the kernel: as PyTorch finds them."""

from __future__ import annotations

import pytest
import torch

from sglang_dflash.gpu.kernels import argmax
from sglang_dflash.gpu.kernels.argmax import (
    row_max_and_rest,
    row_max_and_rest_kernel,
    row_max_kernel,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(("n", "size"), [(4, 300), (3, 40_000), (70, 9000), (600, 5000)])
def test_row_max(n: int, size: int) -> None:
    """Equal elements are many, and of those the first counts; by one program a row, and by several."""
    x = torch.randint(-5, 5, (n, size), device=DEVICE).float()
    x[0] = -1e30
    value, index = row_max_kernel(x)
    assert torch.equal(value, x.max(dim=-1).values)
    assert torch.equal(index, (x == value[:, None]).int().argmax(dim=-1))


def test_row_max_of_nan() -> None:
    x = torch.randn(6, 9000, device=DEVICE)
    x[1] = float("nan")
    x[2, 8000:8003] = float("nan")
    x[3, 17], x[3, 4200] = float("inf"), float("nan")
    x[5, 17], x[5, 8500] = float("nan"), float("nan")
    value, index = row_max_kernel(x)
    assert value.isnan().tolist() == [False, True, True, True, False, True]
    assert index.tolist() == x.max(dim=-1).indices.tolist()


@pytest.mark.parametrize(
    ("n", "size", "programs"), [(4, 300, 4096), (4, 40_000, 4096), (70, 9000, 4096), (8, 5000, 8)]
)
def test_row_max_and_rest(
    n: int, size: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With largest elements that are there twice, and next to nothing else; by one program a row, and by several."""
    monkeypatch.setattr(argmax, "WITH_REST", argmax.WITH_REST._replace(programs=programs))
    x = torch.randn(n, size, device=DEVICE)
    x[0, size // 2], x[0, -1] = 9.0, 8.0
    x[1] = torch.randint(-5, 5, (size,), device=DEVICE).float()
    x[2] = -1e30
    x[3, :-2] = float("-inf")
    value, index, rest = row_max_and_rest_kernel(x)
    assert torch.equal(value, x.amax(dim=-1))
    assert torch.equal(index, (x == value[:, None]).int().argmax(dim=-1))
    others = x.double().scatter(1, index[:, None], float("-inf")).logsumexp(dim=-1)
    torch.testing.assert_close(rest.double(), others, rtol=1e-5, atol=1e-4)
    for mine, its in zip(row_max_and_rest(x.cpu()), (value, index, rest), strict=True):
        torch.testing.assert_close(mine, its.cpu(), rtol=1e-5, atol=1e-4)
