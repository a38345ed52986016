"""Slot 0 stays clean: rows that have no slot of their own leave no K/V behind.

SGLang keeps slot 0 for padding, and rows of a block beyond a request's last slot use it, several requests
at once. What one of them wrote there, the others would read: masked, but NaN times a weight of zero is NaN.
Zero is what the pool holds there from its beginning, so zeros are what such rows write.

Where sliding layers have a pool of their own, a round in vain may find no slot there although it has one of the
others': its request has gone. Such rows write zeros everywhere.
"""

from __future__ import annotations

import torch


def without_slotless(slots: torch.Tensor, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """K and V ([n, ...] each), zero where a row's slot ([n] int64) is 0."""
    slotless = slots == 0
    return tuple(
        value.masked_fill(slotless.view(-1, *[1] * (value.dim() - 1)), 0) for value in values
    )
