"""What is refused before SGLang reads it: each with one sentence that names it."""

from __future__ import annotations

from typing import Any

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_dflash.errors import DFlashError
from sglang_dflash.serving.parameters import (
    check_embeddings,
    check_indices,
    check_processor,
    check_session,
    check_types,
    sampling_fields,
)

VOCAB = 100


def refusal(check, *arguments: Any) -> str:
    with pytest.raises(DFlashError) as caught:
        check(*arguments)
    text = str(caught.value)
    assert text.endswith(".") and "\n" not in text
    return text


def test_every_parameter_of_the_release_is_known() -> None:
    names = set(SamplingParams.__init__.__annotations__) - {"return"}
    assert set(sampling_fields().model_fields) == names
    assert sampling_fields().model_validate({}).max_new_tokens == SamplingParams().max_new_tokens


@pytest.mark.parametrize(
    "sampling",
    [
        None,
        {},
        [{}, {"temperature": 0}],
        {"temperature": 0, "top_p": 1, "logit_bias": {"5": 1}, "max_new_tokens": None},
        {"stop": ["a", "b"], "stop_token_ids": [1], "stop_regex": "a+", "custom_params": {"x": 1}},
    ],
)
def test_readable(sampling: Any) -> None:
    check_types(sampling)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "hot"),
        ("temperature", float("nan")),
        ("temperature", None),
        ("max_new_tokens", 3.5),
        ("ignore_eos", "x"),
        ("stop", 5),
        ("stop_token_ids", ["x"]),
        ("logit_bias", {"5": "x"}),
        ("logit_bias", {"5": 1e39}),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e-38),
        ("min_new_tokens", 1 << 63),
        ("n", 0),
        ("n", 10**9),
        ("structural_tag", ""),
        ("top_k", 1 << 31),
        ("stop_regex", "a{99999999999}"),
        ("sampling_seed", -1),
        ("custom_params", "x"),
        ("foo", 1),
    ],
)
def test_unreadable(name: str, value: Any) -> None:
    assert refusal(check_types, {name: value}).startswith(name)


def test_other_refusals() -> None:
    assert refusal(check_types, [{}, "x"]) == (
        "sampling_params 'x' is not an object: give names and values."
    )
    assert refusal(check_types, {"stop_regex": ["a", "("]}).startswith(
        "stop_regex '(' is not a regular expression"
    )
    assert refusal(check_processor, "xx").startswith("custom_logit_processor 'xx' cannot be loaded")
    assert "row of 2 numbers, but the model is 3 wide" in refusal(
        check_embeddings, [[0.0] * 3, [0.0] * 2], 3
    )


def test_loadable_processor() -> None:
    check_processor(None)
    check_processor(DisallowedTokensLogitsProcessor.to_str())


def test_sessions() -> None:
    check_session(None)
    check_session({"id": "a", "rid": None, "offset": -1, "replace": False})
    for given, named in (
        (
            {"id": {"a": 1}},
            "session_params.id {'a': 1} cannot be read (Input should be a valid str",
        ),
        ({"rid": ["a"]}, "session_params.rid ['a'] cannot"),
        ({"offset": "1"}, "session_params.offset '1' cannot"),
        ({"replace": 1}, "session_params.replace 1 cannot"),
        ({"unknown": 1}, "session_params.unknown 1 is not known: leave it out."),
    ):
        assert refusal(check_session, given).startswith(named)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"input_ids": [5, VOCAB]}, "input_ids has the token id 100"),
        ({"input_ids": [-1]}, "input_ids has the token id -1"),
        ({"input_ids": [1], "token_ids_logprob": [VOCAB]}, "token_ids_logprob has the token id"),
        ({"input_ids": [1], "top_logprobs_num": VOCAB + 1}, "top_logprobs_num 101"),
        ({"input_ids": [1], "top_logprobs_num": -1}, "top_logprobs_num -1"),
        ({"input_ids": [1], "logprob_start_len": -2}, "logprob_start_len -2"),
    ],
)
def test_indices(fields: dict, named: str) -> None:
    request, sampling = GenerateReqInput(**fields), SamplingParams()
    assert refusal(check_indices, request, sampling, VOCAB).startswith(named)


def test_stop_ids_outside_the_vocabulary() -> None:
    """They stop nothing, which is harmless unless they are to be held back."""
    request = GenerateReqInput(input_ids=[1])
    check_indices(request, SamplingParams(stop_token_ids=[10**6]), VOCAB)
    held_back = SamplingParams(stop_token_ids=[10**6], min_new_tokens=2)
    assert "token id 1000000" in refusal(check_indices, request, held_back, VOCAB)
