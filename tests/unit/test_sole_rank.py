"""The ranks agree on drawn tokens where there is more than one, and only there (patch 0020)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from sglang.srt.layers.sampler import Sampler
from torch.testing._internal.distributed.fake_pg import FakeProcessGroup


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
