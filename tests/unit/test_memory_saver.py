"""Memory that is released: on a CPU, of a drafter, and whether the library for GPUs can be loaded."""

from __future__ import annotations

import mmap
import os
from types import SimpleNamespace

import psutil
import pytest
import torch
from sglang.srt.configs.qwen3_next import Qwen3NextConfig
from sglang.srt.configs.update_config import adjust_tp_num_heads_if_necessary
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from torch import nn

from sglang_dflash.cpu.memory_saver import CpuMemorySaver
from sglang_dflash.drafter.set_aside import SetAside, clean_pools
from sglang_dflash.errors import DFlashError
from sglang_dflash.scheduler.base import DFlashWorkerBase
from sglang_dflash.serving.memory_saver import check_memory_saver
from tests.unit.decoders import DELTA_NETS, SIZES
from tests.unit.tapped import states_of

MIB = 1 << 20


def test_released_and_resumed() -> None:
    """Tensors lose what they held and the process their pages; others, by tag or place, keep theirs."""
    saver, outside = CpuMemorySaver(), torch.ones(3 * mmap.PAGESIZE)
    with saver.region("weights"):
        big, small = torch.ones(16 * MIB), torch.ones(3)
        of_outside = outside[5:]  # made here, of memory that was not
        dropped = torch.ones(MIB)
    address, small_one = big.data_ptr(), small.data_ptr()
    with CpuMemorySaver().region("kv_cache"):
        other = torch.ones(MIB)
    del dropped
    before = psutil.Process().memory_info().rss
    CpuMemorySaver().pause("weights")
    assert before - psutil.Process().memory_info().rss > 60 * MIB
    saver.resume("weights")
    assert (big.data_ptr(), small.data_ptr()) == (address, small_one)
    assert big.isnan().all() and small.isnan().all()
    assert other.all() and outside.all() and of_outside.all()
    big.fill_(2)
    assert int(big.sum()) == 2 * len(big)


@pytest.mark.parametrize("size", [3, 5 * mmap.PAGESIZE + 3])
def test_backed_up(size: int) -> None:
    saver = CpuMemorySaver()
    with saver.region("backed up", enable_cpu_backup=True):
        tensor = torch.arange(size)
    saver.pause("backed up")
    assert not tensor.any()
    saver.resume("backed up")
    assert torch.equal(tensor, torch.arange(size))


def test_a_drafter_is_put_back() -> None:
    """Where it was: parameters and buffers, whatever the memory held in between."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    places = [tensor.data_ptr() for tensor in model.state_dict().values()]
    aside = SetAside(SimpleNamespace(model=model))
    for tensor in model.state_dict().values():
        tensor.fill_(float("nan") if tensor.is_floating_point() else 7)
    aside.put_back()
    after = model.state_dict()
    assert [tensor.data_ptr() for tensor in after.values()] == places
    for name, value in before.items():
        assert torch.equal(after[name], value)


@pytest.mark.usefixtures("one_rank")
def test_pools_are_clean() -> None:
    """Tables of slots, K/V, latents of MLA, and states of linear attention."""
    shape = dict(size=8, page_size=1, dtype=torch.float32, layer_num=2, device="cpu")
    shape["enable_memory_saver"] = False
    plain = MHATokenToKVPool(head_num=1, head_dim=4, **shape)
    latent = MLATokenToKVPool(kv_lora_rank=4, qk_rope_head_dim=2, **shape)
    config = Qwen3NextConfig(**SIZES | DELTA_NETS)
    adjust_tp_num_heads_if_necessary(config, tp_size=1, is_post_update=True)
    states = states_of(config)
    cache = states.mamba_pool.mamba_cache
    dirty = [*plain.k_buffer, *plain.v_buffer, *latent.kv_buffer, *cache.conv, cache.temporal]
    dirty.append(states.req_to_token)
    for tensor in dirty:
        tensor.fill_(float("nan") if tensor.is_floating_point() else 1 << 30)
    clean_pools(
        *(
            SimpleNamespace(req_to_token_pool=states, token_to_kv_pool=pool)
            for pool in (plain, latent)
        )
    )
    assert not any(tensor.any() for tensor in dirty)


@pytest.mark.parametrize("released", [False, True])
def test_rounds_are_measured_while_their_memory_is_there(released: bool) -> None:
    """A flush of the caches, which is a part of releasing memory, measures rounds that were disturbed."""
    measured: list[None] = []
    worker = SimpleNamespace(
        rounds=SimpleNamespace(disturbed=True),
        planner=SimpleNamespace(take=measured.append),
        _costs=lambda: None,
        _aside=object() if released else None,
    )
    DFlashWorkerBase.clear_cache_pool(worker)
    assert len(measured) == (not released)


@pytest.mark.skipif(torch.cuda.is_available(), reason="it can be loaded")
def test_library_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", os.environ.get("LD_LIBRARY_PATH", ""))
    args = SimpleNamespace(enable_memory_saver=True, enable_hierarchical_cache=False, device="cuda")
    with pytest.raises(DFlashError) as caught:
        check_memory_saver(args)
    sentence = str(caught.value)
    assert sentence.startswith("--enable-memory-saver cannot run here, because its library cannot")
    assert "libcuda" in sentence and sentence.endswith("leave it out.")
    for name, value in (("device", "cpu"), ("enable_memory_saver", False)):
        setattr(args, name, value)
        check_memory_saver(args)


def test_with_a_host_tier() -> None:
    args = SimpleNamespace(enable_memory_saver=True, enable_hierarchical_cache=True, device="cpu")
    with pytest.raises(DFlashError, match="is not supported with --enable-hierarchical-cache"):
        check_memory_saver(args)
