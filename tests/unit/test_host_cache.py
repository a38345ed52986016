"""K/V of both models on the host and back, in the release's own pools and prefix cache, on the CPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from transformers import Qwen3NextConfig

from sglang_dflash.errors import DFlashError
from sglang_dflash.round.prefill import wait_for_host
from sglang_dflash.scheduler.host_cache import BothInHiRadixCache
from sglang_dflash.scheduler.results import count_last_token
from sglang_dflash.serving.host_cache import check_host_cache, host_slots
from tests.unit.decoders import DELTA_NETS, SIZES, write_drafter
from tests.unit.sliding import DRAFTER_ON_GPUS, write_gpt_oss, write_mimo
from tests.unit.test_arguments import arguments, refusal

SIZE, TOKENS, KEPT = 256, 64, 16
WAYS = [
    *(
        (page, policy, "layer_first")
        for page in (1, 16)
        for policy in ("write_through", "write_back")
    ),
    (1, "write_through_selective", "page_first_direct"),
    (16, "write_back", "page_first_direct"),
]


class World:
    """Pools of both models full of numbers that tell slots and layers apart, and the cache over them."""

    def __init__(
        self,
        page: int,
        policy: str = "write_through",
        layout: str = "layer_first",
        mla: bool = False,
        io: str = "direct",
        device: str = "cpu",
        wide: int = 1,
        **given: Any,
    ):
        """
        Args:
            wide: by how much heads are wider than they must be; kernels copy 16 bytes at once.
            given: more arguments of the server.
        """
        like: dict[str, Any] = {"layer_num": 3, "dtype": torch.float32, "device": device}
        like["enable_memory_saver"] = False
        if mla:
            ranks = {"kv_lora_rank": 12 * wide, "qk_rope_head_dim": 4 * wide}
            self.target = MLATokenToKVPool(SIZE, page, **ranks, **like)
        else:
            self.target = MHATokenToKVPool(SIZE, page, head_num=2, head_dim=8 * wide, **like)
        like["layer_num"] = 2
        self.draft = MHATokenToKVPool(SIZE, page, head_num=1, head_dim=4 * wide, **like)
        rest = (torch.float32, device, self.target, False)
        if page == 1:
            self.slots = TokenToKVPoolAllocator(SIZE, *rest)
        else:
            self.slots = PagedTokenToKVPoolAllocator(SIZE, page, *rest)
        args = ServerArgs(
            model_path="dummy",
            device="cpu",
            attention_backend="torch_native",
            enable_hierarchical_cache=True,
            hicache_io_backend=io,
            hicache_mem_layout=layout,
            hicache_write_policy=policy,
            **given,
        )
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=ReqToTokenPool(4, SIZE, device, enable_memory_saver=False),
            token_to_kv_pool_allocator=self.slots,
            page_size=page,
        )
        module = torch.get_device_module(device)
        self.runner = SimpleNamespace(forward_stream=module.Stream(), token_to_kv_pool=self.target)
        worker = SimpleNamespace(
            model_runner=SimpleNamespace(token_to_kv_pool=self.draft),
            target_worker=SimpleNamespace(model_runner=self.runner),
        )
        self.cache = BothInHiRadixCache(params, args, worker)
        for number, buffer in enumerate(self.buffers):
            numbers = torch.arange(buffer.numel(), dtype=torch.float32, device=device)
            buffer.copy_((numbers + number * 1e5).view(buffer.shape))
        module.synchronize()

    @property
    def buffers(self) -> list[torch.Tensor]:
        """K and V of each layer of both models."""
        target = self.target
        mla = isinstance(target, MLATokenToKVPool)
        own = target.kv_buffer if mla else [*target.k_buffer, *target.v_buffer]
        return [*own, *self.draft.k_buffer, *self.draft.v_buffer]

    def insert(self, tokens: list[int]) -> list[torch.Tensor]:
        """What a request that has finished leaves: all K/V of its tokens, a copy."""
        found = self.cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens))).device_indices
        slots = torch.cat([found, self.slots.alloc(len(tokens) - len(found))])
        self.cache.insert(InsertParams(key=RadixKey(tokens), value=slots))
        return [buffer[slots].clone() for buffer in self.buffers]

    def load(self, tokens: list[int]) -> tuple[int, list[torch.Tensor]]:
        """How many tokens come from the host, and all K/V of the whole prefix."""
        found = self.cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens)))
        given = InitLoadBackParams(
            last_host_node=found.last_host_node, host_hit_length=found.host_hit_length
        )
        loaded, node = self.cache.init_load_back(given)
        self.cache.inc_lock_ref(node)
        counter = self.cache.cache_controller.layer_done_counter
        counter.set_consumer(self.cache.ready_to_load_host_cache())
        wait_for_host(self.runner)
        slots = torch.cat([found.device_indices, loaded])
        self.cache.dec_lock_ref(node)
        return len(loaded), [buffer[slots].clone() for buffer in self.buffers]


def bring_back(world: World) -> None:
    """Part of a prefix from the device and part from the host, under other slots than it had."""
    tokens = list(range(TOKENS))
    world.insert(tokens[:KEPT])
    kept = world.insert(tokens)
    world.insert(tokens)  # hit twice, prefixes are on the host by any policy that does not wait
    torch.get_device_module(world.target.device).synchronize()
    world.cache.check_hicache_events()
    world.cache.evict(EvictParams(num_tokens=TOKENS - KEPT))
    others = world.slots.alloc(world.slots.available_size())  # with the slots that were freed
    for buffer in world.buffers:
        buffer[others] = -1
    world.slots.free(others[: TOKENS + KEPT])
    loaded, back = world.load(tokens)
    assert loaded == TOKENS - KEPT
    for left, right in zip(kept, back, strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("mla", [False, True], ids=["mha", "mla"])
@pytest.mark.parametrize(("page", "policy", "layout"), WAYS)
def test_both_come_back(one_rank: None, page: int, policy: str, layout: str, mla: bool) -> None:
    bring_back(World(page, policy, layout, mla))


class Waiting(torch.cpu.Stream):
    """A stream that tells for whom it waits; on a CPU nobody has to."""

    def __init__(self):
        super().__init__()
        self.waited_for: list[torch.cpu.Stream] = []

    def wait_stream(self, stream: torch.cpu.Stream) -> None:
        self.waited_for.append(stream)


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_copies_wait_for_rounds(one_rank: None, policy: str) -> None:
    """A round in vain writes the last token's K/V, and to slots that are free: copies come behind it."""
    world = World(1, policy)
    controller = world.cache.cache_controller
    controller.write_stream, controller.load_stream = Waiting(), Waiting()
    rounds, tokens = world.runner.forward_stream, list(range(TOKENS))
    world.insert(tokens)
    world.cache.check_hicache_events()
    world.cache.evict(EvictParams(num_tokens=TOKENS))
    assert controller.write_stream.waited_for == [rounds]
    assert controller.load_stream.waited_for == []
    world.cache.ready_to_load_host_cache()
    assert controller.load_stream.waited_for == []  # there was nothing to load
    world.load(tokens)
    assert controller.load_stream.waited_for == [rounds]


