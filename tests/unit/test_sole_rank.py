"""The ranks agree on drawn tokens where there is more than one, and only there (patch 0020)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from sglang.srt.layers.sampler import Sampler
from torch.testing._internal.distributed.fake_pg import FakeStore


@pytest.fixture
def two_ranks():
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks, expected", [([0], 0), ([0, 1], 1)])
def test_all_reduces_of_a_batch_with_grammars(two_ranks, monkeypatch, ranks, expected) -> None:
    """NCCL loses memory in each all-reduce of a sole rank, which needs none."""
    calls = []
    monkeypatch.setattr(dist, "all_reduce", lambda *args, **kwargs: calls.append(kwargs["group"]))
    group = dist.new_group(ranks)
    sampler = SimpleNamespace(tp_sync_group=group)
    batch = SimpleNamespace(grammars=[object()])
    Sampler._sync_token_ids_across_tp(sampler, torch.tensor([3]), batch)
    assert calls == [group] * expected
