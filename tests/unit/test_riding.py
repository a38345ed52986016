"""Who rides beside prompts, and how many rows of prompts a round takes along."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.chunk_cache import ChunkCache

from sglang_dflash.round.prompt_graphs import PromptGraphs
from sglang_dflash.round.run import RoundRunner
from sglang_dflash.scheduler.choices import Plan
from sglang_dflash.scheduler.draft_input import DFlashDraftInput
from sglang_dflash.scheduler.ending import ends_in_flight
from sglang_dflash.scheduler.fixed_plans import WholeBlocks
from sglang_dflash.scheduler.pace import Pace
from sglang_dflash.scheduler.riding import Riding
from tests.unit.test_prompt_passes import ASKED, GRAPHS, timed

WIDTH, SIZE = 8, 200


def request(**fields: Any) -> SimpleNamespace:
    own = dict(
        origin_input_ids=[0] * 20,
        output_ids=[0],
        fill_ids=[0] * 20,
        kv_committed_len=20,
        kv_allocated_len=20,
        sampling_params=SimpleNamespace(
            max_new_tokens=100,
            frequency_penalty=0.0,
            presence_penalty=0.0,
            repetition_penalty=1.0,
            min_new_tokens=0,
            logit_bias=None,
        ),
        grammar=None,
        custom_logit_processor=None,
        finished=lambda: False,
        to_finish=None,
        lora_id=None,
    )
    return SimpleNamespace(**own | fields)


def done() -> SimpleNamespace:
    return request(finished=lambda: True)


def world(*reqs: SimpleNamespace, **fields: Any) -> SimpleNamespace:
    """A scheduler that decodes `reqs`, over an empty pool of the release's."""
    allocator = TokenToKVPoolAllocator(SIZE, torch.float32, "cpu", None, need_sort=False)
    params = CacheInitParams(
        disable=True, req_to_token_pool=None, token_to_kv_pool_allocator=allocator, page_size=1
    )
    spec_info = DFlashDraftInput(WIDTH)
    batch = SimpleNamespace(
        reqs=list(reqs),
        is_prefill_only=False,
        is_spec_v2=True,
        new_tokens_required_next_decode=lambda living: spec_info.slots_required(
            [batch.reqs[i] for i in living], 1
        ),
    )

    def filter_batch(keep_indices: list[int]) -> None:
        batch.reqs = [batch.reqs[i] for i in keep_indices]

    batch.filter_batch = filter_batch
    own = dict(
        running_batch=batch,
        waiting_queue=[],
        result_queue=[],
        chunked_req=None,
        page_size=1,
        tree_cache=ChunkCache(params),
        token_to_kv_pool_allocator=allocator,
        truncation_align_size=None,
        prepared=[],
    )
    scheduler = SimpleNamespace(**own | fields)

    def update_running_batch(given: SimpleNamespace) -> SimpleNamespace:
        scheduler.prepared.append(given)
        return given

    scheduler.update_running_batch = update_running_batch
    return scheduler


def riding(
    slowdown: float = 0.25, prompt_graphs: PromptGraphs | None = None, host: float = 0.0
) -> Riding:
    """Beside a host that takes so many milliseconds for a step with prompts."""
    pace = Pace(SimpleNamespace(world_size=1))
    pace.with_prompts = np.array([host])
    return Riding(slowdown, RoundRunner(None, None, prompt_graphs), WholeBlocks(WIDTH), pace)


def boards(
    scheduler: SimpleNamespace, slowdown: float = 0.25, graphs: PromptGraphs | None = None
) -> bool:
    """Whether those that decode ride beside a prompt of 20; they are prepared for their round just then."""
    prompts = SimpleNamespace(extend_num_tokens=20, reqs=[request()])
    batch = riding(slowdown, graphs).board(scheduler, prompts)
    assert scheduler.prepared == ([] if batch is None else [scheduler.running_batch])
    return batch is not None


def test_those_that_decode_ride() -> None:
    assert boards(world(request(), done()))


def test_it_is_known_while_slots_are_reserved() -> None:
    """A step with prompts has one round."""
    scheduler, made = world(request()), riding()
    prompts, seen = SimpleNamespace(extend_num_tokens=20, reqs=[request()]), []

    def update_running_batch(batch: SimpleNamespace) -> SimpleNamespace:
        seen.append(made.boards)
        return batch

    scheduler.update_running_batch = update_running_batch
    assert made.board(scheduler, prompts) is not None
    assert seen == [True] and not made.boards


def test_nobody_rides() -> None:
    """Without requests that decode, and where the user wants prompts to run alone."""
    assert not boards(world())
    assert not boards(world(done()))
    assert not boards(world(request()), slowdown=0)
    scheduler = world(request())
    scheduler.running_batch.is_prefill_only = True
    assert not boards(scheduler)


def test_who_needs_history_rides_with_a_result_in_flight() -> None:
    """Its draws wait for that, not its round."""
    waiting = request(grammar=object(), results_in_flight=1)
    assert boards(world(request(), waiting, result_queue=[None]))


