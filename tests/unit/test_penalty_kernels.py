"""Kernels of penalties against the PyTorch code that they stand for, on random input."""

from __future__ import annotations

import pytest
import torch

from sglang_dflash.gpu.kernels.penalties import (
    END,
    PRESENT,
    Counted,
    count,
    count_reference,
    penalize,
    penalize_reference,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS, PLACES = 9, 4


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def counted(vocabulary: int) -> Counted:
    """Four places, of which rows 0, 2, 5 and 7 have one each."""
    marks = torch.randint(0, 2, (PLACES, vocabulary)) * PRESENT
    marks |= (torch.rand(PLACES, vocabulary) < 0.1) * END
    places = torch.full((ROWS + 1,), -1)
    places[torch.tensor([0, 2, 5, 7])] = torch.tensor([3, 0, 2, 1])
    made = Counted(
        places=places,
        sums=torch.randn(PLACES, vocabulary) * ((marks & PRESENT) > 0),
        marks=marks.to(torch.uint8),
        rates=torch.tensor([[0.1, 0.3, 1.3], [0.0, 1.0, 1.0], [-1.0, 0.0, 0.7], [0, 0, 1]]),
        output=torch.tensor([[5, 7], [3, 0], [0, 100], [6, 6]], dtype=torch.int32),
    )
    return Counted(*(part.to(DEVICE) for part in made))


@pytest.mark.parametrize(("vocabulary", "width"), [(1500, 16), (1024, 1), (40, 5)])
def test_penalize(vocabulary: int, width: int) -> None:
    """Also where a row of logits is part of a longer one, and a draft comes twice."""
    rows = torch.tensor([2, 1, 0, ROWS, 7, 5], device=DEVICE)
    drafts = torch.randint(0, min(vocabulary, 30), (len(rows), width - 1), device=DEVICE)
    state = counted(vocabulary)
    logits = torch.randn(len(rows) * width, vocabulary + 8, device=DEVICE)
    logits[0, 3] = float("-inf")
    mine, expected = (logits.clone()[:, :vocabulary] for _ in range(2))
    penalize(mine, rows, drafts, state)
    penalize_reference(expected, rows, drafts, state)
    rtol = 0 if DEVICE == "cpu" else 1e-6  # the kernel divides as compiled code does
    torch.testing.assert_close(mine, expected, rtol=rtol, atol=0)
    changed = (mine != logits[:, :vocabulary]).view(len(rows), -1).any(dim=1)
    assert changed.tolist() == [True, False, True, False, True, True]


@pytest.mark.parametrize(("most", "vocabulary"), [(1, 50), (16, 50), (100, 2000)])
def test_count(most: int, vocabulary: int) -> None:
    rows = torch.tensor([2, 1, 0, ROWS, 7, 5], device=DEVICE)
    tokens = torch.randint(-1, 20, (len(rows), most), device=DEVICE)
    lengths = torch.randint(1, most + 1, (len(rows),), device=DEVICE)
    mine = counted(vocabulary)
    expected = Counted(*(part.clone() for part in mine))
    count(rows, tokens, lengths, mine)
    count_reference(rows, tokens, lengths, expected)
    for part, reference in zip(mine, expected, strict=True):
        assert torch.equal(part, reference)
