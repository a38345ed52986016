"""Rows for the likeliest drafts, in one launch behind the sort; stands for `Ragged.share`'s steps."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_CHUNK = 64  # drafts that are counted at once


# Blocks of another width come when traffic changes, and tensors begin anywhere: nothing may be compiled then.
@triton.jit(
    do_not_specialize=["requests", "given", "width"],
    do_not_specialize_on_alignment=["order_ptr", "counts_ptr", "begins_ptr", "source_ptr"],
)
def _share(
    order_ptr,
    counts_ptr,
    begins_ptr,
    source_ptr,
    requests,
    given,
    width,
    REQUESTS_POW2: tl.constexpr,
    WIDEST_POW2: tl.constexpr,
    CHUNK: tl.constexpr,
):
    request = tl.arange(0, REQUESTS_POW2)
    known = request < requests
    counts = known.to(tl.int32)
    i = tl.arange(0, CHUNK)
    for first in range(0, given, CHUNK):
        draft = tl.load(order_ptr + first + i, mask=first + i < given, other=-1)
        owner = tl.where(draft < 0, -1, draft // (width - 1)).to(tl.int32)
        counts += tl.sum((owner[:, None] == request[None, :]).to(tl.int32), axis=0)
    begins = tl.cumsum(counts, 0) - counts
    tl.store(counts_ptr + request, counts.to(tl.int64), mask=known)
    tl.store(begins_ptr + request, begins.to(tl.int64), mask=known)
    row = tl.arange(0, WIDEST_POW2)
    place = begins[:, None] + row[None, :]
    source = request[:, None] * width + row[None, :]
    verified = known[:, None] & (row[None, :] < counts[:, None])
    tl.store(source_ptr + place, source.to(tl.int64), mask=verified)


def share_rows(
    order: torch.Tensor, requests: int, width: int, total: int, most: int, widest: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Counts, begins and source of rows, as in `Ragged`.

    Args:
        order: [requests * (width - 1)] int64, drafts of all blocks, those first that are worth most.
        total: rows, at least one of each request.
        most, widest: no fewer than the requests, and rows of a block, of any call: a kernel is compiled for these.
    """
    made = torch.empty(2 * requests + total, dtype=torch.int64, device=order.device)
    counts, begins, source = made.split((requests, requests, total))
    _share[(1,)](
        order,
        counts,
        begins,
        source,
        requests,
        total - requests,
        width,
        REQUESTS_POW2=triton.next_power_of_2(most),
        WIDEST_POW2=triton.next_power_of_2(widest),
        CHUNK=_CHUNK,
        num_warps=8,
    )
    return counts, begins, source
