"""The overlapped worker where it looks at results first, as on any user's CPU, or now and then, and has several rounds
in a step."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.server.checks import accept_length, assert_same, counted
from tests.server.harness import RANKS, Server, needs_gpus, running
from tests.server.test_pool import CARELESS

CHUNKS, PAGES = ("--chunked-prefill-size", "32"), ("--page-size", "16")
GRAMMAR = {"regex": r"([^#]|#{4}|\n){900,}"}


@pytest.mark.parametrize(
    ("order", "rounds", "arguments"),
    [
        ("first", "1", ()),
        ("first", "1", CHUNKS),
        ("random", "1", CHUNKS),
        ("first", "2", ()),
        ("ahead", "4", PAGES),
        ("random", "random", ()),
    ],
    ids=["first", "first-chunks", "random-chunks", "two", "four", "random"],
)
def test_answers_are_the_same(
    order: str,
    rounds: str,
    arguments: tuple[str, ...],
    logs: Path,
    plain: Server,
    prompts: list[str],
) -> None:
    """Plain decoding's, also with grammars and in a pool too small. None of its rounds is in vain if none is ahead."""
    name = f"order-{order}-{rounds}-{len(arguments)}"
    # Steps of four rounds have many slots set aside.
    slots, tokens = ("900", 100) if rounds in ("1", "2") else ("3000", 200)
    arguments = (*arguments, "--max-total-tokens", slots, "--enable-metrics")
    variables = CARELESS | {"SGLANG_DFLASH_ORDER": order, "SGLANG_DFLASH_STEP_ROUNDS": rounds}
    log = logs / f"{name}.log"
    with running(
        log, *arguments, "--reasoning-parser", "qwen3", worker="v2", **variables
    ) as server:
        answers = server.generate_all(prompts[:24], concurrency=8)
        for prompt, answer in zip(prompts, answers, strict=False):
            assert_same(answer, plain.reference(prompt), plain, prompt)
        assert accept_length(answers) > 6
        counts = counted(server)
        assert counts["rounds_total", ""] > 100
        numbers = {n for n in range(1, 5) if counts["steps_total", str(n)]}
        # Beside prompts and where slots lack steps have one round.
        most = 4 if rounds == "random" else int(rounds)
        assert {1, most} <= numbers and max(numbers) == most
        assert (counts["rounds_in_vain_total", ""] > 0) == ((order, rounds) != ("first", "1"))
        asked = {"max_new_tokens": tokens, "ignore_eos": True}
        for sampling in (asked, asked | GRAMMAR):
            body = {"text": prompts[:20], "sampling_params": {"temperature": 0} | sampling}
            answers = server.post("/generate", body).json()
            assert sum(answer["meta_info"]["total_retractions"] for answer in answers) > 0
            expected = plain.references(prompts[:20], **sampling)
            for prompt, answer, reference in zip(prompts, answers, expected, strict=False):
                assert_same(answer, reference, plain, prompt)
        server.check_idle()


@needs_gpus(2)
def test_ranks_agree(logs: Path, plain: Server, prompts: list[str]) -> None:
    """On what is accepted in each round, however many a step has and whenever results are looked at."""
    log = logs / "order-ranks.log"
    arguments = ("--tp-size", "2", "--enable-metrics", "--reasoning-parser", "qwen3")
    variables = {
        "SGLANG_DFLASH_WATCH": "20",
        "SGLANG_DFLASH_ORDER": "random",
        "SGLANG_DFLASH_STEP_ROUNDS": "random",
    }
    with running(log, *arguments, worker="v2", **variables | RANKS) as server:
        answers = server.generate_all(prompts[:16], concurrency=4)
        for prompt, answer in zip(prompts, answers, strict=False):
            assert_same(answer, plain.reference(prompt), plain, prompt)
        assert accept_length(answers) > 6
        counts = counted(server)
        assert all(counts["steps_total", str(rounds)] for rounds in range(1, 5))
        server.check_idle()
    seen = re.findall(r"DFLASH watch: rounds=(\d+) disagreements=(\d+)", log.read_text())
    rounds, disagreements = map(int, seen[-1])
    assert rounds >= 60 and disagreements == 0
