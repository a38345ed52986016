"""The ranks agree on drawn tokens where there is more than one, and only there (patch 0020)."""

from __future__ import annotations

import multiprocessing
import socket
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from sglang.srt.distributed import parallel_state
from sglang.srt.layers.sampler import Sampler
from torch.testing._internal.distributed.fake_pg import FakeProcessGroup

from sglang_dflash.drawing.ranks import agreed


def draw(port: int, rank: int, drawn: multiprocessing.Queue) -> None:
    """What one of two ranks draws, and what they agree on."""
    parallel_state.init_distributed_environment(
        world_size=2,
        rank=rank,
        local_rank=rank,
        backend="gloo",
        distributed_init_method=f"tcp://127.0.0.1:{port}",
    )
    parallel_state._TP = parallel_state.init_model_parallel_group(
        [[0, 1]], rank, "gloo", use_pynccl=False, use_custom_allreduce=False, group_name="tp"
    )
    torch.manual_seed(rank)
    tokens = torch.multinomial(torch.ones(3, 100), 4, replacement=True)
    drawn.put((rank, tokens.tolist(), agreed(tokens.clone()).tolist()))


@pytest.mark.parametrize("ranks", [1, 2])
def test_all_reduces_of_a_batch_with_grammars(monkeypatch, ranks: int) -> None:
    """NCCL loses memory in each all-reduce of a sole rank, which needs none."""
    calls = []
    monkeypatch.setattr(dist, "all_reduce", lambda *args, **kwargs: calls.append(kwargs["group"]))
    group = FakeProcessGroup._create_internal(0, ranks)
    sampler = SimpleNamespace(tp_sync_group=group)
    batch = SimpleNamespace(grammars=[object()])
    Sampler._sync_token_ids_across_tp(sampler, torch.tensor([3]), batch)
    assert calls == [group] * (ranks - 1)


def test_a_round_has_one_draw_for_all_ranks() -> None:
    """Whatever each drew; by a real group of two processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")  # the modules are there already
    drawn = context.Queue()
    ranks = [context.Process(target=draw, args=(port, rank, drawn)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    (_, first, first_agreed), (_, second, second_agreed) = sorted(
        drawn.get(timeout=120) for _ in ranks
    )
    for rank in ranks:
        rank.join(60)
        assert rank.exitcode == 0
    assert first != second
    assert first_agreed == second_agreed == first
