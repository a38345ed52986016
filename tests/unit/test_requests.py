"""Which requests are admitted, on the release's own request and sampling parameters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_dflash.errors import DFlashError
from sglang_dflash.serving.adapters import check_adapter_of_request
from sglang_dflash.serving.media import BOTH, PICTURES, VIDEOS, check_media
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
        ({}, {"image_data": [], "return_routed_experts": False}),
    ],
)
def test_admitted(sampling: dict[str, Any], fields: dict[str, Any]) -> None:
    check(sampling, **fields)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"audio_data": ["a" * 90]}, "audio_data ['" + "a" * 58 + "…"),
        ({"return_routed_experts": True}, "return_routed_experts True"),
    ],
)
def test_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(DFlashError) as caught:
        check({}, **fields)
    text = str(caught.value)
    assert text.startswith(f"{named} is not supported with DFLASH")
    assert text.endswith(".") and "\n" not in text and ": " in text


def test_adapters() -> None:
    """None and an empty name ask for none; a name must be that of a loaded one."""

    def asked(enabled: bool, **fields: Any) -> None:
        args = SimpleNamespace(enable_lora=enabled)
        manager = SimpleNamespace(server_args=args, lora_ref_cache={"b": 1, "a": 2})
        check_adapter_of_request(GenerateReqInput(text="x", **fields), manager)

    for path in (None, ""):
        asked(False, lora_path=path)
    asked(True, lora_path="a")
    with pytest.raises(
        DFlashError, match="^lora_path 'a' is not supported with DFLASH on a server"
    ):
        asked(False, lora_path="a")
    with pytest.raises(DFlashError, match="^lora_path 'c' is not .* .there is a, b.: load it"):
        asked(True, lora_path="c")
    with pytest.raises(DFlashError, match="^lora_path 'a' is not supported in a session"):
        asked(True, lora_path="a", session_params={"id": "s"})


def test_min_p_with_a_seed() -> None:
    """The release's sampler asserts that there is none, which would end the server."""
    check({"temperature": 1.0, "min_p": 0.1})
    check({"temperature": 1.0}, deterministic=True)
    with pytest.raises(DFlashError, match="^min_p 0.1 cannot be drawn with a seed.*: leave it"):
        check({"temperature": 1.0, "min_p": 0.1}, deterministic=True)


TAKES_NO = " is not supported with DFLASH and a model that takes no "


@pytest.mark.parametrize(
    ("shown", "fields", "named"),
    [
        ((PICTURES,), {"image_data": ["i.png"]}, None),
        ((PICTURES,), {"image_data": [], "session_params": {"id": "s"}}, None),
        ((), {"image_data": None, "video_data": []}, None),
        ((), {"image_data": ["i.png"]}, f"image_data ['i.png']{TAKES_NO}pictures: "),
        ((PICTURES,), {"image_data": ["i.png"], "session_params": {"id": "s"}}, "image_data ['i"),
        ((), {"video_data": ["v.mp4"]}, f"video_data ['v.mp4']{TAKES_NO}videos: "),
        ((PICTURES,), {"video_data": ["v.mp4"]}, f"video_data ['v.mp4']{TAKES_NO}videos: "),
        ((PICTURES, VIDEOS), {"video_data": "v.mp4"}, None),
        ((PICTURES, VIDEOS, BOTH), {"image_data": ["i.png"], "video_data": ["v.mp4"]}, None),
        ((PICTURES, VIDEOS), {"image_data": ["i.png"], "video_data": ["v.mp4"]}, "video_data ['v"),
        ((PICTURES, VIDEOS), {"video_data": [["0.png", "1.png"]]}, "video_data ['0.png', '1.png']"),
        ((PICTURES, VIDEOS), {"video_data": {"format": "processor_output"}}, "video_data {'format"),
        ((PICTURES, VIDEOS), {"audio_data": ["a.wav"]}, "audio_data ['a.wav'] is not supported"),
    ],
)
def test_media(
    shown: tuple[tuple[str, ...], ...], fields: dict[str, Any], named: str | None
) -> None:
    """Of a model that takes them, each request's own."""

    def check_both() -> None:
        check({}, **fields)
        check_media(GenerateReqInput(text="x", **fields), SamplingParams(), shown)

    if named is None:
        return check_both()
    with pytest.raises(DFlashError) as caught:
        check_both()
    text = str(caught.value)
    assert text.startswith(named) and text.endswith(".") and ": " in text


def test_embeddings_for_a_multimodal_model() -> None:
    """The release would take its own instead, without a word."""
    request = GenerateReqInput(input_embeds=[[0.5]])
    check_media(request, SamplingParams(), ())
    with pytest.raises(DFlashError, match="^input_embeds is not read .*: send"):
        check_media(request, SamplingParams(), (PICTURES,))


def test_copies_of_pictures() -> None:
    """The release's scheduler ends when it looks for the second copy's."""
    request = GenerateReqInput(text="x", image_data=["i.png"])
    check_media(request, SamplingParams(n=1), (PICTURES,))
    check_media(GenerateReqInput(text="x"), SamplingParams(n=2), (PICTURES,))
    with pytest.raises(DFlashError, match="^n 2 is not supported with DFLASH and pictures: send"):
        check_media(request, SamplingParams(n=2), (PICTURES,))
