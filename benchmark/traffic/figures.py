"""From answers to figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmark.percentiles import percentiles
from benchmark.traffic.answers import Answer
from benchmark.traffic.clients import Heard
from benchmark.traffic.counters import Counters

LEAST_STEADY = 0.25  # of the whole time; a shorter window says nothing
SAMPLED = "----"  # in the place of the digest of an answer that was not greedy


@dataclass(frozen=True)
class Goal:
    """What a request must keep to be within the goal.

    Attributes:
        ttft_ms: time to the first token.
        tpot_ms: time of a token after that, on average.
    """

    ttft_ms: float
    tpot_ms: float

    def met(self, answer: Answer) -> bool:
        return answer.ttft_ms() <= self.ttft_ms and (answer.tpot_ms() or 0) <= self.tpot_ms


def figures(heard: Heard, goal: Goal, counted: Counters, clients: int | None) -> dict[str, Any]:
    """Figures of one cell.

    Args:
        counted: what the server counted meanwhile.
        clients: of a closed loop; None for an open one.
    """
    answers = heard.answers
    begin = min(answer.began for answer in answers)
    seconds = max(answer.ended for answer in answers) - begin
    tokens = sum(answer.tokens for answer in answers)
    tpots = [ms for answer in answers if (ms := answer.tpot_ms()) is not None]
    steady = steady_state(answers, clients) if clients else None
    return {
        "seconds": seconds,
        "requests": len(answers),
        "prompt_tokens": sum(answer.prompt_tokens for answer in answers),
        "completion_tokens": tokens,
        "server_tokens": counted.tokens,
        "cut": sum(answer.finish == "length" for answer in answers),
        "output_tok_s": tokens / seconds,
        "requests_s": len(answers) / seconds,
        "steady_s": steady and steady[0],
        "steady_tok_s": steady and steady[1],
        "verify_steps": counted.steps,
        "accept_length": accept_length(tokens, len(answers), counted.steps),
        "launched_rounds": counted.launched,
        "verified_rows": counted.rows,
        "host_step_ms": dict(counted.host_step_ms) or None,
        "ttft_ms": percentiles([answer.ttft_ms() for answer in answers]),
        "tpot_ms": percentiles(tpots),
        "gap_ms": percentiles([ms for answer in answers for ms in answer.gaps_ms()]),
        "latency_ms": percentiles([(a.ended - a.began) * 1e3 for a in answers]),
        "within_goal": sum(map(goal.met, answers)) / len(answers),
        "client_busiest": heard.busiest,
        "client_processors": heard.processors,
        "late_ms": heard.late * 1e3,
    }


def accept_length(tokens: int, requests: int, steps: float | None) -> float | None:
    """Tokens that a verify step commits, bonus token included; None without speculation.

    The first token of an answer comes from the prefill. What a server drafted beyond the end of an
    answer does not count, whatever it counts itself.
    """
    return (tokens - requests) / steps if steps else None


def steady_state(answers: Sequence[Answer], clients: int) -> tuple[float, float] | None:
    """Seconds, and tokens/s, of the time in which every client had a request under way.

    It begins when as many answers have ended as there are clients, so that their first requests,
    which were sent together, are behind them; it ends when the last request was sent. None if there
    is no such time, or too little of it.
    """
    ends = sorted(answer.ended for answer in answers)
    began = [answer.began for answer in answers]
    if len(answers) <= clients:
        return None
    begin, end = ends[clients - 1], max(began)
    if end - begin < LEAST_STEADY * (ends[-1] - min(began)):
        return None
    window = np.array([begin, end])
    tokens = sum(float(np.diff(answer.tokens_until(window))[0]) for answer in answers)
    return end - begin, tokens / (end - begin)


def digests(answers: Sequence[Answer], pool: int, greedy: Sequence[bool]) -> str:
    """Four digits for each prompt that was asked, in the order of the pool.

    Args:
        pool: its size.
        greedy: of each prompt, whether it was answered greedily.
    """
    first: dict[int, str] = {}
    for answer in answers:
        first.setdefault(answer.index, answer.digest)
    asked = max(first) + 1
    return "".join(
        first[i] if i in first and greedy[i] else SAMPLED for i in range(min(asked, pool))
    )


def differing(mine: str, its: str) -> tuple[int, int]:
    """(how many answers differ, how many prompts both answered greedily)."""
    pairs = [(mine[i : i + 4], its[i : i + 4]) for i in range(0, min(len(mine), len(its)), 4)]
    both = [(a, b) for a, b in pairs if SAMPLED not in (a, b)]
    return sum(a != b for a, b in both), len(both)
