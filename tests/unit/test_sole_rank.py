"""The ranks agree on drawn tokens where there is more than one, and only there (patch 0020)."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from sglang.srt.layers.sampler import Sampler
from torch.testing._internal.distributed.fake_pg import FakeProcessGroup

ROOT = Path(__file__).parents[2]
RANKS = """
import json, os, sys
import torch
from sglang.srt.distributed import parallel_state
from sglang_dflash.drawing.ranks import agreed
rank = 0 if os.fork() else 1  # the modules take longer than all the rest
parallel_state.init_distributed_environment(
    world_size=2, rank=rank, local_rank=rank, backend="gloo",
    distributed_init_method=f"tcp://127.0.0.1:{sys.argv[1]}",
)
parallel_state._TP = parallel_state.init_model_parallel_group(
    [[0, 1]], rank, "gloo", use_pynccl=False, use_custom_allreduce=False, group_name="tp"
)
torch.manual_seed(rank)
drawn = torch.multinomial(torch.ones(3, 100), 4, replacement=True)
said = json.dumps([rank, drawn.tolist(), agreed(drawn.clone()).tolist()])
os.write(1, f"{said}\\n".encode())  # one line at once, whoever writes beside it
if rank == 0:
    os.wait()
"""


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
    command = [sys.executable, "-c", RANKS, str(port)]
    said = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, cwd=ROOT, timeout=120, check=True
    )
    ranks = sorted(json.loads(line) for line in said.stdout.splitlines())
    (_, first, first_agreed), (_, second, second_agreed) = ranks
    assert first != second
    assert first_agreed == second_agreed == first
