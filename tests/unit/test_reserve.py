"""Reservations against the release's own pools and allocators, on the CPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.chunk_cache import ChunkCache
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils import ceil_align

from sglang_dflash.scheduler.choices import Plan
from sglang_dflash.scheduler.draft_input import DFlashDraftInput
from sglang_dflash.scheduler.reserve import reserve, slot_limit, slots_required
from sglang_dflash.scheduler.rows import rows_of_requests
from sglang_dflash.scheduler.worker_v2 import HISTORY, SLOTS, DFlashWorkerV2

WIDTH, CONTEXT, SIZE = 8, 96, 480
LARGE = 5120  # in which requests get slots to spare
ONE_ROUND, TWO_ROUNDS = WIDTH, 2 * WIDTH


def world(page_size: int, size: int = SIZE) -> SimpleNamespace:
    """A batch over empty pools, with the release's allocator for that page size."""
    table = ReqToTokenPool(8, CONTEXT, "cpu", enable_memory_saver=False)
    if page_size == 1:
        allocator = TokenToKVPoolAllocator(size, torch.float32, "cpu", None, need_sort=False)
    else:
        allocator = PagedTokenToKVPoolAllocator(
            size, page_size, torch.float32, "cpu", None, need_sort=False
        )
    params = CacheInitParams(
        disable=True,
        req_to_token_pool=table,
        token_to_kv_pool_allocator=allocator,
        page_size=page_size,
    )
    return SimpleNamespace(reqs=[], req_to_token_pool=table, tree_cache=ChunkCache(params))


def admit(batch: SimpleNamespace, prompt: int, limit: int) -> SimpleNamespace:
    """A request right after its prefill: the rest of its last page is not in the table."""
    allocator, page = batch.tree_cache.token_to_kv_pool_allocator, batch.tree_cache.page_size
    req = SimpleNamespace(
        origin_input_ids=[0] * prompt,
        sampling_params=SamplingParams(max_new_tokens=limit),
        output_ids=[],
        to_finish=None,
        grammar=None,
        custom_logit_processor=None,
        req_pool_idx=len(batch.reqs),
        kv_committed_len=prompt,
        kv_allocated_len=prompt,
    )
    slots = allocator.alloc(ceil_align(prompt, page))[:prompt]
    row = batch.req_to_token_pool.req_to_token[req.req_pool_idx]
    row[:] = 7777  # a slot that is nobody's: what an earlier owner of the row left
    row[:prompt] = slots
    batch.reqs.append(req)
    return req


def owned(batch: SimpleNamespace, req: SimpleNamespace) -> list[int]:
    """Slots of a request, as whoever frees it reads them."""
    row = batch.req_to_token_pool.req_to_token[req.req_pool_idx]
    return row[: min(req.kv_allocated_len, CONTEXT)].tolist()


def block(batch: SimpleNamespace, req: SimpleNamespace) -> list[int]:
    begin = req.kv_committed_len
    row = batch.req_to_token_pool.req_to_token[req.req_pool_idx]
    return row[begin : begin + WIDTH].tolist()


def check(batch: SimpleNamespace) -> None:
    """No slot has two owners, and no block reaches a slot that is not its request's."""
    page = batch.tree_cache.page_size
    all_slots = [slot for req in batch.reqs for slot in owned(batch, req)]
    assert len(set(all_slots)) == len(all_slots)
    assert min(all_slots) > 0 and 7777 not in all_slots
    held = sum(ceil_align(req.kv_allocated_len, page) for req in batch.reqs)
    allocator = batch.tree_cache.token_to_kv_pool_allocator
    assert allocator.available_size() == allocator.size - held
    for req in batch.reqs:
        mine = owned(batch, req)
        assert all(slot in mine or slot == 0 for slot in block(batch, req))
        # Rows that may be committed have a slot each.
        needed = min(WIDTH, slot_limit(req) - req.kv_committed_len)
        assert 0 not in block(batch, req)[:needed]
        if page > 1:
            for i, slot in enumerate(mine):
                assert slot % page == i % page and slot // page == mine[i - i % page] // page


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_block_beside_the_prompt(page_size: int) -> None:
    batch = world(page_size)
    req = admit(batch, prompt=13, limit=60)
    before = batch.tree_cache.token_to_kv_pool_allocator.available_size()
    required = slots_required([req], page_size, ONE_ROUND)
    reserve(batch, WIDTH)
    after = batch.tree_cache.token_to_kv_pool_allocator.available_size()
    assert before - after == required == (8 if page_size == 1 else 16)
    check(batch)


