"""Accept, bonus token and request state in one launch; stands for `accept` and `RequestState.advance`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _accept(
    target_ptr,
    draft_ptr,
    counts_ptr,
    rows_ptr,
    accepted_ptr,
    bonus_out_ptr,
    lengths_ptr,
    bonus_ptr,
    ends_ptr,
    limits_ptr,
    ended_ptr,
    padding_row,
    ENDS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_POW2: tl.constexpr,
    RAGGED: tl.constexpr,
):
    request = tl.program_id(0)
    i = tl.arange(0, WIDTH_POW2)
    drafted = i < WIDTH - 1
    if RAGGED:
        drafted &= i < tl.load(counts_ptr + request) - 1
    target = tl.load(target_ptr + request * WIDTH + i, mask=drafted, other=-1)
    draft = tl.load(draft_ptr + request * (WIDTH - 1) + i, mask=drafted, other=-2)
    # Drafts up to the first mismatch; beyond those that were verified, the padding mismatches.
    accepted = tl.min(tl.where(target == draft, WIDTH_POW2, i), axis=0)
    bonus = tl.load(target_ptr + request * WIDTH + accepted)
    tl.store(accepted_ptr + request, (accepted + 1).to(tl.int64))
    tl.store(bonus_out_ptr + request, bonus)
    row = tl.load(rows_ptr + request)
    if row != padding_row:
        tl.store(bonus_ptr + row, tl.maximum(bonus, 0))
        length = tl.load(lengths_ptr + row) + accepted + 1
        tl.store(lengths_ptr + row, length)
        committed = tl.load(target_ptr + request * WIDTH + i, mask=i <= accepted, other=-1)
        over = (length >= tl.load(limits_ptr + row)).to(tl.int32)
        for end in tl.static_range(ENDS):
            hit = (i <= accepted) & (committed == tl.load(ends_ptr + row * ENDS + end))
            over = tl.maximum(over, tl.max(hit.to(tl.int32), axis=0))
        tl.store(ended_ptr + row, tl.maximum(over, tl.load(ended_ptr + row)))


def accept_and_advance(
    target_tokens: torch.Tensor,
    draft_tokens: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    bonus_tokens: torch.Tensor,
    ends: torch.Tensor,
    limits: torch.Tensor,
    ended: torch.Tensor,
    padding_row: int,
    counts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """How much of a round is accepted, and the request state moved on.

    Args:
        target_tokens: [bs, width] int64, contiguous.
        draft_tokens: [bs, width - 1] int64, contiguous.
        rows: [bs] int64; a padding request changes nothing.
        lengths, bonus_tokens, ended: [rows + 1] int64 and int32, the request state, written.
        ends, limits: [rows + 1, ends] and [rows + 1] int64, of the same.
        counts: [bs] int64, rows of each request that were verified; None for all.

    Returns:
        Accept lengths, the bonus token included, and the next bonus tokens, [bs] int64 each.
    """
    batch_size, width = target_tokens.shape
    accepted, bonus = torch.empty(2, batch_size, dtype=torch.int64, device=rows.device)
    _accept[(batch_size,)](
        target_tokens,
        draft_tokens,
        rows if counts is None else counts,
        rows,
        accepted,
        bonus,
        lengths,
        bonus_tokens,
        ends,
        limits,
        ended,
        padding_row,
        ENDS=ends.shape[1],
        WIDTH=width,
        WIDTH_POW2=triton.next_power_of_2(width),
        RAGGED=counts is not None,
        num_warps=1,
    )
    return accepted, bonus