def test_the_rest_of_a_round_is_launched_behind_its_prompts() -> None:
    """As the scheduler asks for a step's draws: with those that the round alone asks for."""
    calls = []
    late = GenerationBatchResult(delay_sample_func=lambda: calls.append("rest"))
    late.copy_to_cpu = lambda logprobs: calls.append(("copied", logprobs))
    prompts, riders = SimpleNamespace(), SimpleNamespace(return_logprob=True, copy=lambda: "riders")
    results = {id(riders): late, id(prompts): GenerationBatchResult()}
    scheduler = SimpleNamespace(run_batch=lambda batch: results[id(batch)])
    result = riding(0.25, None).run(scheduler, riders, prompts)
    assert result.riders == ("riders", late) and calls == []
    assert result.delay_sample_func() is result
    assert calls == ["rest", ("copied", True)] and late.delay_sample_func is None


def test_slots_for_the_round() -> None:
    for left, rides in ((2 * WIDTH, True), (2 * WIDTH - 1, False)):
        scheduler = world(request(), request(), done())
        scheduler.token_to_kv_pool_allocator.alloc(SIZE - left)
        assert boards(scheduler) == rides


@pytest.mark.parametrize("page_size", [1, 16])
def test_slots_for_the_rest_of_a_prompt(page_size: int) -> None:
    """The next chunks of a prompt are sure of theirs."""
    prompt = request(origin_input_ids=[0] * 90, output_ids=[], fill_ids=[0] * 40)
    rest = {1: 50, 16: 64}[page_size]
    for left, rides in ((WIDTH + rest, True), (WIDTH + rest - 1, False)):
        scheduler = world(request(), chunked_req=prompt, page_size=page_size)
        scheduler.token_to_kv_pool_allocator.alloc(SIZE - left)
        assert boards(scheduler) == rides


def test_no_room_in_a_pass() -> None:
    """Two passes would make those that decode wait as long, and for one of few rows."""
    for others, rides in ((1, True), (3, True), (4, False)):
        assert boards(world(*(request() for _ in range(others))), graphs=GRAPHS) == rides
    small = timed([32], [1.0])
    assert boards(world(request()), graphs=small) and not boards(
        world(request(), request()), graphs=small
    )


@pytest.mark.parametrize(
    ("pending", "ends"),
    [
        ({"results_in_flight": 1, "output_ids": [0] * 99}, True),
        ({"results_in_flight": 1, "output_ids": [0] * 98}, False),
        ({"results_in_flight": 0, "output_ids": [0] * 99}, False),
        ({"results_in_flight": 1, "to_finish": object()}, True),
        ({"results_in_flight": 0, "to_finish": object()}, False),
        ({"results_in_flight": 1, "output_ids": [], "to_finish": object()}, True),
        ({"results_in_flight": 1, "output_ids": []}, False),
    ],
)
def test_who_ends_with_what_is_in_flight(pending: dict[str, Any], ends: bool) -> None:
    """Such a request has no round that would be in vain, neither here nor where it decodes alone."""
    assert ends_in_flight(request(**pending)) == ends
    assert boards(world(request(**pending), result_queue=[None])) != ends
    assert boards(world(request(**pending)))  # nothing is pending


@pytest.mark.parametrize(
    ("graphs", "slowdown", "rows"),
    [
        (GRAPHS, 0.1, 112),  # of 128, of which two blocks take 16
        (GRAPHS, 0.01, 64),  # 48 are left, but no chunk is shorter
        (None, 0.25, 64),
        (None, 10.0, 160),
    ],
)
def test_chunk_size(graphs: PromptGraphs | None, slowdown: float, rows: int) -> None:
    """So many rows of prompts as the blocks that are there let pass."""
    scheduler = world(request(), request(), done())
    assert riding(slowdown, graphs).chunk_size(scheduler, 4096) == rows
    if graphs is not None:
        scheduler.waiting_queue = [request(origin_input_ids=[0] * 2000)] * 2
        assert riding(slowdown, graphs).chunk_size(scheduler, 4096) == 240  # all that there is
        scheduler.waiting_queue = []
    assert riding(slowdown, graphs).chunk_size(scheduler, 40) == 40


def test_chunks_beside_a_drafter_that_takes_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WholeBlocks, "besides", lambda self, plan, load: 1e-3 * load.requests)
    scheduler = world(request(), request())
    assert riding(0.01, GRAPHS).chunk_size(scheduler, 4096) == 64
    monkeypatch.setattr(WholeBlocks, "besides", lambda self, plan, load: 10.0 * load.requests)
    assert riding(0.01, GRAPHS).chunk_size(scheduler, 4096) == 128 - 2 * WIDTH