@pytest.mark.parametrize("page_size", [1, 16])
def test_rows_beyond_the_limit_use_slot_0(page_size: int) -> None:
    batch = world(page_size)
    req = admit(batch, prompt=12, limit=4)
    reserve(batch, WIDTH)
    check(batch)
    if page_size == 1:
        assert req.kv_allocated_len == 16
        assert block(batch, req)[4:] == [0] * 4
    else:
        assert req.kv_allocated_len == 16  # to the end of the page
        assert block(batch, req)[4:] == [0] * 4


@pytest.mark.parametrize("page_size", [1, 16])
def test_last_block_of_the_context(page_size: int) -> None:
    """The block reaches beyond the table; nothing is written there."""
    batch = world(page_size)
    admit(batch, prompt=CONTEXT - 3, limit=3)
    reserve(batch, WIDTH)
    check(batch)


def test_what_was_reserved_stays_reserved() -> None:
    batch = world(1)
    req = admit(batch, prompt=10, limit=60)
    reserve(batch, WIDTH)
    first = owned(batch, req)
    req.kv_committed_len += 3
    assert slots_required([req], 1, ONE_ROUND) == 3
    reserve(batch, WIDTH)
    assert owned(batch, req)[: len(first)] == first
    assert req.kv_allocated_len == 10 + 3 + WIDTH
    check(batch)


def test_slots_to_spare() -> None:
    """Where the pool is large, all get some more as soon as one runs short, and nobody does for a while."""
    batch = world(1, LARGE)
    first, second = admit(batch, prompt=10, limit=80), admit(batch, prompt=10, limit=80)
    allocator = batch.tree_cache.token_to_kv_pool_allocator
    reserve(batch, WIDTH)
    assert first.kv_allocated_len == second.kv_allocated_len == 10 + WIDTH + 32
    before = allocator.available_size()
    second.kv_committed_len += 32
    reserve(batch, WIDTH)
    assert allocator.available_size() == before
    first.kv_committed_len += 5
    second.kv_committed_len += 1
    reserve(batch, WIDTH)
    assert first.kv_allocated_len == 10 + 5 + WIDTH + 32
    assert second.kv_allocated_len == 10 + 33 + WIDTH + 32
    assert before - allocator.available_size() == 5 + 33
    check(batch)


def test_slots_to_spare_for_few() -> None:
    """Where the pool has none for all, those who run short get them."""
    batch = world(1, LARGE)
    first, second = admit(batch, prompt=10, limit=80), admit(batch, prompt=10, limit=80)
    allocator = batch.tree_cache.token_to_kv_pool_allocator
    reserve(batch, WIDTH)
    first.kv_committed_len += 5
    second.kv_committed_len += 33
    allocator.alloc(allocator.available_size() - (WIDTH + 32 + 1))
    reserve(batch, WIDTH)
    assert first.kv_allocated_len == 10 + WIDTH + 32
    assert second.kv_allocated_len == 10 + 33 + WIDTH + 32


def test_nobody_is_retracted_for_slots_to_spare() -> None:
    """They are not taken from what is left, if that is little, nor from prefixes."""
    batch = world(1, LARGE)
    req = admit(batch, prompt=10, limit=80)
    allocator = batch.tree_cache.token_to_kv_pool_allocator
    allocator.alloc(allocator.available_size() - WIDTH - 20)
    reserve(batch, WIDTH)
    assert req.kv_allocated_len == 10 + WIDTH and allocator.available_size() == 20


def test_overlap_needs_two_blocks() -> None:
    batch = world(1)
    req = admit(batch, prompt=10, limit=60)
    assert slots_required([req], 1, TWO_ROUNDS) == 2 * WIDTH


def overlapped(batch: SimpleNamespace) -> SimpleNamespace:
    """The batch as the overlapped scheduler has it."""
    allocator = batch.tree_cache.token_to_kv_pool_allocator

    def check_decode_mem() -> bool:
        required = batch.spec_info.slots_required(batch.reqs, 1)
        return allocator.available_size() >= required

    def filter_batch(keep_indices: list[int]) -> None:
        batch.reqs = [batch.reqs[i] for i in keep_indices]

    batch.spec_info, batch.check_decode_mem = DFlashDraftInput(WIDTH, WIDTH), check_decode_mem
    batch.filter_batch = filter_batch
    return batch


