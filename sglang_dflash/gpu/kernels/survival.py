"""What drafts are expected to give, and what became of them, in one and two launches; stands for `Survival`'s steps."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _multiply(a, b):
    return a * b


@triton.jit
def _expect(
    log_odds_ptr,
    kinds_ptr,
    rows_ptr,
    ended_ptr,
    rates_ptr,
    cells_ptr,
    chances_ptr,
    FIRST: tl.constexpr,
    PER_NAT: tl.constexpr,
    WIDEST: tl.constexpr,
    DRAFTS: tl.constexpr,
    DRAFTS_POW2: tl.constexpr,
    BINS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, DRAFTS_POW2)
    inside = i < DRAFTS
    log_odds = tl.load(log_odds_ptr + request * DRAFTS + i, mask=inside, other=0.0)
    # NaN and all that is small are in the first bin.
    size = tl.where(log_odds > FIRST, log_odds - FIRST, 0.0) * PER_NAT
    bins = tl.minimum(size, BINS - 1).to(tl.int64)
    cell = (tl.load(kinds_ptr + request) * WIDEST + i) * BINS + bins
    rate = tl.load(rates_ptr + cell, mask=inside, other=0.0)
    gone = tl.load(ended_ptr + tl.load(rows_ptr + request)) > 0
    tl.store(cells_ptr + request * DRAFTS + i, tl.where(gone, -1, cell), mask=inside)
    chance = tl.associative_scan(rate, 0, _multiply)
    tl.store(chances_ptr + request * DRAFTS + i, tl.where(gone, 0.0, chance), mask=inside)


def expect(
    log_odds: torch.Tensor,
    kinds: torch.Tensor,
    rows: torch.Tensor,
    ended: torch.Tensor,
    rates: torch.Tensor,
    first: float,
    per_nat: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cells and chances of drafts, as in `Estimate`.

    Args:
        log_odds: [bs, drafts] float32, contiguous.
        kinds, rows: [bs] int64; the first from 0 to kinds - 1.
        ended: by row, int32.
        rates: [kinds, widest, bins] float32.
        first, per_nat: where the first bin begins, and how many there are of each.
    """
    requests, drafts = log_odds.shape
    cells = torch.empty(log_odds.shape, dtype=torch.int64, device=log_odds.device)
    chances = torch.empty_like(log_odds)
    _expect[(requests,)](
        log_odds,
        kinds,
        rows,
        ended,
        rates,
        cells,
        chances,
        FIRST=first,
        PER_NAT=per_nat,
        WIDEST=rates.shape[1],
        DRAFTS=drafts,
        DRAFTS_POW2=triton.next_power_of_2(drafts),
        BINS=rates.shape[2],
        num_warps=1,
    )
    return cells, chances


# Blocks of another width come when traffic changes: nothing may be compiled then.
@triton.jit(do_not_specialize=["width", "drafts"])
def _count(
    cells_ptr,
    chances_ptr,
    rows_ptr,
    lengths_ptr,
    fresh_ptr,
    told_ptr,
    width,
    drafts,
    SIZE: tl.constexpr,
    WIDEST_POW2: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, WIDEST_POW2)
    length = tl.load(lengths_ptr + request)
    rows = tl.where(width > 0, width.to(tl.int64), tl.load(rows_ptr + request).to(tl.int64))
    chance = tl.load(chances_ptr + request * drafts + i, mask=i < drafts, other=0.0)
    told = tl.where(i < drafts, chance, rows.to(tl.float32))
    tl.store(told_ptr + request * (drafts + 1) + i, told, mask=i <= drafts)
    tried = (i < drafts) & (i < length) & (i < rows - 1)
    cell = tl.load(cells_ptr + request * drafts + i, mask=tried, other=-1)
    tried &= cell >= 0
    tl.atomic_add(fresh_ptr + cell, 1.0, mask=tried)
    tl.atomic_add(fresh_ptr + SIZE + cell, 1.0, mask=tried & (i < length - 1))


