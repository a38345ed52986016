"""Two pools, of sliding layers and of the others: the release's own, and what rounds do to both."""

from __future__ import annotations

import math
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool, SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.swa_radix_cache import SWARadixCache
from sglang.srt.model_executor.model_runner_kv_cache_mixin import ModelRunnerKVCacheMixin
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils import ceil_align

from sglang_dflash.errors import DFlashError
from sglang_dflash.gpu.block_attention import BlockAttention
from sglang_dflash.gpu.fa3_side_by_side import Fa3SideBySide
from sglang_dflash.gpu.sliding_keys import SlidingKeys
from sglang_dflash.gpu.triton_side_by_side import TritonSideBySide
from sglang_dflash.inspect import main
from sglang_dflash.scheduler.behind_windows import BehindWindows
from sglang_dflash.scheduler.reserve import reserve
from sglang_dflash.serving.memory import pool_bytes, slots_for_one
from sglang_dflash.two_pools import sliding_slots
from tests.unit.decoders import write_drafter
from tests.unit.sliding import write_mimo

WIDTH, WINDOW, SIZE, SLIDING, CONTEXT = 8, 20, 960, 640, 400


def pool_of(page_size: int) -> SWAKVPool:
    return SWAKVPool(
        size=SIZE,
        size_swa=SLIDING,
        page_size=page_size,
        dtype=torch.float32,
        head_num=1,
        head_dim=4,
        swa_attention_layer_ids=[0, 2],
        full_attention_layer_ids=[1],
        enable_kvcache_transpose=False,
        device="cpu",
    )


class World:
    """The release's pools, allocator and prefix cache, and what the scheduler does to requests."""

    def __init__(self, page_size: int):
        self.page = page_size
        self.pool = pool_of(page_size)
        self.slots = SWATokenToKVPoolAllocator(
            SIZE, SLIDING, page_size, torch.float32, "cpu", self.pool, need_sort=False
        )
        self.req_to_token_pool = ReqToTokenPool(8, CONTEXT, "cpu", enable_memory_saver=False)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.req_to_token_pool,
            token_to_kv_pool_allocator=self.slots,
            page_size=page_size,
            sliding_window_size=WINDOW,
        )
        self.tree_cache, self.reqs = SWARadixCache(params), []
        self.behind_windows = BehindWindows(
            SimpleNamespace(
                token_to_kv_pool=self.pool,
                token_to_kv_pool_allocator=self.slots,
                req_to_token_pool=self.req_to_token_pool,
                page_size=page_size,
                sliding_window_size=WINDOW,
            )
        )

    @property
    def table(self) -> torch.Tensor:
        return self.req_to_token_pool.req_to_token

    def admit(self, prompt: list[int]) -> Req:
        """A request right after its prefill."""
        req = Req("r", "", prompt, SamplingParams(max_new_tokens=300), vocab_size=100)
        self.req_to_token_pool.alloc([req])
        req.fill_ids, length = prompt, len(prompt)
        req.last_node, req.prefix_indices = self.tree_cache.root_node, torch.empty(0)
        self.table[req.req_pool_idx] = 7777  # of the row's last owner
        pages = self.slots.alloc(ceil_align(length, self.page))
        self.table[req.req_pool_idx, :length] = pages[:length].int()
        self.slots.full_to_swa_index_mapping[pages[length:]] = 7777  # as of a page's last owner
        req.kv_committed_len = req.kv_allocated_len = length
        self.tree_cache.cache_unfinished_req(req)
        self.reqs.append(req)
        return req

    def round(self, lengths: list[int]) -> None:
        reserve(self, 2 * WIDTH)
        for req, length in zip(self.reqs, lengths, strict=True):
            self.check_block(req)
            req.output_ids += [random.randrange(100) for _ in range(length)]
            req.kv_committed_len += length
        self.behind_windows.free(self.reqs)

    def check_block(self, req: Req) -> None:
        """Window and rows of the next round have slots of their own in both pools."""
        start = req.kv_committed_len
        slots = self.table[req.req_pool_idx, max(0, start - WINDOW) : start + WIDTH].long()
        sliding = sliding_slots(self.pool, slots)
        for each in (slots, sliding):
            assert min(each) >= self.page and len(set(each.tolist())) == len(each)
        assert torch.equal(sliding % self.page, slots.int() % self.page)

    def finish(self, req: Req) -> None:
        """What `release_kv_cache` does."""
        self.tree_cache.cache_finished_req(req)
        begin, end = req.pop_overallocated_kv_cache()
        begin = ceil_align(begin, self.page)
        if begin < end:
            self.slots.free(self.table[req.req_pool_idx][begin:end])
        self.req_to_token_pool.free(req)
        self.reqs.remove(req)

    def held(self) -> tuple[int, int]:
        """Slots that neither are free nor belong to the prefix cache, in either pool."""
        tree = self.tree_cache
        full = tree.full_evictable_size() + tree.full_protected_size()
        sliding = tree.swa_evictable_size() + tree.swa_protected_size()
        return (
            SIZE - self.slots.full_available_size() - full,
            SLIDING - self.slots.swa_available_size() - sliding,
        )