def worker() -> tuple[DFlashWorkerV2, list[str]]:
    """A worker without models, and why its rounds waited."""
    made, reasons = object.__new__(DFlashWorkerV2), []
    made.width, made.launched = WIDTH, SimpleNamespace(plan=Plan(3))
    made.metrics = SimpleNamespace(fell_back=reasons.append, stepped=lambda rounds: None)
    made.linear_states, made.rounds = None, SimpleNamespace(graphs=object())
    made._server_args = SimpleNamespace(enable_hierarchical_cache=True, enable_nan_detection=True)
    made.parts = SimpleNamespace(state=None)
    return made, reasons


@pytest.mark.parametrize("free", [WIDTH - 1, WIDTH, 2 * WIDTH - 1, 2 * WIDTH])
def test_reservations_shrink_before_anyone_is_retracted(free: int) -> None:
    """Where two rounds ahead do not fit, the pending result is seen first and one is asked for."""
    batch = world(1)
    req, done = admit(batch, prompt=10, limit=60), admit(batch, prompt=10, limit=60)
    req.finished, done.finished = lambda: False, lambda: True
    allocator = batch.tree_cache.token_to_kv_pool_allocator
    allocator.alloc(allocator.available_size() - free)
    batch, (made, reasons) = overlapped(batch), worker()
    short = free < 2 * WIDTH
    assert made.must_wait(batch) == short
    assert batch.spec_info.lookahead == (WIDTH if short else 2 * WIDTH)
    assert reasons == [SLOTS] * short
    assert batch.check_decode_mem() == (free >= WIDTH)


@pytest.mark.parametrize(
    ("in_flight", "late", "fell_back"), [(0, False, None), (1, True, "no_graph")]
)
def test_draws_that_need_history_are_launched_behind_the_result(
    in_flight: int, late: bool, fell_back: str | None
) -> None:
    """The round is launched without it: a grammar asks for a result of its own, where one is in flight."""
    (made, reasons), launched = worker(), []
    accepted = SimpleNamespace(tokens=torch.tensor([[5, 6]]), lengths=torch.tensor([2]))
    rest = SimpleNamespace(output=None, accepted=accepted, expected=None, fell_back=fell_back)

    def launch_round(batch, ahead: int):
        launched.append(ahead)
        return lambda: rest

    made.launch_round = launch_round
    asks = dict(custom_logit_processor=None, return_logprob=False, return_hidden_states=False)
    constrained = SimpleNamespace(grammar=object(), results_in_flight=in_flight, **asks)
    other = SimpleNamespace(grammar=None, results_in_flight=1, **asks)
    batch = SimpleNamespace(
        reqs=[constrained, other],
        seq_lens=None,
        forward_mode=SimpleNamespace(is_extend=lambda: False),
        spec_info=DFlashDraftInput(WIDTH, 2),
    )
    result = made.forward_batch_generation(batch)
    assert launched == [2] and result.next_draft_input.lookahead == 3 + WIDTH
    assert (result.delay_sample_func is not None) == late
    assert reasons == [HISTORY] * late
    if late:
        assert result.next_token_ids is None and result.delay_sample_func() is result
    assert result.next_token_ids.tolist() == [5, 6] and result.accept_lens.tolist() == [2]
    assert result.can_run_cuda_graph == (fell_back is None)
    assert constrained.results_in_flight == in_flight + 1
    assert constrained.host_waits == other.host_waits == late


@settings(deadline=None)
@given(data=st.data(), limit=st.integers(1, 6), sessions=st.booleans())
def test_a_row_rests_before_it_has_a_new_owner(
    data: st.DataObject, limit: int, sessions: bool
) -> None:
    """What one result frees, the prefill after it never takes; SGLang's own pool, any traffic.

    With as many rows as requests, the prefill after a full batch has no other.
    """
    args = SimpleNamespace(disable_overlap_schedule=False, enable_streaming_session=sessions)
    pool = ReqToTokenPool(rows_of_requests(args, limit), 8, "cpu", enable_memory_saver=False)
    pool.alloc([SimpleNamespace(req_pool_idx=None) for _ in range(limit * sessions)])
    running, freed = [], set()
    for _ in range(20):
        wanted = data.draw(st.integers(0, limit - len(running)))
        new = [SimpleNamespace(req_pool_idx=None) for _ in range(wanted)]
        assert not freed & set(pool.alloc(new))
        running += new
        ends = data.draw(st.sets(st.integers(0, limit - 1)))
        freed = {req.req_pool_idx for i, req in enumerate(running) if i in ends}
        for req in [req for i, req in enumerate(running) if i in ends]:
            running.remove(req)
            pool.free(req)


