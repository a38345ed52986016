"""The overlapped worker where it looks at results first, as on any user's CPU, or now and then."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.checks import accept_length, assert_same, counted
from tests.server.harness import Server, running
from tests.server.test_pool import CARELESS

GRAMMAR = {"regex": r"([^#]|#{4}|\n){900,}"}


@pytest.mark.parametrize(
    ("order", "chunks"),
    [
        ("first", ()),
        ("first", ("--chunked-prefill-size", "32")),
        ("random", ("--chunked-prefill-size", "32")),
    ],
    ids=["first", "first-chunks", "random-chunks"],
)
def test_answers_are_the_same(
    order: str, chunks: tuple[str, ...], logs: Path, plain: Server, prompts: list[str]
) -> None:
    """Plain decoding's, also with grammars and in a pool too small. None of its rounds is in vain if none is ahead."""
    arguments = (*chunks, "--max-total-tokens", "900", "--enable-metrics")
    variables = CARELESS | {"SGLANG_DFLASH_ORDER": order}
    log = logs / f"order-{order}-{len(chunks)}.log"
    with running(
        log, *arguments, "--reasoning-parser", "qwen3", worker="v2", **variables
    ) as server:
        answers = server.generate_all(prompts[:24], concurrency=8)
        for prompt, answer in zip(prompts, answers, strict=False):
            assert_same(answer, plain.reference(prompt), plain, prompt)
        assert accept_length(answers) > 6
        counts = counted(server)
        assert counts["rounds_total", ""] > 100
        assert (counts["rounds_in_vain_total", ""] > 0) == (order == "random")
        asked = {"max_new_tokens": 100, "ignore_eos": True}
        for sampling in (asked, asked | GRAMMAR):
            body = {"text": prompts[:20], "sampling_params": {"temperature": 0} | sampling}
            answers = server.post("/generate", body).json()
            assert sum(answer["meta_info"]["total_retractions"] for answer in answers) > 0
            expected = plain.references(prompts[:20], **sampling)
            for prompt, answer, reference in zip(prompts, answers, expected, strict=False):
                assert_same(answer, reference, plain, prompt)
        server.check_idle()
