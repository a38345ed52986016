"""A pool too small for what is asked: requests are retracted, run again, and answer the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.checks import accept_length, assert_same
from tests.server.harness import CHOSEN_WORKERS, Server, running

# Optimistic admission into a pool that holds about three of the requests below.
POOL = ("--max-total-tokens", "640", "--schedule-conservativeness", "0.05")
BLOCK = ("--speculative-dflash-block-size", "8")
ANSWER = 120


@pytest.fixture(
    scope="module", params=[(worker, page) for worker in CHOSEN_WORKERS for page in ("1", "16")]
)
def tight(request: pytest.FixtureRequest, logs: Path) -> Iterator[Server]:
    worker, page = request.param
    arguments = ("--page-size", page, *POOL, *BLOCK, "--reasoning-parser", "qwen3")
    with running(logs / f"tight-{worker}-{page}.log", *arguments, worker=worker) as server:
        yield server


def test_retraction(tight: Server, plain: Server, prompts: list[str]) -> None:
    sampling = {"max_new_tokens": ANSWER, "ignore_eos": True}
    # One batch: on a busy machine, requests of their own might come too late to meet.
    body = {"text": prompts[:12], "sampling_params": {"temperature": 0} | sampling}
    answers = tight.post("/generate", body).json()
    assert sum(answer["meta_info"]["total_retractions"] for answer in answers) > 0
    for prompt, answer in zip(prompts[:12], answers, strict=True):
        assert_same(answer, plain.reference(prompt, **sampling), plain, prompt)
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
    """The longest request that plain decoding admits into such a pool; its last blocks are cut."""
    prompt_tokens = tight.generate(prompts[0], max_new_tokens=1)["meta_info"]["prompt_tokens"]
    sampling = {"max_new_tokens": 640 - 17 - prompt_tokens, "ignore_eos": True}
    answer = tight.generate(prompts[0], **sampling)
    assert_same(answer, plain.reference(prompts[0], **sampling), plain, prompts[0])
    tight.check_idle()
