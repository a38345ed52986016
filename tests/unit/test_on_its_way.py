"""Numbers that the host reads while the device goes on."""

from __future__ import annotations

import torch

from sglang_dflash.drawing.on_its_way import DraftsOnHost

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DRAFTS = [[4, 5, 6], [7, 8, 9], [1, 2, 3]]


def test_some_are_verified() -> None:
    """Of four rows of a block as many as were shared out; the first is its bonus token's."""
    counts = torch.tensor([1, 4, 3], device=DEVICE)
    drafts = DraftsOnHost(torch.tensor(DRAFTS, device=DEVICE), counts)
    assert drafts.verified(range(3)) == [[], [7, 8, 9], [1, 2]]
    assert drafts.verified([2, 0]) == [[1, 2], []]
    assert drafts.rows([0, 2]) == [DRAFTS[0], DRAFTS[2]]


def test_all_are_verified() -> None:
    drafts = DraftsOnHost(torch.tensor(DRAFTS, device=DEVICE))
    assert drafts.verified(range(3)) == drafts.rows(range(3)) == DRAFTS
