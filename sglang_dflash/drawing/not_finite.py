"""A target that answers NaN: the request fails, the others go on, and nothing of it stays behind.

NaN travels with a request: what its tokens become is NaN, too, and so are the K/V under its slots.
Where a token is chosen, NaN gives `NOT_FINITE` instead; what chooses the next one on the device takes
token 0 for it, for a round in vain; and the host ends the request when it sees it (`scheduler/results.py`).
Slot 0, which requests share, never gets any of it (`clean_slot.py`).
"""

from __future__ import annotations

import torch

NOT_FINITE = -1


def mark(tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """`tokens`, and `NOT_FINITE` where one was chosen by NaN.

    Args:
        tokens: [n] int64.
        logits: [n], the largest of each row, which is NaN if one is.
    """
    return torch.where(logits.isnan(), NOT_FINITE, tokens)


def take_out(logits: torch.Tensor) -> torch.Tensor:
    """Rows with NaN, [n] bool; their NaN become 0, because a sampler cannot draw from them.

    Args:
        logits: [n, vocabulary], changed in place.
    """
    rows = logits.isnan().any(dim=-1)
    logits.nan_to_num_(nan=0.0, posinf=float("inf"), neginf=float("-inf"))
    return rows
