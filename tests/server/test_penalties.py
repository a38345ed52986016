"""Penalised requests among others: each is penalised for its own tokens, and for all of them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.server.checks import assert_same
from tests.server.harness import Server

AT_ONCE, REQUESTS = 16, 40  # more than the server has rows, so rows get a second owner
# As they follow one another. None has a repetition penalty and another: without overlap the release applies those in
# the order of a set, which differs from start to start.
KINDS: tuple[dict[str, Any], ...] = (
    {"frequency_penalty": 1.3, "n": 2},
    {},
    {"repetition_penalty": 1.4, "min_new_tokens": 50},
    {"presence_penalty": -0.8, "frequency_penalty": 0.4},
    {},
    {"min_new_tokens": 70},
)


def ask(server: Server, prompts: list[str]) -> list[list[dict]]:
    """Answers of each request, `n` of them."""

    def answers(number: int) -> list[dict]:
        kind = KINDS[number % len(KINDS)]
        # Some end early, so that others come in the middle of the rest.
        answer = server.generate(prompts[number], max_new_tokens=70 + 50 * (number % 2), **kind)
        return answer if isinstance(answer, list) else [answer]

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(answers, range(REQUESTS)))


def test_among_others(either: Server, plain: Server, prompts: list[str]) -> None:
    """Prompts in chunks and whole, copies of a request, and rows that another request had before."""
    expected = plain.answers.get("penalties among others", lambda: ask(plain, prompts[100:]))
    for mine, its in zip(ask(either, prompts[100:]), expected, strict=True):
        for answer, reference in zip(mine, its, strict=True):
            assert_same(answer, reference)
