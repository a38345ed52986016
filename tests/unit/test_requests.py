"""Which requests are admitted, on the release's own request and sampling parameters."""

from __future__ import annotations

from typing import Any

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_dflash.errors import DFlashError
from sglang_dflash.requests import check_request


def check(sampling: dict[str, Any], **fields: Any) -> None:
    params = SamplingParams(**({"temperature": 0} | sampling))
    params.normalize(None)
    check_request(GenerateReqInput(text="x", **fields), params)


@pytest.mark.parametrize(
    ("sampling", "fields"),
    [
        ({}, {}),
        ({"temperature": 1.0, "top_k": 1}, {}),
        ({"top_p": 0.5, "min_p": 0.1}, {}),
        ({"stop": ["x"], "ignore_eos": True, "n": 2, "max_new_tokens": 5}, {"stream": True}),
        ({"frequency_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": {}}, {}),
        ({}, {"return_logprob": False, "image_data": [], "session_params": {}}),
    ],
)
def test_admitted(sampling: dict[str, Any], fields: dict[str, Any]) -> None:
    check(sampling, **fields)


@pytest.mark.parametrize(
    ("sampling", "fields", "named"),
    [
        ({"temperature": 0.7}, {}, "temperature 0.7"),
        ({"temperature": 1.0, "top_k": 20}, {}, "temperature 1.0"),
        ({"frequency_penalty": 0.5}, {}, "frequency_penalty 0.5"),
        ({"presence_penalty": -0.5}, {}, "presence_penalty -0.5"),
        ({"repetition_penalty": 1.2}, {}, "repetition_penalty 1.2"),
        ({"min_new_tokens": 4}, {}, "min_new_tokens 4"),
        ({"logit_bias": {"5": 1.0}}, {}, "logit_bias {'5': 1.0}"),
        ({"json_schema": "{}"}, {}, "json_schema {}"),
        ({"regex": "a+"}, {}, "regex a+"),
        ({"ebnf": "root ::= x"}, {}, "ebnf root ::= x"),
        ({"structural_tag": "{}"}, {}, "structural_tag {}"),
        ({}, {"return_logprob": True}, "return_logprob True"),
        ({}, {"return_hidden_states": True}, "return_hidden_states True"),
        ({}, {"custom_logit_processor": "y" * 90}, "custom_logit_processor " + "y" * 60 + "…"),
        ({}, {"input_embeds": [[0.5]]}, "input_embeds [[0.5]]"),
        ({}, {"lora_path": "a"}, "lora_path a"),
        ({}, {"session_params": {"id": "s"}}, "session_params {'id': 's'}"),
        ({}, {"image_data": ["i.png"]}, "image_data ['i.png']"),
    ],
)
def test_refused(sampling: dict[str, Any], fields: dict[str, Any], named: str) -> None:
    with pytest.raises(DFlashError) as caught:
        check(sampling, **fields)
    text = str(caught.value)
    assert text.startswith(f"{named} is not supported with DFLASH")
    assert text.endswith(".") and "\n" not in text and ": " in text