def test_sizes(one_rank: None) -> None:
    """Either flag counts K/V of both models, and both pools on the host have as many slots."""
    world = World(16, hicache_ratio=3.0)
    host = world.cache.cache_controller.mem_pool_host
    assert host.size == host._draft.size == 3 * SIZE + 16
    target, draft = 2 * 3 * 2 * 8 * 4, 2 * 2 * 4 * 4  # bytes of a token
    args = SimpleNamespace(hicache_size=1, hicache_ratio=3.0)
    assert host_slots(args, SIZE, target + draft) == 10**9 // (target + draft)


@pytest.mark.parametrize(
    ("size", "ratio", "named"),
    [
        (
            1,
            2.0,
            "--hicache-size 1 holds K/V of both models for 1000 tokens, and the device for 5000",
        ),
        (10**6, 2.0, "--hicache-size 1000000 needs 1000000.00 GB"),
        (0, 10.0**6, "--hicache-ratio 1000000.0 needs 5000000.00 GB"),
    ],
)
def test_no_room(size: int, ratio: float, named: str) -> None:
    args = SimpleNamespace(hicache_size=size, hicache_ratio=ratio)
    with pytest.raises(DFlashError) as caught:
        host_slots(args, 5000, 10**6)
    assert named in str(caught.value)