def test_exhausted_pool() -> None:
    batch = world(1)
    admit(batch, prompt=90, limit=5)
    batch.tree_cache.token_to_kv_pool_allocator.alloc(SIZE - 92)
    with pytest.raises(RuntimeError, match="Out of memory"):
        batch.tree_cache.pretty_print = lambda: None
        reserve(batch, WIDTH)


@settings(deadline=None, max_examples=60)
@given(
    page_size=st.sampled_from([1, 4, 16]),
    size=st.sampled_from([SIZE, LARGE]),
    shapes=st.lists(st.tuples(st.integers(1, 60), st.integers(2, 36)), min_size=1, max_size=5),
    data=st.data(),
)
def test_rounds_until_everyone_is_done(
    page_size: int, size: int, shapes: list, data: st.DataObject
) -> None:
    """Any mix of requests and of accepted lengths: slots stay apart, and none is lost."""
    batch = world(page_size, size)
    for prompt, limit in shapes:
        admit(batch, prompt, limit)
    allocator = batch.tree_cache.token_to_kv_pool_allocator
    while batch.reqs:
        expected = slots_required(batch.reqs, page_size, ONE_ROUND)
        before = allocator.available_size()
        reserve(batch, WIDTH)
        taken = before - allocator.available_size()
        assert taken == expected if size == SIZE else taken >= expected
        assert slots_required(batch.reqs, page_size, ONE_ROUND) == 0
        check(batch)
        for req in list(batch.reqs):
            left = slot_limit(req) - req.kv_committed_len
            req.kv_committed_len += min(data.draw(st.integers(1, WIDTH)), left)
            if req.kv_committed_len == slot_limit(req):
                allocator.free(torch.tensor(owned(batch, req)))
                batch.reqs.remove(req)
    assert allocator.available_size() == size


@settings(deadline=None, max_examples=60)
@given(
    page_size=st.sampled_from([1, 4, 16]),
    shapes=st.lists(st.tuples(st.integers(1, 60), st.integers(2, 36)), min_size=1, max_size=5),
    data=st.data(),
)
def test_rounds_of_any_width_ahead_of_their_results(
    page_size: int, shapes: list, data: st.DataObject
) -> None:
    """Slots are reserved for as many tokens as what is in flight may commit, and for the widest block behind them."""
    batch = world(page_size)
    for prompt, limit in shapes:
        admit(batch, prompt, limit)
    spec_info = DFlashDraftInput(WIDTH, in_flight=1)
    pending = dict.fromkeys(range(len(shapes)), 1)  # tokens that results in flight have, by request
    while batch.reqs:
        reserve(batch, spec_info.lookahead)
        width = data.draw(st.integers(1, WIDTH))
        for req in batch.reqs:
            begin = req.kv_committed_len + pending[req.req_pool_idx]
            row = batch.req_to_token_pool.req_to_token[req.req_pool_idx, begin : begin + width]
            mine = owned(batch, req)[begin:]
            assert all(slot in mine or slot == 0 for slot in row.tolist())
            assert 0 not in row[: max(0, slot_limit(req) - begin)]
        accepted = {i: data.draw(st.integers(1, width)) for i in pending}
        for req in list(batch.reqs):
            left = slot_limit(req) - req.kv_committed_len
            req.kv_committed_len += min(pending[req.req_pool_idx], left)
            if req.kv_committed_len == slot_limit(req):
                batch.tree_cache.token_to_kv_pool_allocator.free(torch.tensor(owned(batch, req)))
                batch.reqs.remove(req)
        spec_info, pending = DFlashDraftInput(WIDTH, in_flight=width), accepted
    allocator = batch.tree_cache.token_to_kv_pool_allocator
    assert allocator.available_size() == allocator.size


def test_what_is_in_flight_of_two_batches() -> None:
    """Where a pending result was seen, nothing is; a prefill beside it has one token of each of its requests."""
    batch, prompts = DFlashDraftInput(WIDTH, in_flight=0), DFlashDraftInput(WIDTH, in_flight=1)
    batch.merge_batch(prompts)
    assert batch.lookahead == WIDTH + 1