@pytest.mark.parametrize(("waiting", "rows"), [(0, 64), (7, 64), (8, 112), (50, 176), (99, 240)])
def test_chunks_while_many_wait(waiting: int, rows: int) -> None:
    """A round may be longer by a fiftieth, and by half as much again for each of them beside two that decode."""
    scheduler = world(request(), request())
    scheduler.waiting_queue = [request(origin_input_ids=[0], output_ids=[])] * waiting
    assert riding(0.02, GRAPHS).chunk_size(scheduler, 4096) == rows


@pytest.mark.parametrize(("waiting", "rows"), [(0, 64), (1, 96), (2, 128), (8, 320)])
def test_chunks_without_graphs_while_many_wait(waiting: int, rows: int) -> None:
    scheduler = world(request(), request())
    scheduler.waiting_queue = [request(origin_input_ids=[0], output_ids=[])] * waiting
    assert riding(64 / (2 * WIDTH)).chunk_size(scheduler, 4096) == rows


@pytest.mark.parametrize(("host", "rows"), [(1.05, 64), (1.15, 112), (1.6, 176), (9.0, 240)])
def test_chunks_while_the_host_is_at_work(host: float, rows: int) -> None:
    """The step is no shorter without them."""
    scheduler = world(request(), request())
    assert riding(0.01, GRAPHS, host).chunk_size(scheduler, 4096) == rows


def test_chunks_as_the_release_takes_them() -> None:
    """Where nobody decodes, where prompts run alone, and where they must not be cut elsewhere."""
    assert riding().chunk_size(world(done()), 4096) == 4096
    assert riding(0).chunk_size(world(request()), 4096) == 4096
    assert riding().chunk_size(world(request()), None) is None
    assert riding().chunk_size(world(request(), truncation_align_size=64), 4096) == 4096


def test_a_result_is_taken_once() -> None:
    """What a round made of prompts belongs to the step that asks for it, and to no later one."""
    ridden, result = riding(), object()
    assert ridden.take() is None
    ridden.done(result)
    assert ridden.take() is result and ridden.take() is None


def test_a_round_that_fails_forgets_its_prompts() -> None:
    """No later round takes them along."""
    ridden, prompts = riding(), SimpleNamespace(input_embeds=None)

    def fails(batch: object) -> None:
        assert ridden._prompts is prompts
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        ridden.run(SimpleNamespace(run_batch=fails), SimpleNamespace(), prompts)
    assert ridden.prompts_for(torch.tensor([20]), Plan(WIDTH), False) is None


def test_prompts_without_graphs() -> None:
    """Those of a server without graphs have a pass of their own."""
    ridden = riding()
    ridden._prompts = SimpleNamespace(input_ids=[0], reqs=[request()])
    assert ridden.prompts_for(torch.tensor([20]), Plan(WIDTH), False) is None


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("asked", [[None, None], [None, "adapter"]])
def test_adapters_beside_blocks(
    captured: bool, asked: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of prompts or of the round, where passes with them were captured."""
    ridden = riding(0.5, GRAPHS)
    ridden._rounds.graphs = SimpleNamespace(key=lambda bounds, width: width)
    GRAPHS.runner = SimpleNamespace(server_args=SimpleNamespace(multi_item_scoring_delimiter=None))
    monkeypatch.setattr(GRAPHS, "adapted", captured)
    batch = SimpleNamespace(**ASKED | {"reqs": [request()], "lora_ids": asked})
    ridden._prompts = SimpleNamespace(
        get_model_worker_batch=lambda: batch, enable_overlap=False, reqs=batch.reqs
    )
    for adapted in (False, True):
        found = ridden.prompts_for(torch.tensor([20]), Plan(WIDTH), adapted)
        assert (found is batch) == (captured or not (adapted or any(asked)))


@pytest.mark.parametrize(
    ("other", "rides"),
    [
        ({}, True),
        ({"input_embeds": torch.zeros(1)}, False),
        ({"multimodal_inputs": [None, object()]}, False),
        ({"input_ids": [0] * 300}, False),
        ({"lora_ids": [None, "adapter"]}, False),
        ({"is_prefill_only": True}, False),  # whose items are scored apart
        ({"return_hidden_states_before_norm": True}, False),
    ],
)
def test_prompts_that_no_pass_computes_are_not_beside_blocks(
    other: dict[str, Any], rides: bool
) -> None:
    """Their blocks would not have run, and what a pass left before would be taken for theirs."""
    ridden = riding(0.5, GRAPHS)
    ridden._rounds.graphs = SimpleNamespace(key=lambda bounds, width: width)
    GRAPHS.runner = SimpleNamespace(server_args=SimpleNamespace(multi_item_scoring_delimiter=7))
    batch = SimpleNamespace(**ASKED | {"reqs": [request()]} | other)
    ridden._prompts = SimpleNamespace(
        get_model_worker_batch=lambda: batch, enable_overlap=False, reqs=batch.reqs
    )
    found = ridden.prompts_for(torch.tensor([20]), Plan(WIDTH), False)
    assert found is (batch if rides else None)
