"""What a prefill leaves of its requests, in one launch; stands for `RequestState.start`'s steps."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(
    do_not_specialize_on_alignment=["rows_ptr", "tokens_ptr", "starts_ptr", "found_ptr"],
)
def _start(
    rows_ptr,
    tokens_ptr,
    starts_ptr,
    found_ptr,
    lengths_ptr,
    bonus_ptr,
    ends_ptr,
    limits_ptr,
    ended_ptr,
    ENDS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + request)
    token = tl.load(tokens_ptr + request).to(tl.int64)
    tl.store(bonus_ptr + row, tl.maximum(token, 0))
    tl.store(lengths_ptr + row, tl.load(starts_ptr + request).to(tl.int64))
    i = tl.arange(0, ENDS)
    ends = tl.load(found_ptr + request * (ENDS + 1) + i)
    tl.store(ends_ptr + row * ENDS + i, ends)
    tl.store(limits_ptr + row, tl.load(found_ptr + request * (ENDS + 1) + ENDS))
    tl.store(ended_ptr + row, tl.max((ends == token).to(tl.int32), axis=0))


def start_requests(
    rows: torch.Tensor,
    bonus_tokens: torch.Tensor,
    lengths: torch.Tensor,
    ends: torch.Tensor,
    state: tuple[torch.Tensor, ...],
) -> None:
    """
    Args:
        rows, bonus_tokens, lengths: [bs] int, the first int64.
        ends: [bs, ENDS + 1] int64, contiguous; see `RequestState.start`.
        state: lengths, bonus tokens, ends, limits and marks of those that have ended, by row.
    """
    _start[(len(rows),)](
        rows, bonus_tokens, lengths, ends, *state, ENDS=ends.shape[1] - 1, num_warps=1
    )
