"""The sum over ranks with the norm after it, by processes that share memory."""

from __future__ import annotations

import multiprocessing
import random
import time
from types import SimpleNamespace

import pytest
import torch

from sglang_dflash.gpu import rank_sums
from sglang_dflash.gpu.kernels.add_norm import add_norm_reference
from sglang_dflash.gpu.kernels.sum_add_norm import Shared, sum_add_norm

MOST_ROWS, ROW_SIZE = 9, 128
# Rows, hidden size and parts of one sum after the other; more rows than programs among them.
CALLS = [(5, 128, 1), (1, 96, 3), (9, 128, 1), (9, 40, 2), (2, 128, 1), (3, 128, 1)] * 3
PATIENCE = 100_000  # of an interpreter, several seconds
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="tests/gpu/test_fused.py does this on GPUs"
)


def inputs(call: int, rank: int) -> tuple[torch.Tensor, ...]:
    n, size, parts = CALLS[call]
    generator = torch.Generator().manual_seed(call)
    residual = torch.randn(n, size, generator=generator)
    weight = torch.rand(size, generator=generator)
    mine = torch.Generator().manual_seed(1000 * call + rank)
    x = torch.randn(parts, n, size, generator=mine)
    return (x if parts > 1 else x[0]), residual, weight


def expected(call: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    each = [inputs(call, rank)[0] for rank in range(ranks)]
    whole = sum(x.sum(0) if x.dim() == 3 else x for x in each)
    _, residual, weight = inputs(call, 0)
    return add_norm_reference(whole, residual, weight, 1e-6)


def run_rank(shared: Shared, ranks: int, queue: multiprocessing.Queue) -> None:
    """Sums one after the other, now and then late."""
    late = random.Random(shared.rank)
    wrong = []
    for call in range(len(CALLS)):
        time.sleep(late.choice([0, 0, 0.02]))
        x, residual, weight = inputs(call, shared.rank)
        made = sum_add_norm(x, residual, weight, 1e-6, shared, call % 2, PATIENCE)
        if not all(map(torch.allclose, made, expected(call, ranks))):
            wrong.append(call)
    queue.put((shared.rank, wrong, made[0].tolist()))


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_of_one_memory(ranks: int) -> None:
    """All get the same bits, call after call, though nobody waits for who is done reading."""
    rows = torch.full((ranks, 2, MOST_ROWS, ranks, ROW_SIZE), float("nan")).share_memory_()
    arrivals = torch.zeros(ranks, 2, MOST_ROWS, dtype=torch.int32).share_memory_()
    tables = [
        torch.tensor([[part[rank, turn].data_ptr() for rank in range(ranks)] for turn in range(2)])
        for part in (rows, arrivals)
    ]
    context = multiprocessing.get_context("fork")  # in which shared memory keeps its addresses
    queue = context.Queue()
    processes = [
        context.Process(target=run_rank, args=(Shared(*tables, rank, ROW_SIZE), ranks, queue))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    found = [queue.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
    assert [wrong for _, wrong, _ in found] == [[]] * ranks
    assert all(last == found[0][2] for _, _, last in found)
    assert not arrivals.any()


def test_a_rank_that_does_not_come() -> None:
    """With patience, a sum ends without it, and is wrong: that is what the check at the start looks for."""
    rows = torch.zeros(2, 2, MOST_ROWS, 2, ROW_SIZE)
    arrivals = torch.zeros(2, 2, MOST_ROWS, dtype=torch.int32)
    tables = [
        torch.tensor([[part[rank, turn].data_ptr() for rank in range(2)] for turn in range(2)])
        for part in (rows, arrivals)
    ]
    x, residual, weight = inputs(0, 0)
    made = sum_add_norm(x, residual, weight, 1e-6, Shared(*tables, 0, ROW_SIZE), 0, 10)
    assert not torch.allclose(made[0], expected(0, 2)[0])


@pytest.mark.parametrize(
    ("ranks", "asked", "tried"),
    [
        (1, "1", False),
        (2, None, True),
        (2, "0", False),
        (2, "1", True),
        (4, None, False),
        (4, "1", True),
    ],
)
def test_who_gets_one_kernel(
    ranks: int, asked: str | None, tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks unasked; the look at what they reach of each other comes after the question."""
    looked = []
    monkeypatch.delenv(rank_sums.FUSE_SUMS, raising=False)
    if asked is not None:
        monkeypatch.setenv(rank_sums.FUSE_SUMS, asked)
    monkeypatch.setattr(rank_sums, "get_tp_group", lambda: SimpleNamespace(world_size=ranks))
    monkeypatch.setattr(rank_sums, "_reaches_peers", lambda group: bool(looked.append(group)))
    sums = rank_sums.open_rank_sums(4096, 512, torch.bfloat16)
    assert bool(looked) == tried and (sums is None) == (ranks == 1)
    assert sums is None or not sums.adds_parts(1)
