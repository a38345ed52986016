"""Who rides beside prompts, and how many rows of prompts a round takes along."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.chunk_cache import ChunkCache
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_dflash.gpu.pass_sizes import MOST_ROWS, PROMPT_ROWS, row_sizes
from sglang_dflash.round.costs import Staircase
from sglang_dflash.round.prompt_graphs import PromptGraphs
from sglang_dflash.round.run import RoundRunner
from sglang_dflash.scheduler.choices import Plan
from sglang_dflash.scheduler.draft_input import DFlashDraftInput
from sglang_dflash.scheduler.ending import ends_in_flight
from sglang_dflash.scheduler.fixed_plans import WholeBlocks
from sglang_dflash.scheduler.riding import Riding

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


def riding(slowdown: float = 0.25, prompt_graphs: PromptGraphs | None = None) -> Riding:
    return Riding(slowdown, RoundRunner(None, None, prompt_graphs), WholeBlocks(WIDTH))


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


def timed(sizes: list[int], times: list[float]) -> PromptGraphs:
    """Graphs that were captured elsewhere, and how long they take."""
    graphs = object.__new__(PromptGraphs)
    graphs.sizes, graphs.passes = sizes, Staircase(sizes, times)
    graphs.inputs = SimpleNamespace(most=4)
    return graphs


GRAPHS = timed([64, 128, 192, 256], [1.0, 1.1, 1.5, 2.0])
GRAPHS.parts = SimpleNamespace(linear_states=None)


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
    ("block_rows", "slowdown", "rows"),
    [
        (8, 0.05, 56),  # what the smallest pass has room for costs nothing
        (8, 0.1, 120),
        (8, 0.49, 120),
        (8, 0.5, 184),
        (8, 9.0, 248),
        (64, 0.05, 0),
        (65, 0.05, 63),
        (256, 9.0, 0),
        (257, 9.0, 0),
    ],
)
def test_prompt_rows(block_rows: int, slowdown: float, rows: int) -> None:
    assert GRAPHS.prompt_rows(block_rows, slowdown, backlog=0) == rows


@pytest.mark.parametrize(("besides", "rows"), [(0.0, 56), (0.9, 56), (1.1, 120), (100.0, 248)])
def test_prompts_make_all_of_a_round_longer(besides: float, rows: int) -> None:
    """What it takes besides the target's pass, as the drafter's, takes as long with prompts as without."""
    assert GRAPHS.prompt_rows(8, 0.05, 0, besides) == rows


@pytest.mark.parametrize(("backlog", "rows"), [(0, 56), (56 * 8, 56), (100 * 8, 100), (1e6, 248)])
def test_prompts_that_wait_in_numbers(backlog: int, rows: int) -> None:
    assert GRAPHS.prompt_rows(8, 0.05, int(backlog)) == rows


def test_holds() -> None:
    assert GRAPHS.holds(256, 4)
    assert not GRAPHS.holds(257, 4) and not GRAPHS.holds(256, 5)


def test_what_prompts_take_in_a_pass_of_their_own() -> None:
    """Where the table of costs is asked for, and where a graph holds them."""
    passes = SimpleNamespace(
        passes=Staircase([64, 256], [1.0, 3.0]), holds=GRAPHS.holds, computes=lambda prompts: True
    )
    rounds = RoundRunner(None, None, passes)

    def takes(rows: int, requests: int = 1) -> float | None:
        return rounds.milliseconds_of(SimpleNamespace(input_ids=[0] * rows, reqs=[0] * requests))

    assert takes(60) is None  # all rows are verified
    rounds.survival = object()
    assert takes(60) == 1.0 and takes(65) == 3.0
    assert takes(300) is None and takes(60, requests=5) is None
    passes.computes = lambda prompts: False
    assert takes(60) is None
    rounds.prompt_graphs = None
    assert takes(60) is None


ASKED = dict(
    forward_mode=ForwardMode.EXTEND,
    input_embeds=None,
    multimodal_inputs=[None, None],
    lora_ids=[None, None],
    input_ids=[0] * 100,
    batch_size=2,
    is_prefill_only=False,
    return_hidden_states_before_norm=False,
)


def test_what_a_pass_computes() -> None:
    """Plain causal attention over tokens; anything else is the release's."""

    def can_run(delimiter: int | None = None, **other: Any) -> bool:
        args = SimpleNamespace(multi_item_scoring_delimiter=delimiter)
        GRAPHS.runner = SimpleNamespace(server_args=args)
        return GRAPHS.can_run(SimpleNamespace(**ASKED | other))

    assert can_run() and can_run(is_prefill_only=True) and can_run(delimiter=7)
    assert not can_run(delimiter=7, is_prefill_only=True)
    assert not can_run(forward_mode=ForwardMode.TARGET_VERIFY)
    assert not can_run(input_embeds=torch.zeros(1))
    assert not can_run(multimodal_inputs=[None, object()]) and can_run(multimodal_inputs=None)
    assert not can_run(input_ids=[0] * 300) and not can_run(batch_size=5)
    assert not can_run(return_hidden_states_before_norm=True)
    assert not can_run(lora_ids=[None, "adapter"]) and can_run(lora_ids=None)


def test_row_sizes() -> None:
    sizes = row_sizes(0, None)
    assert sizes[0] == 64 and sizes[-1] == MOST_ROWS == 2048
    assert sizes == sorted(set(sizes)) and {960, 1024, 1152} < set(sizes)
    assert row_sizes(0, 4096) == sizes
    assert row_sizes(0, 200) == [64, 96, 128, 160, 192]
    assert row_sizes(0, 63) == [] and row_sizes(0, -1) == sizes
    assert row_sizes(2048, None)[-1] == 2048 + PROMPT_ROWS


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
    monkeypatch.setattr(
        WholeBlocks, "besides", lambda self, plan, requests, adapted: 1e-3 * requests
    )
    scheduler = world(request(), request())
    assert riding(0.01, GRAPHS).chunk_size(scheduler, 4096) == 64
    monkeypatch.setattr(
        WholeBlocks, "besides", lambda self, plan, requests, adapted: 10.0 * requests
    )
    assert riding(0.01, GRAPHS).chunk_size(scheduler, 4096) == 128 - 2 * WIDTH


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


def test_blocks_that_did_not_run_are_not_taken_for_verified() -> None:
    graphs = timed([64], [1.0])
    graphs._blocks, graphs._last = object(), None
    with pytest.raises(RuntimeError, match="without the blocks"):
        graphs.leave()