@triton.jit
def _update(
    fresh_ptr,
    counts_ptr,
    rates_ptr,
    guess_ptr,
    window,
    LEAST: tl.constexpr,
    GUESS: tl.constexpr,
    POOLED: tl.constexpr,
    KINDS: tl.constexpr,
    WIDEST: tl.constexpr,
    WIDEST_POW2: tl.constexpr,
    BINS: tl.constexpr,
):
    kind = tl.program_id(0)
    position, bins = tl.arange(0, WIDEST_POW2)[:, None], tl.arange(0, BINS)[None, :]
    inside = (position < WIDEST) & (bins < BINS)
    at = (kind * WIDEST + position) * BINS + bins
    size: tl.constexpr = KINDS * WIDEST * BINS
    tried_now = tl.load(fresh_ptr + at, mask=inside, other=0.0)
    survived_now = tl.load(fresh_ptr + size + at, mask=inside, other=0.0)
    kept = tl.maximum(1 - tl.sum(tried_now, axis=1) / window, LEAST)[:, None]
    tried = tl.load(counts_ptr + at, mask=inside, other=0.0) * kept + tried_now
    survived = tl.load(counts_ptr + size + at, mask=inside, other=0.0) * kept + survived_now
    tl.store(counts_ptr + at, tried, mask=inside)
    tl.store(counts_ptr + size + at, survived, mask=inside)
    zero = tl.zeros([WIDEST_POW2, BINS], tl.float32)
    tl.store(fresh_ptr + at, zero, mask=inside)
    tl.store(fresh_ptr + size + at, zero, mask=inside)
    guess = tl.load(guess_ptr + tl.arange(0, BINS))
    tried_at, survived_at = tl.sum(tried, axis=0), tl.sum(survived, axis=0)
    # A bin that was hardly seen is no better than the others turned out to be.
    hoped = tl.sum(tried_at * guess, axis=0) + GUESS
    guess *= tl.minimum((tl.sum(survived_at, axis=0) + GUESS) / hoped, 1.0)
    pooled = (survived_at + GUESS * guess) / (tried_at + GUESS)
    # Nor is one bin at a position better than the position's others.
    expected = tl.sum(tried * pooled[None, :], axis=1) + POOLED
    right = (tl.sum(survived, axis=1) + POOLED) / expected
    hoped_at = tl.minimum(pooled[None, :] * right[:, None], 1.0)
    rate = (survived + POOLED * hoped_at) / (tried + POOLED)
    tl.store(rates_ptr + at, rate, mask=inside)


def count_and_update(
    cells: torch.Tensor,
    chances: torch.Tensor,
    rows: torch.Tensor | int,
    lengths: torch.Tensor,
    fresh: torch.Tensor,
    counts: torch.Tensor,
    rates: torch.Tensor,
    guess: torch.Tensor,
    *,
    window: float,
    least: float,
    weights: tuple[float, float],
) -> torch.Tensor:
    """Counts what became of a round's drafts, and the rates that follow; see `Survival.learn` for what it gives.

    Args:
        fresh: [2, kinds, widest, bins] float32, of the round alone; zero before and after.
        counts: likewise, of tried and survived drafts; written.
        rates: [kinds, widest, bins] float32, written.
        window: drafts at a position after which older ones there are forgotten.
        least: that is kept of them after a round.
        weights: of the guess, and of a bin's chance at all positions.
    """
    ragged = isinstance(rows, torch.Tensor)
    _, kinds, widest, bins = fresh.shape
    requests, drafts = cells.shape
    told = chances.new_empty(requests, drafts + 1)
    _count[(requests,)](
        cells,
        chances,
        rows if ragged else lengths,
        lengths,
        fresh,
        told,
        0 if ragged else rows,
        drafts,
        SIZE=kinds * widest * bins,
        WIDEST_POW2=triton.next_power_of_2(widest + 1),
        num_warps=1,
    )
    _update[(kinds,)](
        fresh,
        counts,
        rates,
        guess,
        window,
        LEAST=least,
        GUESS=weights[0],
        POOLED=weights[1],
        KINDS=kinds,
        WIDEST=widest,
        WIDEST_POW2=triton.next_power_of_2(widest),
        BINS=bins,
        num_warps=4,
    )
    return told
