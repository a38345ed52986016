"""The load on a server, and what its answers say about rounds."""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field

import numpy as np
import requests

REQUEST_SECONDS = 300


class NoSteadyState(Exception):
    """The requests did not all decode at the same time, so there is nothing to measure."""


@dataclass
class Progress:
    """How one answer grew.

    Attributes:
        seconds: arrival of each chunk, since the requests were sent.
        tokens: tokens of the answer up to that chunk; the first comes from the prefill.
        verify_steps: rounds that the whole answer took; 0 without speculation.
    """

    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    verify_steps: int = 0


@dataclass(frozen=True)
class Sample:
    """Rates in the steady state, the time in which every request decodes.

    Attributes:
        rounds_per_s: verify steps summed over requests; without speculation, tokens.
        tok_per_s: committed tokens summed over requests.
        round_ms: median time of a round.
        accept_length: tokens that a round commits, bonus token included.
        steady_s: length of the steady state.
        total_s: from sending the requests to the last token.
    """

    rounds_per_s: float
    tok_per_s: float
    round_ms: float
    accept_length: float
    steady_s: float
    total_s: float

    def to_json(self) -> dict[str, float]:
        return {name: round(value, 4) for name, value in asdict(self).items()}


def random_prompts(count: int, tokens: int, vocab_size: int, seed: str) -> list[list[int]]:
    """Token ids; different seeds share no prefix, so that no prompt is found in a cache."""
    generator = random.Random(seed)
    # The ids at both ends of a vocabulary are special tokens.
    return [
        [generator.randrange(16, vocab_size * 9 // 10) for _ in range(tokens)] for _ in range(count)
    ]


def generate(
    url: str,
    prompts: Sequence[list[int]],
    new_tokens: int,
    when_steady: Callable[[], None] = lambda: None,
) -> list[Progress]:
    """Sends all prompts at once and follows their greedy answers.

    Args:
        when_steady: called in a thread of its own as soon as every answer has begun; what it
            raises is raised here.
    """
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    body = {"input_ids": list(prompts), "sampling_params": sampling, "stream": True}
    answers = [Progress() for _ in prompts]
    waiting = set(range(len(prompts)))
    aside: Future | None = None
    post = {"json": body, "stream": True, "timeout": REQUEST_SECONDS}
    started = time.perf_counter()
    with ThreadPoolExecutor(1) as pool, requests.post(f"{url}/generate", **post) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith(b"data: ") or line == b"data: [DONE]":
                continue
            seconds = time.perf_counter() - started
            chunk = json.loads(line.removeprefix(b"data: "))
            if "error" in chunk:
                raise RuntimeError(f"the server answered: {chunk['error']}")
            _note(answers[chunk.get("index", 0)], chunk["meta_info"], seconds)
            if waiting:
                waiting.discard(chunk.get("index", 0))
                if not waiting:
                    aside = pool.submit(when_steady)
    if aside is None:
        raise RuntimeError("the server ended the stream before every answer had begun")
    aside.result()
    return answers


def _note(answer: Progress, meta: dict, seconds: float) -> None:
    if not answer.tokens or meta["completion_tokens"] > answer.tokens[-1]:
        answer.seconds.append(seconds)
        answer.tokens.append(meta["completion_tokens"])
    answer.verify_steps = max(answer.verify_steps, meta.get("spec_verify_ct") or 0)


def steady_state(answers: Sequence[Progress]) -> Sample:
    """Rates between the first token of the last answer and the end of the first that ends.

    A chunk says how many tokens an answer has, its end how many rounds it took: rounds within the
    steady state are the tokens in it over the tokens that a round committed on average.

    Raises:
        NoSteadyState: some answer ended before another began.
    """
    begin = max(answer.seconds[0] for answer in answers)
    end = min(answer.seconds[-1] for answer in answers)
    if end <= begin:
        raise NoSteadyState(
            "an answer ended before another began: ask for more new tokens, or for fewer requests, if "
            "the server has no room for so many at once"
        )
    decoded = sum(answer.tokens[-1] - 1 for answer in answers)
    verify_steps = sum(answer.verify_steps for answer in answers)
    accept_length = decoded / verify_steps if verify_steps else 1.0
    tokens = sum(
        float(np.diff(np.interp([begin, end], answer.seconds, answer.tokens))[0])
        for answer in answers
    )
    tok_per_s = tokens / (end - begin)
    return Sample(
        rounds_per_s=tok_per_s / accept_length,
        tok_per_s=tok_per_s,
        round_ms=statistics.median(_round_times(answers, begin, end)) * accept_length * 1e3,
        accept_length=accept_length,
        steady_s=end - begin,
        total_s=max(answer.seconds[-1] for answer in answers),
    )


def _round_times(answers: Sequence[Progress], begin: float, end: float) -> list[float]:
    """Seconds a token from chunk to chunk, for chunks that touch the steady state."""
    times = []
    for answer in answers:
        seconds, tokens = np.array(answer.seconds), np.array(answer.tokens)
        inside = (seconds[1:] > begin) & (seconds[:-1] < end)
        times.extend((np.diff(seconds) / np.diff(tokens))[inside].tolist())
    return times