def test_memory_is_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    free = SimpleNamespace(available=(10 << 30) + 5 * 10**9)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    args = SimpleNamespace(hicache_size=5, hicache_ratio=2.0)
    assert host_slots(args, 100, 10**6) == 5000
    args.hicache_size = 6
    with pytest.raises(DFlashError, match="5.00 GB are free"):
        host_slots(args, 100, 10**6)


def test_storage_is_refused_at_run_time(one_rank: None) -> None:
    attached, why = World(1).cache.attach_storage_backend("file")
    assert not attached and "hicache_storage_backend file is not supported with DFLASH" in why


ENABLED = {"enable_hierarchical_cache": True}


def test_arguments() -> None:
    """A CPU has no kernels that copy; the default gives way, and the layout with it."""
    args = arguments(**ENABLED)
    assert (args.hicache_io_backend, args.hicache_mem_layout) == ("direct", "layer_first")
    args = arguments(**ENABLED, hicache_mem_layout="page_first", page_size=16)
    assert (args.hicache_io_backend, args.hicache_mem_layout) == ("direct", "page_first_direct")
    assert arguments().hicache_io_backend == "kernel"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hicache_ratio": 1.0}, "--hicache-ratio 1.0 makes the host's cache no larger"),
        ({"hicache_io_backend": "kernel_ascend"}, "--hicache-io-backend kernel_ascend is not"),
        ({"hicache_mem_layout": "page_head"}, "--hicache-mem-layout page_head is not supported"),
        ({"hicache_storage_backend": "file"}, "--hicache-storage-backend file is not supported"),
    ],
)
def test_refused_arguments(changes: dict[str, Any], named: str) -> None:
    assert named in refusal(**ENABLED | changes)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("linear", "whose states of linear attention are not kept on the host"),
        ("two pools", "whose sliding layers keep K/V in a pool of their own"),
        ("heads", "whose values have 8 dimensions and whose keys have 16"),
    ],
)
def test_refused_targets(tmp_path: Path, kind: str, why: str) -> None:
    target, drafter = tmp_path / "target", tmp_path / "drafter"
    drafter.mkdir()
    if kind == "linear":
        config = Qwen3NextConfig(**SIZES | DELTA_NETS, architectures=["Qwen3NextForCausalLM"])
        config.save_pretrained(target)
    else:
        {"two pools": write_gpt_oss, "heads": write_mimo}[kind](target)
    write_drafter(drafter, **DRAFTER_ON_GPUS if kind == "two pools" else {})
    pair = {"model_path": str(target), "speculative_draft_model_path": str(drafter)}
    own = {"linear": {"max_mamba_cache_size": 8}, "two pools": {"attention_backend": "triton"}}
    assert why in refusal(**ENABLED | pair | own.get(kind, {}))


def test_layouts_of_mla(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, kernels read heads one by one only where there are heads."""
    args = arguments(**ENABLED)
    args.device, args.hicache_io_backend, args.hicache_mem_layout = "cuda", "kernel", "page_head"
    check_host_cache(args, args.get_model_config())
    monkeypatch.setattr(args, "use_mla_backend", lambda: True)
    with pytest.raises(DFlashError, match="choose one of layer_first, page_first\\."):
        check_host_cache(args, args.get_model_config())


@pytest.mark.parametrize(("waits", "counted"), [(False, 1), (True, 0)])
def test_the_last_token_of_a_round_that_is_not_launched_to_its_end(
    waits: bool, counted: int
) -> None:
    """Its draft K/V is not there yet when the prefix is copied to the host."""
    req = Req("r", "", [5] * 8, SamplingParams(max_new_tokens=1))
    req.kv_committed_len, req.kv_allocated_len = 8, 16
    req.finished_reason, req.results_in_flight, req.host_waits = FINISH_LENGTH(1), 1, waits
    count_last_token(req)
    assert req.kv_committed_len == 8 + counted
