"""Rows for the likeliest drafts, in one launch; stands for `Ragged.share`'s steps."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Floats that are not negative are in the order of their bits, read as whole numbers; what is no number is above these.
_INFINITE = tl.constexpr(0x7F800000)
_HALVINGS = tl.constexpr(31)


# Blocks of another width come when traffic changes, and tensors begin anywhere: nothing may be compiled then.
@triton.jit(
    do_not_specialize=["requests", "given", "width"],
    do_not_specialize_on_alignment=["chances_ptr", "counts_ptr", "begins_ptr", "source_ptr"],
)
def _share(
    chances_ptr,
    counts_ptr,
    begins_ptr,
    source_ptr,
    requests,
    given,
    width,
    REQUESTS_POW2: tl.constexpr,
    WIDEST_POW2: tl.constexpr,
):
    request, draft = tl.arange(0, REQUESTS_POW2), tl.arange(0, WIDEST_POW2)
    known = request < requests
    drafted = known[:, None] & (draft < width - 1)[None, :]
    at = request[:, None] * (width - 1) + draft[None, :]
    bits = tl.load(chances_ptr + at, mask=drafted, other=0.0).to(tl.int32, bitcast=True)
    bits = tl.where(drafted, tl.minimum(bits, _INFINITE - 1), -1)

    # The least chance of a draft that gets a row: no fewer than are given have it or more.
    least, beyond = given * 0, given * 0 + _INFINITE
    for _ in range(_HALVINGS):
        middle = least + (beyond - least) // 2
        enough = tl.sum((bits >= middle).to(tl.int32)) >= given
        least = tl.where(enough, middle, least)
        beyond = tl.where(enough, beyond, middle)
    more, equal = (bits > least).to(tl.int32), (bits == least).to(tl.int32)
    # Of those that have just it, the first.
    of_request = tl.sum(equal, axis=1)
    before = (tl.cumsum(of_request, 0) - of_request)[:, None] + tl.cumsum(equal, 1) - equal
    chosen = more + equal * (before < given - tl.sum(more)).to(tl.int32)

    counts = known.to(tl.int32) + tl.sum(chosen, axis=1)
    begins = tl.cumsum(counts, 0) - counts
    tl.store(counts_ptr + request, counts.to(tl.int64), mask=known)
    tl.store(begins_ptr + request, begins.to(tl.int64), mask=known)
    source = request[:, None] * width + draft[None, :]
    verified = known[:, None] & (draft[None, :] < counts[:, None])
    tl.store(source_ptr + begins[:, None] + draft[None, :], source.to(tl.int64), mask=verified)


def share_rows(
    chances: torch.Tensor, total: int, most: int, widest: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Counts, begins and source of rows, as in `Ragged`.

    Args:
        chances: [requests, drafts] float32, from 0 to 1, contiguous; not rising from draft to draft.
        total: rows, at least one of each request.
        most, widest: no fewer than the requests, and rows of a block, of any call: a kernel is compiled for these.
    """
    requests, drafts = chances.shape
    made = torch.empty(2 * requests + total, dtype=torch.int64, device=chances.device)
    counts, begins, source = made.split((requests, requests, total))
    _share[(1,)](
        chances,
        counts,
        begins,
        source,
        requests,
        total - requests,
        drafts + 1,
        REQUESTS_POW2=triton.next_power_of_2(most),
        WIDEST_POW2=triton.next_power_of_2(widest),
        num_warps=8,
    )
    return counts, begins, source
