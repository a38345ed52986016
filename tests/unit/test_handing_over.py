"""Parameters of requests, made on the host and handed to the device: what the release makes on the device itself."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from sglang_dflash.scheduler.parameters import hand_over_unawaited

VOCABULARY, ELSEWHERE = 20, "meta"


class Batch:
    """What is read of one whose prompts are prepared."""

    def __init__(self, device: str, *reqs: Req):
        self.device, self.reqs = device, reqs


@pytest.fixture
def handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SamplingBatchInfo, "adjusted_from_schedule_batch", None)
    hand_over_unawaited()


def made(device: str, algorithm: str | None, *reqs: Req) -> SamplingBatchInfo:
    arguments = ServerArgs(model_path="dummy")
    arguments.speculative_algorithm = algorithm
    arguments.enable_custom_logit_processor = arguments.enable_deterministic_inference = True
    set_global_server_args_for_scheduler(arguments)
    return SamplingBatchInfo.from_schedule_batch(Batch(device, *reqs), VOCABULARY)


def request(processor: str | None = None, **sampling) -> Req:
    params = SamplingParams(**{"max_new_tokens": 50} | sampling)
    params.normalize(None)
    return Req("id", "", [5, 6], params, vocab_size=VOCABULARY, custom_logit_processor=processor)


def tensors(info: SamplingBatchInfo) -> dict[str, torch.Tensor]:
    found = {field.name: getattr(info, field.name) for field in fields(info)}
    found |= {str(key): mask for key, (_, mask) in info.custom_logit_processor.items()}
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


REQUESTS = (
    dict(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, logit_bias={"3": 5.0}),
    dict(temperature=0, processor=DisallowedTokensLogitsProcessor.to_str()),
)


def test_the_same_as_the_release_makes(handed_over: None) -> None:
    expected = made("cpu", None, *(request(**each) for each in REQUESTS))
    found = made("cpu", "DFLASH", *(request(**each) for each in REQUESTS))
    assert len(tensors(found)) >= 7 and tensors(found).keys() == tensors(expected).keys()
    for name, value in tensors(found).items():
        torch.testing.assert_close(value, tensors(expected)[name], rtol=0, atol=0)
    assert found.device == "cpu"


def test_all_of_it_is_on_the_device(handed_over: None) -> None:
    found = made(ELSEWHERE, "DFLASH", *(request(**each) for each in REQUESTS))
    assert {value.device.type for value in tensors(found).values()} == {ELSEWHERE}
    assert found.device == ELSEWHERE
