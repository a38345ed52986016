"""What a batch asks of its draws: from the requests that it has, not from those that it had."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from sglang_dflash.drawing.sampling import Sampling, needs_history

VOCABULARY = 20


@pytest.fixture(autouse=True)
def arguments() -> None:
    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy"))


def request(**sampling) -> Req:
    params = SamplingParams(**{"temperature": 0, "max_new_tokens": 50} | sampling)
    params.normalize(None)
    req = Req("id", "", [5, 6], params, eos_token_ids={2}, vocab_size=VOCABULARY)
    req.tokenizer = SimpleNamespace(eos_token_id=2, additional_stop_token_ids=None)
    return req


class Batch:
    """What is read of a decode batch."""

    device, top_logprobs_nums, token_ids_logprobs = "cpu", None, None

    def __init__(self, *reqs: Req):
        self.reqs = list(reqs)
        self.sampling_info = SamplingBatchInfo.from_schedule_batch(self, VOCABULARY)


def keep(made: Batch, *indices: int) -> Batch:
    """The batch when the other requests have finished, as the release leaves it."""
    made.reqs = [made.reqs[i] for i in indices]
    made.sampling_info.filter_batch(list(indices), torch.tensor(indices))
    return made


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.7},
        {"logit_bias": {"3": 5.0}},
        {"temperature": 0.7, "logit_bias": {"3": 5.0}},
        {"repetition_penalty": 1.3},
        {"min_new_tokens": 5},
    ],
)
def test_who_has_left_asks_nothing(sampling: dict) -> None:
    made = Batch(request(), request(**sampling), request())
    assert Sampling.of(made, detect_nan=False) is not None
    assert Sampling.of(keep(made, 0, 2), detect_nan=False) is None


def test_a_bias_that_is_left_alone_is_still_applied() -> None:
    made = Batch(request(temperature=0.7), request(logit_bias={"3": 5.0}))
    sampling = Sampling.of(keep(made, 1), detect_nan=False)
    assert sampling.info.is_all_greedy
    assert sampling.info.logit_bias[0, 3] == 5


def test_who_stays_is_not_greedy_because_another_is() -> None:
    made = Batch(request(), request(temperature=0.7))
    assert not Sampling.of(made, detect_nan=False).info.is_all_greedy
    assert not Sampling.of(keep(made, 1), detect_nan=False).info.is_all_greedy


def test_a_minimum_that_is_met_is_no_penalty() -> None:
    req = request(min_new_tokens=3)
    for produced, asks in ((0, True), (2, True), (3, False), (9, False)):
        req.output_ids = [7] * produced
        assert needs_history([req]) == asks
        assert (Sampling.of(Batch(req), detect_nan=False) is not None) == asks


def test_greedy_requests_ask_nothing() -> None:
    assert Sampling.of(Batch(request(), request()), detect_nan=False) is None
    assert Sampling.of(Batch(request()), detect_nan=True) is not None
