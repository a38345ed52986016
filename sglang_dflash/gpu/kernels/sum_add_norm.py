"""Sum over the ranks, residual sum and RMSNorm in one launch, through memory that the ranks share.

Every rank writes its rows into the memory of every rank and counts itself in there. When all have come,
it adds up what lies in its own memory, in the order of the ranks, so that all get the same bits. A row is
written once per rank, so this is for few ranks or few rows.

Memory and counters come in two turns. Who writes a turn again has seen everybody come to the other one
since, and a rank comes to it only when it has read the turn before: nothing is overwritten unread.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sglang_dflash.gpu.kernels.launch import starts_early

FOREVER = -1  # as patience


class Shared(NamedTuple):
    """What the ranks share, as one of them sees it.

    Attributes:
        rows: [2, ranks] int64, by turn: addresses of each rank's [most_rows, ranks, row_size] elements.
        arrivals: [2, ranks] int64, by turn: addresses of each rank's [most_rows] int32, all 0 between two uses.
        rank: this one.
        row_size: elements from one rank's row to the next.
    """

    rows: torch.Tensor
    arrivals: torch.Tensor
    rank: int
    row_size: int


@triton.jit(do_not_specialize=["rank", "rows", "programs", "patience"])
def _sum_add_norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    sum_ptr,
    shared_ptr,
    arrivals_ptr,
    rank,
    eps,
    rows,
    programs,
    patience,
    RANKS: tl.constexpr,
    ROW_SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_POW2: tl.constexpr,
    EARLY: tl.constexpr,
):
    program = tl.program_id(0)
    i = tl.arange(0, SIZE_POW2)
    inside = i < SIZE
    weight = tl.load(weight_ptr + i, mask=inside, other=0).to(tl.float32)
    dtype = y_ptr.dtype.element_ty
    targets, counters = (), ()  # addresses, which no kernel writes
    for peer in tl.static_range(RANKS):
        target = tl.load(shared_ptr + peer).to(tl.pointer_type(dtype))
        targets += (tl.multiple_of(target, 16),)
        counters += (tl.load(arrivals_ptr + peer).to(tl.pointer_type(tl.int32)) + program,)
    received = tl.multiple_of(tl.load(shared_ptr + rank).to(tl.pointer_type(dtype)), 16)
    own = tl.load(arrivals_ptr + rank).to(tl.pointer_type(tl.int32)) + program
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    row = program
    while row < rows:
        at = row.to(tl.int64) * SIZE + i
        x = tl.load(x_ptr + at, mask=inside, other=0).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            x += tl.load(x_ptr + part * rows * SIZE + at, mask=inside, other=0)
        mine = (row.to(tl.int64) * RANKS + rank) * ROW_SIZE + i
        for peer in tl.static_range(RANKS):
            tl.store(targets[peer] + mine, x.to(dtype), mask=inside)
        row += programs

    tl.debug_barrier()  # a count says that all threads have written
    for peer in tl.static_range(RANKS):
        if peer != rank:
            tl.atomic_add(counters[peer], 1, sem="release", scope="sys")
    arrived = tl.atomic_add(own, 0, sem="acquire", scope="sys")
    waited = 0
    while (arrived < RANKS - 1) & (waited != patience):
        arrived = tl.atomic_add(own, 0, sem="acquire", scope="sys")
        waited = (waited + 1) & 0x3FFFFFFF  # never negative
    tl.atomic_xchg(own, 0, sem="relaxed", scope="sys")

    row = program
    while row < rows:
        at = row.to(tl.int64) * SIZE + i
        total = tl.zeros([SIZE_POW2], tl.float32)
        for peer in tl.static_range(RANKS):
            part_of = (row.to(tl.int64) * RANKS + peer) * ROW_SIZE + i
            total += tl.load(received + part_of, mask=inside, other=0).to(tl.float32)
        # Rounded as a sum over the ranks alone would be.
        total = total.to(dtype).to(tl.float32)
        total += tl.load(residual_ptr + at, mask=inside, other=0).to(tl.float32)
        tl.store(sum_ptr + at, total.to(dtype), mask=inside)
        scale = tl.rsqrt(tl.sum(total * total, axis=0) / SIZE + eps)
        tl.store(y_ptr + at, (total * scale * weight).to(dtype), mask=inside)
        row += programs


@functools.cache
def _most_programs(size: int) -> int:
    """So many that all of them have room on the GPU at once, as they wait for the other ranks' ones.

    Args:
        size: elements of a row, a power of two, which decides how many registers a program has.
    """
    if not torch.cuda.is_available():
        return 4  # in Triton's interpreter: so few that a program has several rows
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return max(1, 4 * 4096 // max(size, 4096)) * properties.multi_processor_count


def sum_add_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    shared: Shared,
    turn: int,
    patience: int = FOREVER,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm of a sum over the ranks and the residual, and that sum; all ranks must call it alike.

    Args:
        x: this rank's, [n, hidden], or the parts of a product, [parts, n, hidden] float32; contiguous.
        residual: [n, hidden], contiguous, of the dtype of the shared rows; not written.
        weight: [hidden].
        turn: 0 or 1, the other one than in the call before.
        patience: how often to look for the other ranks, after which what is there is added up.

    Returns:
        [n, hidden] each, of the dtype of `residual`.
    """
    n, size = residual.shape
    y, total = torch.empty_like(residual), torch.empty_like(residual)
    size_pow2 = triton.next_power_of_2(size)
    early, programs = starts_early(n), min(n, _most_programs(size_pow2))
    _sum_add_norm[(programs,)](
        x,
        residual,
        weight,
        y,
        total,
        shared.rows[turn],
        shared.arrivals[turn],
        shared.rank,
        eps,
        n,
        programs,
        patience,
        RANKS=shared.rows.shape[1],
        ROW_SIZE=shared.row_size,
        PARTS=x.shape[0] if x.dim() == 3 else 1,
        SIZE=size,
        SIZE_POW2=size_pow2,
        EARLY=early,
        launch_pdl=early,
        num_warps=max(1, min(8, size_pow2 // 512)),
    )
    return y, total