@pytest.mark.parametrize("page_size", [1, 16, 32])
def test_no_slot_is_lost(page_size: int) -> None:
    """Requests of any lengths, of which some begin alike; pages as long as a window, and longer."""
    random.seed(0)
    world = World(page_size)
    for step in range(300):
        if len(world.reqs) < 3 and step % 5 == 0:
            prompt = list(range(random.choice((5, 33, 90))))
            world.admit([*prompt, random.randrange(100)])
        world.round([random.randint(1, WIDTH) for _ in world.reqs])
        for req in list(world.reqs):
            if req.kv_committed_len > 250:
                world.finish(req)
        world.tree_cache.evict(SimpleNamespace(num_tokens=0, swa_num_tokens=40))
        # A window, a part of one, two rounds ahead, and pages that are not full at both ends.
        most = WINDOW + max(page_size, WINDOW // 4) + WIDTH + 2 * WIDTH + 2 * page_size
        most += max(0, page_size - WINDOW)
        assert world.held()[1] <= most * len(world.reqs)
    for req in list(world.reqs):
        world.finish(req)
    assert world.held() == (0, 0)
    world.tree_cache.sanity_check()


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("decodes", [0, 40])
def test_a_prefix_that_is_run_once_more(page_size: int, decodes: int) -> None:
    """Who decodes behind it keeps its slots, though the prefix cache gets K/V of sliding layers again."""
    world = World(page_size)
    tree, shared = world.tree_cache, list(range(48))
    world.finish(world.admit([*shared, 99]))
    first = world.admit([*shared, *range(50, 98)])
    read = world.table[first.req_pool_idx, :48].tolist()
    while (node := tree.swa_lru_list.get_lru_no_lock()) is not None:
        tree.evict(SimpleNamespace(num_tokens=0, swa_num_tokens=len(node.value)))
    assert not sliding_slots(world.pool, torch.tensor(read)).any()
    second = world.admit([*shared, 99, *range(2 * page_size)])
    for _ in range(decodes // WIDTH):
        world.round([WIDTH, WIDTH])
    free = world.slots.full_attn_allocator.free_pages.tolist()
    assert not {slot // page_size for slot in read} & set(free)
    assert world.table[second.req_pool_idx, :48].tolist() == read
    window = sliding_slots(world.pool, torch.tensor(read[-WINDOW:]))
    assert window.all() and len(set(window.tolist())) == WINDOW
    for req in (first, second):
        world.finish(req)
    assert world.held() == (0, 0)
    tree.sanity_check()


def test_a_prompt_that_fits_the_pages_that_are_left() -> None:
    """Three tokens more of a prompt take a page at most: it is enough that one is free."""
    world = World(16)
    world.slots.alloc(SLIDING - 16)
    before, after = torch.tensor([16]), torch.tensor([19])
    slots = world.slots.alloc_extend(before, before, after, after, torch.tensor([31]), 3)
    assert len(slots) == 3
    assert sliding_slots(world.pool, slots).all()
    assert world.slots.swa_available_size() == 0


def test_what_windows_have_left_is_freed_together() -> None:
    """Nothing until it is worth it, then of all requests; nothing of the prefix cache, nor of requests that ended."""
    world = World(1)
    first, second = world.admit(list(range(40))), world.admit(list(range(100, 105)))
    world.round([4, 4])
    assert first.swa_evicted_seqlen == second.swa_evicted_seqlen == 0
    world.round([8, 8])
    world.round([8, 1])
    assert (
        first.swa_evicted_seqlen == 0 == second.swa_evicted_seqlen
    )  # behind it lies what the prefix cache has
    world.round([8, 8])
    world.round([8, 8])
    assert first.swa_evicted_seqlen == first.kv_committed_len - WINDOW > 40
    assert second.swa_evicted_seqlen == second.kv_committed_len - WINDOW > 5
    assert not world.slots.full_to_swa_index_mapping[
        world.table[0, 40 : first.swa_evicted_seqlen]
    ].any()
    before = second.swa_evicted_seqlen
    second.is_retracted = True
    world.round([8, 8])
    assert second.swa_evicted_seqlen == before


@pytest.mark.parametrize("chunk", [None, WINDOW])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("rows", [1, 8, 100])
def test_table_of_windows(page_size: int, rows: int, chunk: int | None) -> None:
    """Wherever it begins: whatever a window or the rows reach is where the allocator says, and chunks begin alike."""
    generator = torch.Generator().manual_seed(rows)
    pages = 1200 // page_size
    table = 1 + torch.randperm(4 * pages, generator=generator).view(4, pages).int()
    to_sliding = torch.zeros(4 * pages * page_size + 2 * page_size, dtype=torch.int64)
    moved = torch.randperm(4 * pages, generator=generator) + 1
    for page, sliding in enumerate(moved, start=1):
        begin = page * page_size
        to_sliding[begin : begin + page_size] = sliding * page_size + torch.arange(page_size)
    runner = SimpleNamespace(
        page_size=page_size,
        sliding_window_size=WINDOW,
        attention_chunk_size=chunk,
        token_to_kv_pool_allocator=SimpleNamespace(full_to_swa_index_mapping=to_sliding),
    )
    keys = SlidingKeys(runner, 4, pages, rows)
    lengths = torch.tensor([rows, rows + 300, 777, 1200], dtype=torch.int32)
    keys.fill(lengths, table)
    step = math.lcm(256, chunk or 1)
    assert keys.table.shape[1] * page_size <= max(rows + WINDOW, 16) + step + 4 * page_size
    assert not ((lengths - keys.lengths) % step).any()
    for i, length in enumerate(lengths.tolist()):
        for back in range(1, min(length, rows + WINDOW) + 1):
            key, there = length - back, int(keys.lengths[i]) - back
            slot = int(table[i, key // page_size]) * page_size + key % page_size
            found = int(keys.table[i, there // page_size]) * page_size + there % page_size
            assert found == to_sliding[slot]


@pytest.mark.parametrize("attention", [Fa3SideBySide, TritonSideBySide])
def test_windows_of_the_first_row_of_a_prompt(attention: type) -> None:
    """A pass with many rows of one request reads what the window of the first of them reaches."""
    window, rows, pages = 8, 600, 2000
    table = torch.arange(1, pages + 1, dtype=torch.int32)[None]
    allocator = SimpleNamespace(full_to_swa_index_mapping=torch.arange(pages + 1) + 5)
    pool = SimpleNamespace(swa_kv_pool=None, layers_mapping={0: (0, True)})
    runner = SimpleNamespace(
        page_size=1,
        sliding_window_size=window,
        attention_chunk_size=None,
        token_to_kv_pool=pool,
        token_to_kv_pool_allocator=allocator,
        model_config=SimpleNamespace(num_attention_heads=8, get_num_kv_heads=lambda tp_size: 2),
        tp_size=1,
    )
    lengths, ends = torch.tensor([1900], dtype=torch.int32), torch.tensor([0, rows])
    made = attention(runner, lengths, table, ends, rows)
    BlockAttention.prepare(made)
    seen, slots = made.keys_of(SimpleNamespace(layer_id=0))
    reached = window + rows
    assert seen.item() >= reached
    assert slots[0, seen.item() - reached].item() == 1900 - reached + 1 + 5
    assert slots[0, seen.item() - 1].item() == 1900 + 5


def test_bytes_of_both() -> None:
    pool = pool_of(16)
    assert pool_bytes(pool) == 2 * 16 * ((SIZE + 16) + 2 * (SLIDING + 16))


@pytest.mark.parametrize("ratio", [0.1, 0.8, 1.0])
def test_slots_of_the_drafter(monkeypatch: pytest.MonkeyPatch, ratio: float) -> None:
    """It has as many as full layers, which get those that sliding layers do without."""
    from sglang.srt.model_executor import model_runner_kv_cache_mixin as mixin

    monkeypatch.setattr(mixin, "get_attention_tp_size", lambda: 2)
    target = SimpleNamespace(
        get_num_kv_heads=lambda tp_size: 8 // tp_size,
        get_swa_num_kv_heads=lambda tp_size: 16 // tp_size,
        head_dim=192,
        v_head_dim=128,
        swa_head_dim=128,
        swa_v_head_dim=64,
        full_attention_layer_ids=[0, 3],
        swa_attention_layer_ids=[1, 2, 4, 5, 6],
    )
    args = SimpleNamespace(page_size=16, swa_full_tokens_ratio=ratio)
    runner = SimpleNamespace(
        server_args=args,
        model_config=target,
        sliding_window_size=WINDOW,
        kv_cache_dtype=torch.bfloat16,
    )
    counted = 1 << 20
    _, full, sliding = ModelRunnerKVCacheMixin._resolve_hybrid_swa_tokens(runner, counted)
    assert sliding == pytest.approx(ratio * full, abs=16)
    assert slots_for_one(args, target, 2) == pytest.approx(full / counted, rel=1e-4)


def test_a_backend_that_reads_one_pool(tmp_path: Path) -> None:
    drafter = tmp_path / "drafter"
    drafter.mkdir()
    given = {
        "model_path": str(write_mimo(tmp_path / "target")),
        "device": "cpu",
        "attention_backend": "flashinfer",
        "speculative_draft_attention_backend": "torch_native",
        "speculative_algorithm": "DFLASH",
        "speculative_draft_model_path": str(write_drafter(drafter)),
    }
    with pytest.raises(DFlashError, match="^--attention-backend flashinfer cannot verify with .*:"):
        ServerArgs(**given)
    ServerArgs(**given | {"disable_hybrid_swa_memory": True})
    ServerArgs(**given | {"attention_backend": "torch_native"})


def test_inspect_knows_both_pools(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "drafter").mkdir()
    paths = write_drafter(tmp_path / "drafter"), "--target", write_mimo(tmp_path / "target")
    assert main(list(map(str, paths))) == 0
    assert "fits the target" in capsys.readouterr().out
