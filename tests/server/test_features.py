"""Every kind of request: the answer of plain decoding, or a sentence; and the table that says so."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from tests.server.checks import TIE, assert_speculated
from tests.server.features import GREEDY, REFUSED, Feature, Prompt, comparable
from tests.server.harness import CHOSEN_WORKERS, DEVICE, DTYPE, ROOT, Server, prompts_of

TABLE = ROOT / "docs" / "features.md"
# 200 prompts a feature take minutes; the figure is in the table's foreword when they were asked.
PROMPTS = prompts_of(5)
AT_ONCE = 12  # as many as the server takes together, but for some that come when others leave
# Of log-probabilities and hidden states of rows that ran together or alone.
TOLERANCE = {"float32": 1e-3, "float16": 0.02, "bfloat16": 0.15}[DTYPE]

OUTCOMES: dict[tuple[str, str], dict[str, str]] = {}


@pytest.fixture(scope="module")
def asked(prompts: list[str], problems: list[dict], tokenizer) -> list[Prompt]:
    """Held-out problems, those of the other tests last."""
    return [
        Prompt(problem["question"], text, tokenizer.encode(text))
        for problem, text in zip(problems, prompts, strict=True)
    ][200 : 200 + PROMPTS]


def answers(server: Server, feature: Feature, asked: list[Prompt]) -> list[Any]:
    """Several at a time; one at a time from an empty cache if the answer shows what was cached."""
    if feature.fresh:
        assert server.post("/flush_cache").status_code == 200
        return [feature.ask(server, prompt) for prompt in asked[:6]]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda prompt: feature.ask(server, prompt), asked))


@pytest.fixture
def expected(feature: Feature, plain: Server, asked: list[Prompt]) -> list[Any]:
    """What plain decoding answers, asked once."""
    key = json.dumps(["feature", feature.group, feature.name, len(asked)])
    return plain.answers.get(key, lambda: answers(plain, feature, asked))


@pytest.mark.parametrize("feature", GREEDY, ids=lambda f: f"{f.group}-{f.name}")
def test_equal(
    feature: Feature,
    dflash: Server,
    plain: Server,
    asked: list[Prompt],
    expected: list[Any],
    request,
) -> None:
    got = answers(dflash, feature, asked)
    assert_as_plain(feature, got, expected, dflash, plain, asked)
    if feature.speculates and feature.path == "/generate":
        last = got[0][-1] if isinstance(got[0], list) else got[0]
        assert_speculated(last)
    note(feature, request, "equal")


@pytest.mark.parametrize("feature", REFUSED, ids=lambda f: f"{f.group}-{f.name}")
def test_refused(feature: Feature, dflash: Server, asked: list[Prompt], request) -> None:
    text = feature.ask(dflash, asked[0])
    assert isinstance(text, str), "it was served"
    sentence = json.loads(text)["error"]["message"]
    assert sentence.endswith(".") and "not supported with DFLASH" in sentence
    note(feature, request, f"refused: {sentence}")


def note(feature: Feature, request: pytest.FixtureRequest, outcome: str) -> None:
    worker = request.node.callspec.params["dflash"]
    OUTCOMES.setdefault((feature.group, feature.name), {})[worker] = outcome


def assert_as_plain(
    feature: Feature,
    got: list[Any],
    expected: list[Any],
    server: Server,
    plain: Server,
    asked: list[Prompt],
) -> None:
    """What plain decoding answered; on a GPU, where that depends on the batch, it may be what it answers alone.

    Or a chat that leaves it where plain decoding finds both tokens about as likely.
    """
    for mine, its, prompt in zip(got, expected, asked, strict=False):
        assert not isinstance(its, str), its
        try:
            assert_equal(comparable(mine), comparable(its), feature.name)
        except AssertionError:
            if DEVICE == "cpu":
                raise
            if feature.group == "Chat" and not feature.sampling.get("stream"):
                assert_tied_chat(feature, server, plain, prompt)
            else:
                assert_equal(comparable(mine), comparable(feature.ask(plain, prompt)), feature.name)


def assert_tied_chat(feature: Feature, server: Server, plain: Server, prompt: Prompt) -> None:
    """Both servers, asked alone, write the same, or part at tokens that plain decoding finds about as likely."""
    told = replace(feature, sampling=feature.sampling | {"logprobs": True, "top_logprobs": 5})
    both = [told.ask(each, prompt)["choices"][0] for each in (server, plain)]
    mine, its = (choice["logprobs"]["content"] for choice in both)
    for left, right in zip(mine, its, strict=False):
        if left["token"] == right["token"]:
            continue
        chances = {each["token"]: each["logprob"] for each in right["top_logprobs"]}
        assert chances.get(left["token"], -math.inf) >= right["logprob"] - TIE, (left, right)
        return
    assert_equal(*map(comparable, both), feature.name)


def assert_equal(mine: Any, plain: Any, path: str = "answer") -> None:
    """Equal, but numbers that are not whole only within the tolerance, and on a GPU ranks of about the same."""
    if DEVICE != "cpu" and is_ranked(plain):
        assert_ranked(mine, plain, path)
    elif isinstance(plain, dict):
        assert mine.keys() == plain.keys(), path
        for name in plain:
            assert_equal(mine[name], plain[name], f"{path}.{name}")
    elif isinstance(plain, list):
        assert len(mine) == len(plain), path
        for index, (left, right) in enumerate(zip(mine, plain, strict=True)):
            assert_equal(left, right, f"{path}[{index}]")
    elif isinstance(plain, float):
        assert mine == pytest.approx(plain, abs=TOLERANCE, rel=TOLERANCE), path
    else:
        assert mine == plain, path


def is_ranked(value: Any) -> bool:
    """Whether it is the likeliest tokens at a place: lists of a log-probability, a token, and maybe its text."""
    if not isinstance(value, list) or not all(
        isinstance(each, list) and [type(part) for part in each[:2]] == [float, int]
        for each in value
    ):
        return False
    chances, tokens = [each[0] for each in value], [each[1] for each in value]
    return chances == sorted(chances, reverse=True) and len(set(tokens)) == len(tokens) > 1


def assert_ranked(mine: list, plain: list, path: str) -> None:
    """The same tokens as likely, but for those about as likely as the last, which one of both may have left out."""
    assert len(mine) == len(plain), path
    left, right = ({token: chance for chance, token, *_ in each} for each in (mine, plain))
    last = min(right.values())
    for token in left.keys() | right.keys():
        pair = left.get(token, last), right.get(token, last)
        assert pair[0] == pytest.approx(pair[1], abs=TOLERANCE, rel=TOLERANCE), f"{path}: {token}"


def table() -> Iterator[str]:
    yield "# What is served\n"
    yield "Made by `tests/server/test_features.py`, which sends every kind of request to real"
    yield "servers: plain decoding (`--disable-overlap-schedule`) and both workers of DFLASH. *Equal*"
    yield "means the same tokens, text, end and counts for every prompt, and log-probabilities and"
    yield f"hidden states within {TOLERANCE:g}. Draws without a seed: `losslessness.md`."
    yield "LoRA adapters, which need flags of their own: `lora.md`, `tests/server/test_lora.py`.\n"
    yield "With overlap, plain decoding of the release applies penalties a token late, and how late"
    yield "depends on the load. DFLASH applies them on time in both workers. A repetition penalty is"
    yield "applied after the others, as with overlap; without, the release may also apply it before them.\n"
    yield "| | request | " + " | ".join(CHOSEN_WORKERS) + " |"
    yield "|---|---|" + "---|" * len(CHOSEN_WORKERS)
    for feature in (*GREEDY, *REFUSED):
        outcome = OUTCOMES[feature.group, feature.name]
        cells = " | ".join(outcome[worker] for worker in CHOSEN_WORKERS)
        yield f"| {feature.group} | {feature.name} | {cells} |"


def test_table(dflash: Server, request: pytest.FixtureRequest) -> None:
    """The table in the docs is what was just seen of a worker; DFLASH_WRITE_DOCS=1 writes it."""
    worker = request.node.callspec.params["dflash"]
    seen = [outcomes for outcomes in OUTCOMES.values() if worker in outcomes]
    if len(seen) < len(GREEDY) + len(REFUSED) or len(CHOSEN_WORKERS) < 2:
        pytest.skip("only some of the features were run")
    told = documented()
    for feature, outcomes in OUTCOMES.items():
        for other in CHOSEN_WORKERS:
            outcomes.setdefault(other, told.get(feature, {}).get(other, "not asked"))
    text = "\n".join(table()) + "\n"
    if os.environ.get("DFLASH_WRITE_DOCS"):
        TABLE.write_text(text)
    assert TABLE.read_text() == text, "run this file with DFLASH_WRITE_DOCS=1"


def documented() -> dict[tuple[str, str], dict[str, str]]:
    """What the docs say of each worker; who sees one of them takes it over for the other."""
    rows = [line[2:-2].split(" | ") for line in TABLE.read_text().splitlines() if line[:2] == "| "]
    return {
        (group, name): dict(zip(CHOSEN_WORKERS, cells, strict=True))
        for group, name, *cells in rows[1:]
    }
