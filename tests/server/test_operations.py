"""What an operator does to a running server: pauses, new weights, sessions of several turns."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.server.checks import assert_same, assert_speculated, check
from tests.server.harness import TARGET, Server, decodes, generate_body, mostly_on


def post(server: Server, path: str, **body: object) -> dict:
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    return response.json()


@mostly_on(-1)
@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_pause_and_continue(dflash: Server, plain: Server, prompts: list[str], mode: str) -> None:
    """Requests that are paused in the middle give what they would have given."""
    long = {"max_new_tokens": 600, "ignore_eos": True}
    with ThreadPoolExecutor(4) as pool:
        streams = [dflash.stream(prompt, **long) for prompt in prompts[40:44]]
        list(pool.map(decodes, streams))
        asked = [pool.submit(list, stream) for stream in streams]
        post(dflash, "/pause_generation", mode=mode)
        time.sleep(0.5)
        assert not any(answer.done() for answer in asked), "paused too late to show anything"
        post(dflash, "/continue_generation")
        answers = [answer.result()[-1] for answer in asked]
    for prompt, answer in zip(prompts[40:44], answers, strict=True):
        assert_same(answer, plain.reference(prompt, **long))
        assert_speculated(answer)


def test_pause_that_aborts(dflash: Server, plain: Server, prompts: list[str]) -> None:
    stream = dflash.stream(prompts[44], max_new_tokens=1500, ignore_eos=True)
    decodes(stream)
    try:
        post(dflash, "/pause_generation", mode="abort")
        *_, last = stream
    finally:
        post(dflash, "/continue_generation")
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    check(dflash, plain, prompts[44], max_new_tokens=30)


@pytest.fixture(scope="module")
def other_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target with one layer turned around, so that it says something else."""
    folder = tmp_path_factory.mktemp("weights") / "target"
    shutil.copytree(TARGET, folder)
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        names = [name for name in tensors if name.endswith("mlp.down_proj.weight")]
        tensors[max(names)] *= -1.0
        save_file(tensors, file, metadata={"format": "pt"})
    return folder


@pytest.fixture
def updated(
    dflash: Server, plain: Server, other_weights: Path, prompts: list[str]
) -> Iterator[dict]:
    """Both servers with other weights for a while; gives an answer from before."""
    before = plain.generate(prompts[0], max_new_tokens=100)
    for server in (dflash, plain):
        server.wait_until_idle()
        assert post(server, "/update_weights_from_disk", model_path=str(other_weights))["success"]
    yield before
    for server in (dflash, plain):
        server.wait_until_idle()
        assert post(server, "/update_weights_from_disk", model_path=str(TARGET))["success"]


def test_new_weights(dflash: Server, plain: Server, prompts: list[str], updated: dict) -> None:
    """The target changes and the drafter stays: other answers, still those of plain decoding."""
    expected = plain.generate_all(prompts[:8], concurrency=4, max_new_tokens=100)
    assert expected[0]["output_ids"] != updated["output_ids"]
    answers = dflash.generate_all(prompts[:8], concurrency=4, max_new_tokens=100)
    for answer, reference in zip(answers, expected, strict=True):
        assert_same(answer, reference)
        assert answer["meta_info"]["spec_verify_ct"] > 0  # hardly a draft is right any more


def test_session(dflash: Server, plain: Server, prompts: list[str], tokenizer) -> None:
    """A second turn that continues the first, on the KV that the first left."""
    turns = [tokenizer.encode(prompts[45]), tokenizer.encode(prompts[46])]
    answers = []
    for server in (plain, dflash):
        session = post(server, "/open_session", capacity_of_str_len=2000)
        first = post(
            server,
            "/generate",
            **generate_body(turns[0], max_new_tokens=60),
            session_params={"id": session},
        )
        rid = first["meta_info"]["id"]
        second = post(
            server,
            "/generate",
            **generate_body(turns[1], max_new_tokens=60),
            session_params={"id": session, "rid": rid},
        )
        assert server.post("/close_session", {"session_id": session}).status_code == 200
        answers.append((first, second))
    for mine, expected in zip(answers[1], answers[0], strict=True):
        assert_same(mine, expected)
        assert_speculated(mine)
    assert answers[1][1]["meta_info"]["prompt_tokens"] > len(turns[1]) + 50
