"""What is refused: one sentence, and the server goes on; or it does not start, and says why."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.server.checks import check
from tests.server.harness import (
    DFLASH,
    DRAFTER,
    EACH_WAY,
    Server,
    events,
    fails_to_start,
    generate_body,
)

PICTURE = {"image_data": ["picture.png"]}


def assert_refused(response: Any, named: str) -> None:
    assert response.status_code == 400, response.text
    assert_sentence(response.json()["error"]["message"], named)


def assert_sentence(message: str, named: str) -> None:
    assert message.startswith(f"{named} "), message
    assert " is not supported with DFLASH" in message
    assert message.endswith(".") and "\n" not in message


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (PICTURE, "image_data ['picture.png']"),
        ({"return_routed_experts": True}, "return_routed_experts True"),
    ],
)
def test_request(
    dflash: Server, plain: Server, prompts: list[str], fields: dict, named: str
) -> None:
    assert_refused(dflash.post("/generate", generate_body(prompts[0]) | fields), named)
    check(dflash, plain, prompts[0], max_new_tokens=20)


MESSAGES = {"messages": [{"role": "user", "content": "How many?"}]}
STREAMS = {
    "/generate": {"text": "How many?"},
    "/v1/completions": {"model": "default", "prompt": "How many?"},
    "/v1/chat/completions": {"model": "default"} | MESSAGES,
}


@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1},
        {"max_new_tokens": 10**6, "max_tokens": 10**6},
        {"ebnf": "root ::="},
    ],
    ids=["parameter", "length", "grammar"],
)
def test_stream(dflash: Server, path: str, wrong: dict) -> None:
    """The status and the sentence are those that the same request has without a stream."""
    if path == "/generate":
        wrong = {"sampling_params": {name: wrong[name] for name in wrong if name != "max_tokens"}}
    whole, streamed = (
        dflash.post(path, STREAMS[path] | wrong | {"stream": stream}) for stream in (False, True)
    )
    assert whole.status_code == streamed.status_code == 400, streamed.text
    assert streamed.json() == whole.json()


def test_stream_of_a_batch(dflash: Server, plain: Server, prompts: list[str]) -> None:
    """What is refused of one is refused of all; what is served comes as it did."""
    body = {"text": prompts[:2], "stream": True, "sampling_params": {"max_new_tokens": 4}}
    pictures = {"image_data": [None, "picture.png"]}
    assert_refused(dflash.post("/generate", body | pictures), "image_data")
    chunks = list(events(dflash.post("/generate", body, stream=True)))
    assert {chunk["index"] for chunk in chunks} == {0, 1}
    check(dflash, plain, prompts[0], max_new_tokens=20)


def test_empty_adapter(dflash: Server, plain: Server, prompts: list[str]) -> None:
    """An empty `lora_path` names none, as in the release; a name is refused."""
    body = generate_body(prompts[0], max_new_tokens=20)
    for empty in ({"lora_path": ""}, {"lora_path": None}):
        answer = dflash.post("/generate", body | empty).json()
        assert answer["output_ids"] == plain.reference(prompts[0], max_new_tokens=20)["output_ids"]
    assert_refused(dflash.post("/generate", body | {"lora_path": "somewhere"}), "lora_path")


def test_one_bad_request_of_a_batch(dflash: Server, plain: Server, prompts: list[str]) -> None:
    body = {"text": prompts[:2], "image_data": [None, "picture.png"]}
    assert_refused(dflash.post("/generate", body), "image_data")
    check(dflash, plain, prompts[1], max_new_tokens=20)


def test_refused_requests_are_forgotten(dflash: Server, prompts: list[str]) -> None:
    """Their ids are free again, so nothing of them is kept; nor does a part of a batch run."""
    batch = {"text": prompts[:3], "rid": ["a", "b", "c"], "sampling_params": {"temperature": 0}}
    refused = dflash.post("/generate", batch | {"image_data": [None, "picture.png", None]})
    assert refused.status_code == 400
    assert dflash.load()["num_reqs"] == 0
    answered = dflash.post("/generate", batch)
    assert answered.status_code == 200, answered.text


def test_health(dflash: Server) -> None:
    assert dflash.get("/health").status_code == 200
    assert dflash.get("/health_generate").status_code == 200


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The drafter with a config.json that is cut short."""
    folder = tmp_path_factory.mktemp("broken") / "drafter"
    shutil.copytree(DRAFTER, folder)
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text[: len(text) // 2])
    return folder


@pytest.mark.parametrize("by_itself", EACH_WAY)
def test_start(broken: Path, tmp_path: Path, by_itself: bool) -> None:
    """A server that is refused prints the sentence last, no traceback, and exits non-zero."""
    path = "--speculative-draft-model-path"
    refused = {
        (*DFLASH, path, "/nowhere/drafter"): f"error: {path} /nowhere/drafter is not a folder",
        (*DFLASH, path, str(broken)): f"error: {broken}/config.json is not valid JSON",
        (
            *DFLASH,
            *("--speculative-dflash-block-size", "8", "--speculative-num-draft-tokens", "9"),
        ): "error: --speculative-dflash-block-size 8 and --speculative-num-draft-tokens 9 mean",
    }
    for number, (arguments, sentence) in enumerate(refused.items()):
        log = tmp_path / f"{number}.log"
        status, output = fails_to_start(log, *arguments, by_itself=by_itself)
        last = output.strip().splitlines()[-1]
        assert status == 1, output
        assert last.startswith(sentence) and last.endswith("."), output
        assert "Traceback" not in output
