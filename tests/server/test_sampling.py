"""Draws without seeds: what is accepted, how often, and greedy neighbours that stay greedy."""

from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple

import pytest
from scipy.stats import binomtest

from tests.server.checks import accept_length, assert_same
from tests.server.harness import Server, generate_body, mostly_on

HOT = {"temperature": 3.0}
DRAWS = 256
UNLIKELY = 1e-3  # fresh draws are looked at before it is called a fault: a false alarm in a million


def test_mixed_batch(dflash: Server, plain: Server, prompts: list[str]) -> None:
    """Greedy and sampled requests side by side, with and without log-probabilities."""
    sampling = [
        {"temperature": 0 if index % 2 else 2.0, "max_new_tokens": 60} for index in range(8)
    ]
    body = {"text": prompts[60:68], "sampling_params": sampling}
    answers = dflash.post("/generate", body | {"return_logprob": [True] * 4 + [False] * 4}).json()
    for index in (1, 3, 5, 7):
        expected = plain.reference(prompts[60 + index], max_new_tokens=60)
        assert_same(answers[index], expected)
        assert ("output_token_logprobs" in answers[index]["meta_info"]) == (index < 4)
    assert accept_length(answers) > 2


def test_accept_length_when_sampling(dflash: Server, prompts: list[str]) -> None:
    """At the temperature that people use most drafts of a confident target are still accepted."""
    answers = dflash.generate_all(prompts[70:90], concurrency=8, temperature=0.7)
    assert accept_length(answers) > 5


@mostly_on(0)
@pytest.mark.parametrize("asked", [3, pytest.param(6, marks=pytest.mark.long)])
def test_acceptance_is_the_target_probability(
    dflash: Server, plain: Server, prompts: list[str], tokenizer, asked: int
) -> None:
    """A drafted token is accepted as often as the target draws it.

    After a fixed context the block is the same in every run, so the first draft is accepted with one
    probability, which plain decoding reports.
    """
    tested = 0
    for prompt in prompts[100 : 100 + asked]:
        ids = tokenizer.encode(prompt)
        seen = _acceptance(dflash, plain, ids)
        if seen is None:
            continue
        if _p_value(seen) < UNLIKELY:  # chance does not come twice, a fault does
            again = _acceptance(dflash, plain, ids)
            assert again and _p_value(again) > UNLIKELY, (seen, again)
        tested += 0.02 < seen.probability < 0.98
    assert tested > 0, "no prompt left anything to chance"


class _Acceptance(NamedTuple):
    """How often a draft was accepted, and how likely plain decoding draws it."""

    accepted: int
    runs: int
    probability: float


def _acceptance(dflash: Server, plain: Server, ids: list[int]) -> _Acceptance | None:
    """Of the first draft after a prompt and its likeliest first token; None where too few runs tell."""
    body = generate_body(ids, **HOT, max_new_tokens=3, n=DRAWS, ignore_eos=True)
    runs = dflash.post("/generate", body).json()
    first = Counter(run["output_ids"][0] for run in runs).most_common(1)[0][0]
    runs = [run for run in runs if run["output_ids"][0] == first]
    # Three tokens: the prefill's, and either a round of two or two rounds of one.
    accepted = [run for run in runs if run["meta_info"]["spec_verify_ct"] == 1]
    drafted = {run["output_ids"][1] for run in accepted}
    assert len(drafted) <= 1, "the same context gave different drafts"
    if not drafted or len(runs) < 60:
        return None
    (draft,) = drafted
    assert sum(run["output_ids"][1] == draft for run in runs) == len(accepted)
    return _Acceptance(len(accepted), len(runs), _probability(plain, [*ids, first], draft))


def _p_value(seen: _Acceptance) -> float:
    return binomtest(*seen).pvalue


def _probability(plain: Server, ids: list[int], token: int) -> float:
    """With which plain decoding draws `token` after `ids`."""
    body = generate_body(ids, **HOT, max_new_tokens=1)
    body |= {"return_logprob": True, "token_ids_logprob": [token]}
    answer = plain.post("/generate", body).json()
    return math.exp(answer["meta_info"]["output_token_ids_logprobs"][0][0][0])


@pytest.mark.parametrize("sampling", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}], ids=str)
def test_settings_that_leave_one_token(
    dflash: Server, plain: Server, prompts: list[str], sampling: dict
) -> None:
    """They draw the likeliest token, however hot: as greedy decoding."""
    for prompt in prompts[106:110]:
        answer = dflash.generate(prompt, **HOT, **sampling, max_new_tokens=60)
        assert_same(answer, plain.reference(prompt, max_new_tokens=60))
