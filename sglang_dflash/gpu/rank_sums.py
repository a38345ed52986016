"""Sums over the ranks of a tensor-parallel group, with the residual sum and the norm that follow.

Where it is asked for and the ranks reach each other's memory, all of it is one kernel (`kernels/sum_add_norm.py`);
else, or where there is too much to write it to every rank, the release sums and our kernel does the rest.
"""

from __future__ import annotations

import ctypes
import logging
import os

import torch
import torch.distributed as dist
from sglang.srt.distributed import get_tp_group
from sglang.srt.distributed.device_communicators.cuda_wrapper import CudaRTLibrary
from sglang.srt.distributed.device_communicators.custom_all_reduce import CustomAllreduce
from sglang.srt.distributed.parallel_state import GroupCoordinator
from sglang.srt.layers.layernorm import RMSNorm

from sglang_dflash.gpu.kernels.add_norm import add_norm
from sglang_dflash.gpu.kernels.sum_add_norm import Shared, sum_add_norm

logger = logging.getLogger(__name__)

# 1 asks for the one kernel, 0 for the release's sums; two ranks take the one kernel unasked, more were never tried.
FUSE_SUMS = "SGLANG_DFLASH_FUSE_SUMS"

# Bytes of the rows of a sum, up to which each rank writes all of them to every rank, by the number of ranks: two
# H200s gain a fifth of a round at 16 rows and nothing at 128, and with more ranks the release changes to two steps.
MOST_BYTES = {2: 256 << 10, 4: 256 << 10, 6: 128 << 10, 8: 128 << 10}

_TURNS = 2
_ALIGNMENT = 256  # bytes
_CHECK_PATIENCE = 1 << 25  # about a minute, in which ranks may compile


class RankSums:
    """The sums of one process's layers, of the target and of the draft model.

    Attributes:
        shared: memory of all ranks; None where they cannot reach each other's.
        most_rows: that the shared memory holds.
    """

    def __init__(self, group: GroupCoordinator, shared: Shared | None, most_rows: int):
        self.group, self.shared, self.most_rows = group, shared, most_rows

    def adds_parts(self, rows: int) -> bool:
        """Whether a sum of so many rows takes products in parts."""
        return self.shared is not None and rows <= self.most_rows

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, norm: RMSNorm, turn: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """RMSNorm of a sum over the ranks and the residual, and that sum; all ranks must call it alike.

        Args:
            x: this rank's part, [n, hidden], or parts of that, [parts, n, hidden] float32, where
                `adds_parts` says so.
            residual: [n, hidden].
            turn: 0 or 1, the other one than in the call before.
        """
        weight, eps = norm.weight, norm.variance_epsilon
        if self.adds_parts(len(residual)):
            return sum_add_norm(x, residual, weight, eps, self.shared, turn)
        return add_norm(self.group.all_reduce(x), residual, weight, eps)


def open_rank_sums(row_size: int, rows: int, dtype: torch.dtype) -> RankSums | None:
    """Sums over the ranks of this process's group; None where there is one rank. All ranks call it alike.

    Args:
        row_size: elements of the longest row.
        rows: the most that a sum may have.
        dtype: of the rows.
    """
    group = get_tp_group()
    if group.world_size == 1:
        return None
    row_size = -(-row_size * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT // dtype.itemsize
    most_rows = min(rows, MOST_BYTES.get(group.world_size, 0) // (row_size * dtype.itemsize))
    asked = os.environ.get(FUSE_SUMS, "1" if group.world_size == 2 else "0") == "1"
    if not asked or most_rows == 0 or not _reaches_peers(group):
        logger.info("DFLASH sums over the ranks by the release's all-reduce")
        return RankSums(group, None, 0)
    with torch.inference_mode(False):
        shared = _share(group, row_size, most_rows, dtype)
        works = all_agree(sums_right(group, shared, row_size, min(most_rows, 64), dtype), group)
    if not works:
        logger.warning(
            "DFLASH sums over the ranks by the release's all-reduce: sums through the ranks' shared memory were not "
            "what that gives."
        )
        return RankSums(group, None, 0)
    logger.info("DFLASH sums up to %d rows over the ranks with the norm after them", most_rows)
    return RankSums(group, shared, most_rows)


def _reaches_peers(group: GroupCoordinator) -> bool:
    """Whether the release's own all-reduce reads its peers' memory, over NVLink."""
    communicator = group.ca_comm
    return (
        isinstance(communicator, CustomAllreduce)
        and not communicator.disabled
        and bool(communicator.full_nvlink)
    )


def _share(group: GroupCoordinator, row_size: int, most_rows: int, dtype: torch.dtype) -> Shared:
    """Memory that every rank of a group can write to, its counters at 0.

    By CUDA's handles for other processes, as the release shares the memory of its all-reduce; nothing of
    NVLink's multicast is used.
    """
    ranks = group.world_size
    turn_rows = most_rows * ranks * row_size * dtype.itemsize
    turn_arrivals = -(-most_rows * 4 // _ALIGNMENT) * _ALIGNMENT
    size = _TURNS * (turn_rows + turn_arrivals)
    addresses = CustomAllreduce.create_shared_buffer(size, group=group.cpu_group)
    device = torch.device("cuda", torch.cuda.current_device())

    def table(offset: int, step: int) -> torch.Tensor:
        turns = [[a + offset + turn * step for a in addresses] for turn in range(_TURNS)]
        return torch.tensor(turns, dtype=torch.int64, device=device)

    shared = Shared(
        rows=table(0, turn_rows),
        arrivals=table(_TURNS * turn_rows, turn_arrivals),
        rank=group.rank_in_group,
        row_size=row_size,
    )
    _zero(addresses[group.rank_in_group], size)
    dist.barrier(group=group.cpu_group)  # nobody counts before all counters are 0
    return shared


def _zero(address: int, size: int) -> None:
    library = CudaRTLibrary()
    library.cudaMemset(ctypes.c_void_p(address), 0, size)
    library.cudaDeviceSynchronize()


def sums_right(
    group: GroupCoordinator, shared: Shared, size: int, most_rows: int, dtype: torch.dtype
) -> bool:
    """Whether sums through shared memory are what the release's all-reduce gives, as far as this rank sees."""
    device, right, turn = shared.rows.device, True, 0
    generator = torch.Generator(device).manual_seed(group.rank_in_group)
    for n in (1, most_rows, most_rows, 1):  # ends with the second turn, as layers do
        x = torch.randn(n, size, device=device, generator=generator).to(dtype)
        residual = torch.ones(n, size, dtype=dtype, device=device)
        weight = torch.linspace(0.5, 1.5, size, device=device).to(dtype)
        patience = _CHECK_PATIENCE if right else 1
        made = sum_add_norm(x, residual, weight, 1e-6, shared, turn, patience)
        expected = add_norm(group.all_reduce(x.clone()), residual, weight, 1e-6)
        # The order in which more than two ranks are added may differ, and with it the last bit.
        right &= all(
            torch.allclose(a.float(), b.float(), rtol=2e-2, atol=2e-2)
            for a, b in zip(made, expected, strict=True)
        )
        turn = 1 - turn
    return right


def all_agree(right: bool, group: GroupCoordinator) -> bool:
    """Whether it holds on all ranks."""
    flag = torch.tensor([int(right)], device="cpu")
    dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=group.cpu_group)
    return bool(flag)
