"""A target that answers NaN to some: those requests fail, with a sentence, and nobody else does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.server.checks import assert_same, assert_speculated
from tests.server.harness import CHOSEN_WORKERS, TARGET, Server, generate_body, running

ASKED = 24


@pytest.fixture(scope="module")
def poison(plain_answers: list[list[int]]) -> int:
    """A token that about half of the answers contain, none of them at the start."""

    def count(token: int) -> int:
        return sum(token in ids for ids in plain_answers)

    tokens = {token for ids in plain_answers for token in ids[20:]}
    tokens -= {token for ids in plain_answers for token in ids[:20]}
    return min(tokens, key=lambda token: abs(count(token) - ASKED // 2))


@pytest.fixture(scope="module")
def plain_answers(_plain: Server, prompts: list[str]) -> list[list[int]]:
    return [answer["output_ids"] for answer in _plain.references(prompts[:ASKED])]


@pytest.fixture(scope="module")
def damaged(poison: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target with an embedding of one token that is NaN, and a head that is not."""
    folder = tmp_path_factory.mktemp("damaged") / "target"
    shutil.copytree(TARGET, folder)
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.embed_tokens.weight"][poison] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module", params=CHOSEN_WORKERS)
def server(request: pytest.FixtureRequest, damaged: Path, logs: Path) -> Iterator[Server]:
    log = logs / f"damaged-{request.param}.log"
    arguments = ("--model-path", str(damaged), "--reasoning-parser", "qwen3")
    with running(log, *arguments, worker=request.param) as server:
        yield server


def assert_failed(response) -> None:
    assert response.status_code == 500, response.text
    assert "The target's logits are NaN after" in response.text


@pytest.mark.parametrize("temperature", [0, 1e-4])
def test_in_decode(
    server: Server,
    plain: Server,
    prompts: list[str],
    plain_answers: list[list[int]],
    poison: int,
    temperature: float,
) -> None:
    """Greedy and drawn: who writes the token fails at the next, the others answer as ever."""

    def ask(prompt: str):
        return server.post("/generate", generate_body(prompt, temperature=temperature))

    with ThreadPoolExecutor(8) as pool:
        responses = list(pool.map(ask, prompts[:ASKED]))
    failed = [poison in ids[:-1] for ids in plain_answers]
    assert 4 < sum(failed) < ASKED - 4
    for prompt, response, fails in zip(prompts, responses, failed, strict=False):
        if fails:
            assert_failed(response)
        else:
            assert_same(response.json(), plain.reference(prompt))
            assert_speculated(response.json())
    server.check_idle()


def test_in_last_rows(
    server: Server, prompts: list[str], plain_answers: list[list[int]], poison: int
) -> None:
    """Rows beyond a request's limit share a slot, also those of one that fails beside the others.

    Everybody's limit lies inside a block, those of failing requests just behind the token.
    """
    failing = [
        (ids.index(poison) + 2, prompt, ids)
        for prompt, ids in zip(prompts, plain_answers, strict=False)
        if poison in ids[:-3]
    ]
    others = [
        (prompt, ids)
        for prompt, ids in zip(prompts, plain_answers, strict=False)
        if poison not in ids
    ]
    for limit, prompt, _ in failing[:6]:
        bodies = [generate_body(prompt, max_new_tokens=limit)]
        bodies += [generate_body(other, max_new_tokens=limit) for other, _ in others[:5]]
        with ThreadPoolExecutor(len(bodies)) as pool:
            failed, *answers = pool.map(lambda body: server.post("/generate", body), bodies)
        assert_failed(failed)
        for answer, (_, ids) in zip(answers, others, strict=False):
            assert answer.status_code == 200, answer.text
            assert answer.json()["output_ids"] == ids[:limit]
    server.check_idle()


def test_in_prefill(
    server: Server, plain: Server, prompts: list[str], tokenizer, poison: int
) -> None:
    """The first token already; a prefix that others share is not kept with it."""
    ids = [token for token in tokenizer.encode(prompts[30]) if token != poison]
    for limit in (1, 50):
        body = generate_body([*ids, poison], max_new_tokens=limit)
        assert_failed(server.post("/generate", body))
    *_, last = server.stream([*ids, poison])
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert_same(server.generate(ids, max_new_tokens=20), plain.generate(ids, max_new_tokens=20))
    server.check_idle()


def test_openai(server: Server, poison: int) -> None:
    body = {"model": "default", "prompt": [5, poison, 7], "max_tokens": 5, "temperature": 0}
    assert_failed(server.post("/v1/completions", body))
    server.check_idle()
