"""Which requests are admitted, on the release's own request and sampling parameters."""

from __future__ import annotations

from typing import Any

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_dflash.errors import DFlashError
from sglang_dflash.serving.requests import check_request


def check(sampling: dict[str, Any], deterministic: bool = False, **fields: Any) -> None:
    params = SamplingParams(**({"temperature": 0} | sampling))
    params.normalize(None)
    check_request(GenerateReqInput(text="x", **fields), params, deterministic)


@pytest.mark.parametrize(
    ("sampling", "fields"),
    [
        ({}, {}),
        ({"temperature": 0.7, "top_p": 0.5, "min_p": 0.1, "top_k": 20}, {}),
        ({"frequency_penalty": 0.5, "repetition_penalty": 1.2, "min_new_tokens": 4}, {}),
        ({"logit_bias": {"5": 1.0}, "json_schema": "{}"}, {"return_logprob": True}),
        ({}, {"return_hidden_states": True, "custom_logit_processor": "x"}),
        ({}, {"input_embeds": [[0.5]], "session_params": {"id": "s"}}),
        ({}, {"image_data": [], "lora_path": None, "return_routed_experts": False}),
    ],
)
def test_admitted(sampling: dict[str, Any], fields: dict[str, Any]) -> None:
    check(sampling, **fields)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"lora_path": "a"}, "lora_path 'a'"),
        ({"image_data": ["i.png"]}, "image_data ['i.png']"),
        ({"video_data": ["v" * 90]}, "video_data ['" + "v" * 58 + "…"),
        ({"return_routed_experts": True}, "return_routed_experts True"),
    ],
)
def test_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(DFlashError) as caught:
        check({}, **fields)
    text = str(caught.value)
    assert text.startswith(f"{named} is not supported with DFLASH")
    assert text.endswith(".") and "\n" not in text and ": " in text


def test_min_p_with_a_seed() -> None:
    """The release's sampler asserts that there is none, which would end the server."""
    check({"temperature": 1.0, "min_p": 0.1})
    check({"temperature": 1.0}, deterministic=True)
    with pytest.raises(DFlashError, match="^min_p 0.1 cannot be drawn with a seed.*: leave it"):
        check({"temperature": 1.0, "min_p": 0.1}, deterministic=True)
