"""Every kind of request: the answer of plain decoding, or a sentence; and the table that says so."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.server.checks import assert_speculated
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
    assert_as_plain(feature, got, expected, plain, asked)
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
    feature: Feature, got: list[Any], expected: list[Any], plain: Server, asked: list[Prompt]
) -> None:
    """What plain decoding answered; on a GPU, where that depends on the batch, it may be what it answers alone."""
    for mine, its, prompt in zip(got, expected, asked, strict=False):
        assert not isinstance(its, str), its
        try:
            assert_equal(comparable(mine), comparable(its), feature.name)
        except AssertionError:
            if DEVICE == "cpu":
                raise
            assert_equal(comparable(mine), comparable(feature.ask(plain, prompt)), feature.name)


def assert_equal(mine: Any, plain: Any, path: str = "answer") -> None:
    """Equal, but numbers that are not whole only within the tolerance."""
    if isinstance(plain, dict):
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


def table() -> Iterator[str]:
    yield "# What is served\n"
    yield "Made by `tests/server/test_features.py`, which sends every kind of request to real"
    yield "servers: plain decoding (`--disable-overlap-schedule`) and both workers of DFLASH. *Equal*"
    yield "means the same tokens, text, end and counts for every prompt, and log-probabilities and"
    yield f"hidden states within {TOLERANCE:g}. Draws without a seed: `losslessness.md`.\n"
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
