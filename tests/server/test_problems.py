"""Held-out problems, 24 or 200: the same answers as plain decoding, in far fewer steps, and right."""

from __future__ import annotations

import pytest

from tests.server.checks import accept_length, assert_same
from tests.server.harness import DEVICE, Server

PROBLEMS = [24, pytest.param(200, marks=pytest.mark.long)]
MEASURED_ACCURACY, MARGIN = 0.999, 0.04  # the model card's figure


def final_number(text: str) -> str:
    """What follows #### in an answer of GSM8K's format."""
    return text.rpartition("####")[2].strip()


@pytest.fixture(params=PROBLEMS)
def expected(request: pytest.FixtureRequest, plain: Server, prompts: list[str]) -> list[dict]:
    return plain.references(prompts[: request.param])


def check_answers(answers: list[dict], expected: list[dict], problems: list[dict]) -> None:
    for answer, reference in zip(answers, expected, strict=True):
        assert_same(answer, reference)
        check_counts(answer["meta_info"])
    assert 6 <= accept_length(answers) <= 10
    right = [
        final_number(answer["text"]) == final_number(problem["answer"])
        for answer, problem in zip(answers, problems, strict=False)
    ]
    assert sum(right) / len(right) >= MEASURED_ACCURACY - MARGIN


def check_counts(meta: dict) -> None:
    """The speculative fields of an answer follow from its tokens and rounds."""
    completion, rounds = meta["completion_tokens"], meta["spec_verify_ct"]
    accepted = completion - 1 - rounds  # the prefill and every round add one that was not drafted
    histogram = meta["spec_accept_histogram"]
    assert sum(histogram) == rounds
    assert sum(count * drafted for drafted, count in enumerate(histogram)) == accepted
    assert len(histogram) <= 16
    assert meta["spec_accept_token_num"] == accepted
    assert meta["spec_draft_token_num"] == 15 * rounds
    assert meta["spec_accept_rate"] == pytest.approx(accepted / (15 * rounds))
    assert meta["spec_accept_length"] == pytest.approx(completion / rounds)


@pytest.mark.quick
def test_one_answer(dflash: Server, prompts: list[str], problems: list[dict]) -> None:
    """What anybody would look at first."""
    answer = dflash.generate(prompts[0])
    assert final_number(answer["text"]) == final_number(problems[0]["answer"])
    assert accept_length([answer]) > 4
    check_counts(answer["meta_info"])


def test_attention_of_blocks_is_told(dflash: Server) -> None:
    """In graphs by its name; without a GPU there are none."""
    attention = dflash.info()["dflash_attention"]
    assert set(attention) == {"target", "drafter"}
    names = {"backend"} if DEVICE == "cpu" else {"fa3", "triton"}
    assert set(attention.values()) <= names


def test_one_at_a_time(
    dflash: Server, prompts: list[str], problems: list[dict], expected: list[dict]
) -> None:
    answers = dflash.generate_all(prompts[: len(expected)], concurrency=1)
    check_answers(answers, expected, problems)
    # Both gauges move every 40 rounds, so they lack the last rounds of all.
    assert dflash.info()["avg_spec_accept_length"] == pytest.approx(accept_length(answers), rel=0.1)
    assert 4 <= dflash.metric("spec_accept_length") <= 12


def test_eight_at_a_time(
    either: Server, prompts: list[str], problems: list[dict], expected: list[dict]
) -> None:
    answers = either.generate_all(prompts[: len(expected)], concurrency=8)
    check_answers(answers, expected, problems)
