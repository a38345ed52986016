"""What is refused: one sentence, and the server goes on; or it does not start, and says why."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.server.checks import check
from tests.server.harness import DFLASH, DRAFTER, Server, events, fails_to_start, generate_body

SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}}'


def assert_refused(response: Any, named: str) -> None:
    assert response.status_code == 400, response.text
    assert_sentence(response.json()["error"]["message"], named)


def assert_sentence(message: str, named: str) -> None:
    assert message.startswith(f"{named} is not supported with DFLASH"), message
    assert message.endswith(".") and "\n" not in message


@pytest.mark.parametrize(
    ("sampling", "fields", "named"),
    [
        ({"temperature": 0.8}, {}, "temperature 0.8"),
        ({"frequency_penalty": 0.5}, {}, "frequency_penalty 0.5"),
        ({"repetition_penalty": 1.5}, {}, "repetition_penalty 1.5"),
        ({"min_new_tokens": 3}, {}, "min_new_tokens 3"),
        ({"logit_bias": {"7": 5}}, {}, "logit_bias {'7': 5}"),
        ({"regex": "[a-z]+"}, {}, "regex [a-z]+"),
        ({"json_schema": SCHEMA}, {}, f"json_schema {SCHEMA}"),
        ({}, {"return_logprob": True}, "return_logprob True"),
    ],
)
def test_request(
    dflash: Server, plain: Server, prompts: list[str], sampling: dict, fields: dict, named: str
) -> None:
    body = generate_body(prompts[0], **sampling) | fields
    assert_refused(dflash.post("/generate", body), named)
    check(dflash, plain, prompts[0], max_new_tokens=20)


def test_stream(dflash: Server, plain: Server, prompts: list[str]) -> None:
    """The release has answered 200 by the time it looks at the request; the error is an event."""
    body = generate_body(prompts[0], temperature=0.8) | {"stream": True}
    (event,) = events(dflash.post("/generate", body, stream=True))
    assert_sentence(event["error"]["message"], "temperature 0.8")
    check(dflash, plain, prompts[0], max_new_tokens=20)


def test_one_bad_request_of_a_batch(dflash: Server, plain: Server, prompts: list[str]) -> None:
    sampling = [{"temperature": 0}, {"temperature": 0.5}]
    response = dflash.post("/generate", {"text": prompts[:2], "sampling_params": sampling})
    assert_refused(response, "temperature 0.5")
    check(dflash, plain, prompts[1], max_new_tokens=20)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"temperature": 0.3}, "temperature 0.3"),
        ({"temperature": 0, "logprobs": True}, "return_logprob True"),
        ({"temperature": 0, "presence_penalty": 1}, "presence_penalty 1"),
        ({"temperature": 0, "response_format": {"type": "json_object"}}, "json_schema"),
    ],
)
def test_chat_request(dflash: Server, fields: dict, named: str) -> None:
    body = {"model": "default", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}
    response = dflash.post("/v1/chat/completions", body | fields)
    assert response.status_code == 400, response.text
    assert response.json()["message"].startswith(named), response.text


def test_refused_requests_are_forgotten(dflash: Server, prompts: list[str]) -> None:
    """Their ids are free again, so nothing of them is kept; nor does a part of a batch run."""
    greedy, sampled = {"temperature": 0}, {"temperature": 0.5}
    batch = {"text": prompts[:3], "rid": ["a", "b", "c"]}
    refused = dflash.post("/generate", batch | {"sampling_params": [greedy, sampled, greedy]})
    assert refused.status_code == 400
    assert dflash.load()["num_reqs"] == 0
    answered = dflash.post("/generate", batch | {"sampling_params": greedy})
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


def test_start(broken: Path) -> None:
    """A command that is refused prints the sentence last, no traceback, and exits non-zero."""
    path = "--speculative-draft-model-path"
    refused = {
        (*DFLASH, path, "/nowhere/drafter"): f"error: {path} /nowhere/drafter is not a folder",
        (*DFLASH, path, str(broken)): f"error: {broken}/config.json is not valid JSON",
        (
            *DFLASH,
            *("--speculative-dflash-block-size", "8", "--speculative-num-draft-tokens", "9"),
        ): "error: --speculative-dflash-block-size 8 and --speculative-num-draft-tokens 9 mean",
    }
    with ThreadPoolExecutor(2) as pool:
        results = pool.map(lambda arguments: fails_to_start(*arguments), refused)
        for (status, output), sentence in zip(results, refused.values(), strict=True):
            last = output.strip().splitlines()[-1]
            assert status == 1, output
            assert last.startswith(sentence) and last.endswith("."), output
            assert "Traceback" not in output
