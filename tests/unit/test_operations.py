"""What a scheduler is asked to do with memory and weights, where a server cannot be brought to the point at will."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers import io_struct as io
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.server_args import set_global_server_args_for_scheduler
from torch import nn

from sglang_dflash.errors import DFlashError
from sglang_dflash.scheduler.base import DFlashWorkerBase
from sglang_dflash.scheduler.operations import Operations
from sglang_dflash.serving.door import check_operation
from sglang_dflash.serving.refused import accepted


class Batch:
    def __init__(self, finished: bool):
        self.reqs = [SimpleNamespace(finished=lambda: finished)]
        self.batch_is_full = True

    def filter_batch(self, v1_spec_info_filtered: bool) -> None:
        self.reqs = [req for req in self.reqs if not req.finished()]


class Scheduler:
    """With a round in flight, of requests that have finished or not."""

    def __init__(self, finished: bool):
        self.running_batch = self.last_batch = self.cur_batch = Batch(finished)
        self.result_queue = deque([(self.last_batch, "result")])
        self.enable_overlap, self.waiting_queue, self.chunked_req = True, [], None
        self.offload_tags: set[str] = set()
        self.done: list[Any] = []
        self.draft_worker = SimpleNamespace(set_aside=lambda: self.done.append("set aside"))

    def process_batch_result(self, batch: Batch, result: str) -> None:
        self.done.append(result)

    def is_fully_idle(self) -> bool:
        return not (self.running_batch.reqs or self.last_batch or self.result_queue)

    def flush_cache(self) -> None:
        assert self.is_fully_idle()
        self.done.append("flushed")


@pytest.fixture(params=[True, False])
def scheduler(request: pytest.FixtureRequest) -> Scheduler:
    set_global_server_args_for_scheduler(SimpleNamespace(enable_memory_saver=True))
    return Scheduler(finished=request.param)


def test_a_round_in_vain_is_waited_for(scheduler: Scheduler) -> None:
    """Of a client that has its last token, while requests that go on are a reason to refuse."""
    goes_on = not scheduler.running_batch.reqs[0].finished()
    release = Operations(scheduler, scheduler.done.append)
    output = release(io.ReleaseMemoryOccupationReqInput(tags=["weights"]))
    if not goes_on:
        *before, asked = scheduler.done
        assert not scheduler.running_batch.batch_is_full
        assert before == ["result", "set aside", "flushed"] and asked.tags == ["weights"]
        return
    assert not scheduler.done and len(scheduler.result_queue) == 1
    with pytest.raises(DFlashError, match=r"Memory cannot be released while requests run \(1\)"):
        accepted([output])


def test_all_is_put_back_at_last() -> None:
    """The drafter's weights, and clean pools of both models."""

    def runner() -> SimpleNamespace:
        shape = dict(size=4, page_size=1, dtype=torch.float32, head_num=1, head_dim=2, layer_num=1)
        return SimpleNamespace(
            model=nn.Linear(2, 2),
            req_to_token_pool=ReqToTokenPool(2, 4, "cpu", enable_memory_saver=False),
            token_to_kv_pool=MHATokenToKVPool(**shape, device="cpu", enable_memory_saver=False),
        )

    target, draft = runner(), runner()
    worker = SimpleNamespace(
        target_worker=SimpleNamespace(model_runner=target), model_runner=draft, _aside=None
    )
    expected = draft.model.weight.clone()
    DFlashWorkerBase.set_aside(worker)
    lost = [draft.model.weight]
    for each in (target, draft):
        pool, rows = each.token_to_kv_pool, each.req_to_token_pool
        lost += [*pool.k_buffer, *pool.v_buffer, rows.req_to_token]
    with torch.no_grad():
        for tensor in lost:
            tensor.fill_(7)
    DFlashWorkerBase.set_aside(worker)  # of memory that is lost, when the rest is released
    DFlashWorkerBase.put_back(worker)
    assert torch.equal(draft.model.weight, expected)
    assert not any(tensor.any() for tensor in lost[1:])
    assert worker._aside is None


def test_replicas() -> None:
    """The release's asserts, as sentences."""
    one, args = (SimpleNamespace(dp_size=n, tokenizer_worker_num=1) for n in (1, 2))
    for path in ("/init_weights_update_group", "/update_weights_from_tensor"):
        with pytest.raises(DFlashError, match="is not supported with --dp-size 2: send new"):
            check_operation(path, args)
        check_operation(path, one)
    check_operation("/update_weights_from_disk", args)


def test_processes_of_http() -> None:
    """What one would do for all, or keep to itself, is refused; what they all can do is not."""
    args = SimpleNamespace(dp_size=1, tokenizer_worker_num=2, enable_memory_saver=True)
    told = "is not supported with --tokenizer-worker-num 2, of which one"
    for path in (
        *("/open_session", "/close_session", "/pause_generation", "/continue_generation"),
        *("/load_lora_adapter", "/unload_lora_adapter", "/update_weights_from_disk"),
        *("/release_memory_occupation", "/v1/responses/{response_id}"),
    ):
        with pytest.raises(DFlashError, match=told):
            check_operation(path, args)
    for path in ("/generate", "/v1/responses", "/flush_cache", "/abort_request", "/server_info"):
        check_operation(path, args)
