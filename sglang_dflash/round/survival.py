"""How likely drafts are to be accepted: learned of every round, where it runs.

How likely the drafter finds its draft says more than the draft's position does. So what became of drafts is counted
by position and by these odds, for each kind of request apart, and old drafts are forgotten. All numbers are whole or
come of whole ones by the same steps, so all ranks have the same.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from sglang_dflash.device_waits import to_device
from sglang_dflash.gpu.kernels.survival import count_and_update, expect
from sglang_dflash.round.adapter_buffers import Ids, has_adapters

# A kind of request: 1 if it draws, and 2 more if it has a LoRA adapter, whose target the drafter was not trained for.
_DRAWS, _ADAPTED = 1, 2
KINDS = 4
BINS = 16  # of log-odds, of which these are where the first begins, and how many there are of each
_FIRST, _PER_NAT = -2.5, 2.0
# Drafts at a position after which one there is forgotten, and what is kept of them after a round, at least. Each
# position forgets by its own: drafts far behind are seldom tried, and would be forgotten before they tell anything.
_WINDOW, _LEAST = 512, 0.5
# Drafts that a guess is worth: of a bin's chance before any was seen, and of a bin at one position by what is
# known of that bin and of that position.
_GUESS, _POOLED = 8.0, 16.0


@dataclass(frozen=True)
class Estimate:
    """What is expected of a round's drafts.

    Attributes:
        cells: [bs, width - 1] int64, which counts a draft belongs to; -1 for none.
        chances: [bs, width - 1] float32, that it is accepted, and all before it; 0 for requests that have ended.
    """

    cells: torch.Tensor
    chances: torch.Tensor

    def first(self, requests: int) -> Estimate:
        """Of the first requests, where the others only pad the batch."""
        return Estimate(self.cells[:requests], self.chances[:requests])


class Kinds:
    """What kind of request each of a round is, where graphs read it.

    Attributes:
        values: [requests] int64, from 0 to `KINDS` - 1; 0 for what pads a batch.
    """

    def __init__(self, requests: int, device: torch.device | str):
        self.values = torch.zeros(requests, dtype=torch.int64, device=device)
        self._told: list[int] = []

    def tell(self, requests: int, drawing: Collection[int], adapters: Ids | None) -> None:
        """Before a round.

        Args:
            drawing: of its requests those that draw.
            adapters: of each request; None if the server has none.
        """
        kinds: list[int] = []
        if drawing or has_adapters(adapters):
            kinds = [0] * requests
            for request in drawing:
                kinds[request] = _DRAWS
            for request, adapter in enumerate(adapters or ()):
                kinds[request] += _ADAPTED * (adapter is not None)
        if kinds != self._told:
            self._told = kinds
            told = torch.tensor(kinds + [0] * (len(self.values) - len(kinds)))
            self.values.copy_(to_device(told, self.values.device))


class Survival:
    """Counts of drafts that were tried and that survived, and the rates that they give.

    Attributes:
        rates: [KINDS, drafts, BINS] float32, that a draft is accepted if all before it are; by kind of request,
            position and log-odds.
    """

    def __init__(self, drafts: int, device: torch.device | str):
        """
        Args:
            drafts: of the widest block.
        """
        self._drafts, shape = drafts, (KINDS, drafts, BINS)
        self._counts = torch.zeros(2, *shape, device=device)
        self._fresh = torch.zeros_like(self._counts)
        middles = _FIRST + (torch.arange(BINS, device=device) + 0.5) / _PER_NAT
        self._guess = torch.sigmoid(middles)
        self.rates = self._guess.expand(shape).clone()

    def estimate(
        self, log_odds: torch.Tensor, kinds: torch.Tensor, rows: torch.Tensor, ended: torch.Tensor
    ) -> Estimate:
        """What is expected of drafts.

        Args:
            log_odds: [bs, width - 1] float32, that a draft is the token, as the drafter says.
            kinds: [bs] int64, as in `Kinds`.
            rows: [bs] int64, of the requests.
            ended: by row, int32, 1 for requests that have ended.
        """
        if log_odds.is_cuda:
            return Estimate(*expect(log_odds, kinds, rows, ended, self.rates, _FIRST, _PER_NAT))
        size = (log_odds - _FIRST).nan_to_num(0.0) * _PER_NAT
        bins = size.clamp(0, BINS - 1).to(torch.int64)
        position = torch.arange(log_odds.shape[1], device=log_odds.device)
        cells = (kinds[:, None] * self._drafts + position) * BINS + bins
        chances, gone = self.rates.flatten()[cells].cumprod(dim=1), (ended[rows] > 0)[:, None]
        return Estimate(cells.masked_fill(gone, -1), chances.masked_fill(gone, 0.0))

    def learn(
        self, estimate: Estimate, rows: torch.Tensor | int, lengths: torch.Tensor
    ) -> torch.Tensor:
        """Counts what became of a round's drafts.

        Args:
            rows: [bs] int64, how many rows of each request were verified, or of all.
            lengths: [bs] int64, tokens that the round commits, the bonus token included.

        Returns:
            What the host is told: the chances, and behind them how many rows were verified, [bs, width] float32.
        """
        cells, chances = estimate.cells, estimate.chances
        if cells.is_cuda:
            return count_and_update(
                *(cells, chances, rows, lengths),
                *(self._fresh, self._counts, self.rates, self._guess),
                window=_WINDOW,
                least=_LEAST,
                weights=(_GUESS, _POOLED),
            )
        position = torch.arange(cells.shape[1], device=cells.device)
        verified = rows[:, None] - 1 if isinstance(rows, torch.Tensor) else rows - 1
        tried = (position < lengths[:, None]) & (position < verified) & (cells >= 0)
        survived = tried & (position < lengths[:, None] - 1)
        for fresh, seen in zip(self._fresh, (tried, survived), strict=True):
            counted = cells.clamp(min=0).flatten()
            fresh.zero_().view(-1).index_add_(0, counted, seen.flatten().float())
        kept = (1 - self._fresh[0].sum(dim=2, keepdim=True) / _WINDOW).clamp(min=_LEAST)
        tried, survived = self._counts.mul_(kept).add_(self._fresh)
        tried_at, survived_at = tried.sum(1, keepdim=True), survived.sum(1, keepdim=True)
        # A bin that was hardly seen is no better than the others turned out to be.
        hoped = (tried_at * self._guess).sum(2, keepdim=True) + _GUESS
        guess = self._guess * ((survived_at.sum(2, keepdim=True) + _GUESS) / hoped).clamp(max=1.0)
        pooled = (survived_at + _GUESS * guess) / (tried_at + _GUESS)
        # Nor is one bin at a position better than the position's others.
        expected = (tried * pooled).sum(2, keepdim=True) + _POOLED
        pooled = (pooled * (survived.sum(2, keepdim=True) + _POOLED) / expected).clamp(max=1.0)
        torch.div(survived + _POOLED * pooled, tried + _POOLED, out=self.rates)
        told = chances.new_empty(len(cells), chances.shape[1] + 1)
        told[:, :-1], told[:, -1] = chances, rows
        return told
