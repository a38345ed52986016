"""One value for all prompts, or one for each, on the release's own request."""

from __future__ import annotations

from typing import Any

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from sglang_dflash.errors import DFlashError
from sglang_dflash.serving.by_prompt import fit_to_prompts
from sglang_dflash.serving.requests import check_received

TWO = {"text": ["a", "b"]}


@pytest.mark.parametrize(
    "fields",
    [
        {"text": "a", "sampling_params": {}},
        TWO | {"sampling_params": [{}, {}], "extra_key": "a", "session_params": {"id": "a"}},
        {"input_ids": [[1], [2]], "return_logprob": [True, False], "rid": ["a", "b"]},
        {"input_ids": [1, 2], "token_ids_logprob": [1, 2, 3]},
        TWO | {"token_ids_logprob": [1, 2, 3]},
        {"input_embeds": [[[0.5]], [[0.5]]], "return_hidden_states": [True, False]},
    ],
)
def test_fits(fields: dict[str, Any]) -> None:
    request = GenerateReqInput(**fields)
    fit_to_prompts(request)
    assert request == GenerateReqInput(**fields)


def test_a_list_of_one() -> None:
    """A lone prompt's is that one, in a batch it stays a list."""
    fields = {"rid": ["a"], "top_logprobs_num": [2], "token_ids_logprob": [[5]]}
    lone, batch = GenerateReqInput(text="a", **fields), GenerateReqInput(text=["a"], **fields)
    fit_to_prompts(lone)
    fit_to_prompts(batch)
    assert (lone.rid, lone.top_logprobs_num, lone.token_ids_logprob) == ("a", 2, [5])
    assert (batch.rid, batch.top_logprobs_num, batch.token_ids_logprob) == (["a"], [2], [[5]])


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            TWO | {"sampling_params": [{}]},
            "sampling_params has 1 entries for 2 prompts: give one for each, or one for all.",
        ),
        (
            {"text": "a", "rid": ["a", "b"]},
            "rid has 2 entries for 1 prompts: give one for each, or one for all.",
        ),
        (
            {"input_ids": [1, 2], "token_ids_logprob": [[1], [2]]},
            "token_ids_logprob has 2 entries for 1 prompts: give one for each, or one for all.",
        ),
        (
            {"text": "a", "input_ids": [[1]]},
            "text and input_ids are not as many prompts: give one of them.",
        ),
        (
            TWO | {"extra_key": ["a", "b"]},
            "extra_key ['a', 'b'] is a list: give one for all prompts.",
        ),
    ],
)
def test_does_not_fit(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DFlashError) as caught:
        fit_to_prompts(GenerateReqInput(**fields))
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    "fields", [{"input_embeds": []}, {"text": "a", "sampling_params": [{}, {}]}]
)
def test_received(fields: dict[str, Any]) -> None:
    """What the release would stumble over is refused, and the request is left as it was."""
    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy"))  # a refusal is counted
    with pytest.raises(DFlashError, match=r"\.$"):
        check_received(GenerateReqInput(**fields))
    sound = GenerateReqInput(text=["a", "b"], rid="c")
    check_received(sound)
    assert sound == GenerateReqInput(text=["a", "b"], rid="c")
