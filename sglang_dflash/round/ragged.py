"""Ragged verification: of each request's block as many rows as pay, side by side.

A row is worth what its draft is likely to give: the product of the chances of all drafts up to it. Those of a request
never rise, so the rows that are worth most are always a beginning of each block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_dflash.gpu import at_once
from sglang_dflash.gpu.kernels.share_rows import share_rows

_NOT_VERIFIED = -3  # no token, and no mark of one
# Requests, and rows of a block, for which the kernel is compiled; for more it is compiled anew.
_MOST, _WIDEST = 256, 16


@dataclass(frozen=True)
class Ragged:
    """Which rows of the blocks of a round are verified.

    Attributes:
        total: how many, of all requests; at least one of each.
        width: rows of a whole block.
        counts: [bs] int64, rows of each request.
        begins: [bs] int64, where they begin.
        source: [total] int64, which rows of whole blocks they are.
    """

    total: int
    width: int
    counts: torch.Tensor
    begins: torch.Tensor
    source: torch.Tensor

    @classmethod
    def share(cls, chances: torch.Tensor, total: int) -> Ragged:
        """Gives rows to the drafts that are likeliest to be accepted.

        Args:
            chances: [bs, width - 1] float, that a draft is accepted and all before it; not rising.
            total: of all requests, from bs to bs * width.
        """
        requests, drafts = chances.shape
        if at_once.used():
            most, widest = max(requests, _MOST), max(drafts + 1, _WIDEST)
            return cls(total, drafts + 1, *share_rows(chances, total, most, widest))
        order = chances.flatten().argsort(descending=True, stable=True)
        owners = order[: total - requests] // drafts
        counts = torch.ones_like(order[:requests])
        counts.scatter_add_(0, owners, torch.ones_like(owners))
        return cls.of(counts, total, drafts + 1)

    @classmethod
    def of(cls, counts: torch.Tensor, total: int, width: int) -> Ragged:
        """Rows that were shared out: [bs] int64, whose sum is `total`."""
        ends = counts.cumsum(0)
        begins, rows = ends - counts, torch.arange(total, device=counts.device)
        owners = torch.searchsorted(ends, rows, right=True)
        return cls(total, width, counts, begins, rows - begins[owners] + owners * width)

    def hide(self, drafts: torch.Tensor) -> torch.Tensor:
        """Drafts ([bs, width - 1] int64), those that are not verified made such that none is accepted."""
        position = torch.arange(1, self.width, device=drafts.device)
        return drafts.masked_fill(position >= self.counts[:, None], _NOT_VERIFIED)

    def spread(self, tokens: torch.Tensor) -> torch.Tensor:
        """What the rows give, in the shape of whole blocks, 0 where there is none: [total] → [bs, width]."""
        blocks = tokens.new_zeros(len(self.counts) * self.width)
        blocks[self.source] = tokens
        return blocks.view(-1, self.width)

    @property
    def nearest(self) -> torch.Tensor:
        """For each row of whole blocks the last at it or before it that is verified: [bs * width] int64."""
        position = torch.arange(self.width, device=self.counts.device)
        return (self.begins[:, None] + position.minimum(self.counts[:, None] - 1)).flatten()
