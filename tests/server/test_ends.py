"""Where an answer ends: limits, stop tokens, stop strings; each may fall inside a round."""

from __future__ import annotations

import pytest

from tests.server.checks import assert_same, assert_speculated, check, inside_a_span, rounds
from tests.server.harness import Server, generate_body


def test_one_token(either: Server, plain: Server, prompts: list[str]) -> None:
    answer = either.generate(prompts[0], max_new_tokens=1)
    assert_same(answer, plain.reference(prompts[0], max_new_tokens=1))
    assert "spec_verify_ct" not in answer["meta_info"]  # the prefill's token was enough


def test_nothing_but_one_token(either: Server, plain: Server, prompts: list[str]) -> None:
    """With overlap each answer is followed by a round in vain, and no round counts for long."""
    for prompt in prompts[:90]:  # more than twice the rounds between two lines of the log
        answer = either.generate(prompt, max_new_tokens=1)
        assert_same(answer, plain.reference(prompt, max_new_tokens=1))
    check(either, plain, prompts[0], max_new_tokens=30)


@pytest.mark.parametrize("limit", [2, 15, 16, 17, 33])
def test_length_limit(either: Server, plain: Server, prompts: list[str], limit: int) -> None:
    for prompt in prompts[:3]:
        answer = either.generate(prompt, max_new_tokens=limit)
        assert_same(answer, plain.reference(prompt, max_new_tokens=limit))
        assert answer["meta_info"]["completion_tokens"] == limit
        assert answer["meta_info"]["spec_verify_ct"] > 0


def test_limit_inside_a_span(either: Server, plain: Server, prompts: list[str]) -> None:
    """The limit cuts a round whose later tokens were accepted too."""
    index = inside_a_span(either, prompts[1], plain.reference(prompts[1])["output_ids"])
    answer = check(either, plain, prompts[1], max_new_tokens=index + 1)
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": index + 1}


@pytest.mark.parametrize("extra", [0, 1, 2, 200])
def test_stop_token_and_limit(
    either: Server, plain: Server, prompts: list[str], extra: int
) -> None:
    """A stop token wins over a limit that lies later in the same round, and loses at the limit."""
    ids = plain.reference(prompts[2])["output_ids"]
    index = inside_a_span(either, prompts[2], ids)
    answer = check(
        either, plain, prompts[2], stop_token_ids=[ids[index]], max_new_tokens=index + 1 + extra
    )
    assert answer["output_ids"] == ids[: index + 1]
    assert answer["meta_info"]["finish_reason"]["type"] == ("stop" if extra else "length")


def test_stop_string(either: Server, plain: Server, prompts: list[str]) -> None:
    """A stop string that begins in one token and ends in another, within one round."""
    ids = plain.reference(prompts[3])["output_ids"]
    text = plain.reference(prompts[3])["text"]
    index = inside_a_span(either, prompts[3], ids, first=8)
    before = plain.reference(prompts[3], max_new_tokens=index)["text"]
    after = plain.reference(prompts[3], max_new_tokens=index + 2)["text"]
    stop = text[len(before) - 2 : len(after)]
    assert text.count(stop) == 1
    answer = check(either, plain, prompts[3], stop=[stop])
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert len(answer["output_ids"]) == index + 2
    assert rounds(either, prompts[3], index + 1) == rounds(either, prompts[3], index + 3)


def test_stop_regex(either: Server, plain: Server, prompts: list[str]) -> None:
    answer = check(either, plain, prompts[4], stop_regex=r">>\d+")
    assert answer["meta_info"]["finish_reason"]["type"] == "stop"
    assert len(answer["output_ids"]) < len(plain.reference(prompts[4])["output_ids"])


def test_past_the_end(either: Server, plain: Server, prompts: list[str]) -> None:
    answer = check(either, plain, prompts[5], ignore_eos=True, max_new_tokens=150)
    assert answer["meta_info"]["completion_tokens"] == 150


def test_two_limits_in_one_batch(either: Server, plain: Server, prompts: list[str]) -> None:
    """Requests that end in different rounds, inside and at the end of them, side by side."""
    limits = [3, 17, 40, 150, 1, 64]
    sampling = [{"temperature": 0, "max_new_tokens": n, "ignore_eos": True} for n in limits]
    body = {"text": prompts[6:12], "sampling_params": sampling}
    answers = either.post("/generate", body).json()
    for prompt, limit, answer in zip(prompts[6:12], limits, answers, strict=True):
        expected = plain.reference(prompt, max_new_tokens=limit, ignore_eos=True)
        assert_same(answer, expected)
        if limit > 16:
            assert_speculated(answer)


@pytest.mark.parametrize("asked", [{}, {"logprob_start_len": 0, "top_logprobs_num": 2}])
def test_no_new_tokens(either: Server, plain: Server, prompts: list[str], asked: dict) -> None:
    """With log-probabilities, `max_new_tokens` 0 asks for those of the prompt."""
    body = generate_body(prompts[0], max_new_tokens=0) | {"return_logprob": True} | asked
    either.post("/flush_cache")
    plain.post("/flush_cache")
    answer, expected = (server.post("/generate", body).json() for server in (either, plain))
    assert_same(answer, expected)
    for name, value in expected["meta_info"].items():
        if "logprobs" in name:
            assert answer["meta_info"][name] == value, name
