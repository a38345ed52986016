"""A pool too small for what is asked: requests are retracted, run again, and answer the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.checks import accept_length, assert_same
from tests.server.harness import CHOSEN_WORKERS, Server, prompts_of, running

# A pool of four blocks a request, which holds about three of those below.
CONCURRENCY, WIDTH = 16, 8
SLOTS = 4 * WIDTH * CONCURRENCY
POOL = ("--max-total-tokens", str(SLOTS))
# SGLang admits a request if the pool has room for all that it may write, and for what the running ones
# still may; with these, for one block of the new one.
CARELESS = {
    "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": str(WIDTH),
    "SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR": "0",
    "SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS": "1",
}
# Each size once; the larger with overlap, whose reservations end inside a page.
PAGES = {"v1": "1", "v2": "16"}
BLOCK = ("--speculative-dflash-block-size", str(WIDTH))
ANSWER, REQUESTS = 120, prompts_of(20, most=32)
RETRACTIONS = REQUESTS // 2
PENALTIES = {"frequency_penalty": 0.9, "presence_penalty": 0.4, "min_new_tokens": 70}
GRAMMAR = {"regex": r"([^#]|#{4}|\n){900,}"}  # longer than the answer


@pytest.fixture(scope="module", params=CHOSEN_WORKERS)
def tight(request: pytest.FixtureRequest, logs: Path) -> Iterator[Server]:
    worker = request.param
    arguments = ("--page-size", PAGES[worker], *POOL, *BLOCK, "--reasoning-parser", "qwen3")
    log = logs / f"tight-{worker}.log"
    with running(log, *arguments, worker=worker, **CARELESS) as server:
        yield server


@pytest.mark.parametrize("kind", [{}, PENALTIES, GRAMMAR], ids=["greedy", "penalties", "grammar"])
def test_retraction(kind: dict, tight: Server, plain: Server, prompts: list[str]) -> None:
    """Requests that are thrown out of the pool again and again answer as in a roomy one."""
    sampling = {"max_new_tokens": ANSWER, "ignore_eos": True} | kind
    # One batch: on a busy machine, requests of their own might come too late to meet.
    body = {"text": prompts[:REQUESTS], "sampling_params": {"temperature": 0} | sampling}
    answers = tight.post("/generate", body).json()
    retractions = sum(answer["meta_info"]["total_retractions"] for answer in answers)
    print(f"{retractions} retractions")
    assert retractions >= RETRACTIONS
    expected = plain.references(prompts[:REQUESTS], **sampling)
    for prompt, answer, reference in zip(prompts[:REQUESTS], answers, expected, strict=True):
        assert_same(answer, reference, plain, prompt)
    tight.check_idle()


def test_smaller_block(tight: Server, plain: Server, prompts: list[str]) -> None:
    """A block of 8 from a drafter trained for 16 commits at most 8 tokens a round."""
    answers = tight.generate_all(prompts[:10], concurrency=2)
    for prompt, answer in zip(prompts[:10], answers, strict=True):
        assert_same(answer, plain.reference(prompt))
        assert len(answer["meta_info"]["spec_accept_histogram"]) <= 8
    assert 4 < accept_length(answers) <= 8
    tight.check_idle()


def test_one_request_fills_the_pool(tight: Server, plain: Server, prompts: list[str]) -> None:
    """The longest request that such a pool can hold; its last blocks are cut."""
    prompt_tokens = tight.generate(prompts[0], max_new_tokens=1)["meta_info"]["prompt_tokens"]
    limit = tight.get("/v1/models").json()["data"][0]["max_model_len"]
    assert SLOTS - 16 < limit <= SLOTS
    sampling = {"max_new_tokens": limit - 2 - prompt_tokens, "ignore_eos": True}
    answer = tight.generate(prompts[0], **sampling)
    assert_same(answer, plain.reference(prompts[0], **sampling), plain, prompts[0])
    tight.check_idle()


def test_limit_of_a_request(tight: Server, plain: Server, prompts: list[str]) -> None:
    """What the pool cannot hold is refused where it arrives, and the limit is advertised."""
    limit = tight.get("/v1/models").json()["data"][0]["max_model_len"]
    assert tight.get("/server_info").json()["max_model_len"] == limit
    assert plain.get("/v1/models").json()["data"][0]["max_model_len"] > limit
    too_many = {"prompt": [5] * 20, "max_tokens": limit, "model": "default"}
    too_long = {"prompt": [5] * (limit + 1), "max_tokens": 4, "model": "default"}
    for body in (too_many, too_long):
        response = tight.post("/v1/completions", body)
        assert response.status_code == 400 and f"{limit} tokens" in response.text, response.text
    unlimited = tight.generate([5] * 20, max_new_tokens=None, ignore_eos=True)
    assert unlimited["meta_info"]["completion_tokens"] == limit - 2 - 20
    tight.check_idle()
