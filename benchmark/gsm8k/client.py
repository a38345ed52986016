"""Asks a server and notes when what came."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np

from benchmark.gsm8k.errors import CannotSweep


@dataclass
class Answer:
    """How a question was answered.

    Attributes:
        arrivals: (seconds since it was sent, tokens so far) of each chunk.
        meta: SGLang's `meta_info` of the whole answer.
    """

    text: str = ""
    meta: dict[str, Any] = field(default_factory=dict)
    arrivals: list[tuple[float, int]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return self.meta["completion_tokens"]

    @property
    def verify_steps(self) -> int:
        return self.meta.get("spec_verify_ct") or 0

    def first_token_ms(self) -> float:
        return self.arrivals[0][0] * 1e3

    def inter_token_ms(self) -> list[float]:
        """Time of each token after the first chunk; those of one chunk share the wait for it."""
        times = []
        for (before, had), (after, has) in zip(self.arrivals, self.arrivals[1:], strict=False):
            if has > had:
                times += [(after - before) * 1e3 / (has - had)] * (has - had)
        return times


@dataclass(frozen=True)
class Load:
    """How questions are asked.

    Attributes:
        url: of the server.
        sampling: SGLang's `sampling_params`.
        concurrency: requests under way at once.
        batch: one POST for so many questions as `concurrency`; nothing is known of single tokens then.
        seconds: in which all must be answered.
    """

    url: str
    sampling: dict[str, Any]
    concurrency: int
    batch: bool
    seconds: float


def ask(
    load: Load, prompts: Sequence[str], tick: Callable[[int], None] = lambda n: None
) -> tuple[list[Answer], float]:
    """All answers in order, and the seconds from the first question to the last answer.

    Raises:
        CannotSweep: the server refused, broke off, or took too long.
    """
    try:
        return asyncio.run(asyncio.wait_for(_ask_all(load, prompts, tick), load.seconds))
    except TimeoutError:
        raise CannotSweep(
            f"{len(prompts)} questions were not answered in {load.seconds:.0f} s: raise --timeout-s."
        ) from None
    except aiohttp.ClientError as error:
        raise CannotSweep(f"the server at {load.url} broke off: {error!r}.") from None


async def _ask_all(
    load: Load, prompts: Sequence[str], tick: Callable[[int], None]
) -> tuple[list[Answer], float]:
    size = load.concurrency if load.batch else 1
    groups = [prompts[i : i + size] for i in range(0, len(prompts), size)]
    gate = asyncio.Semaphore(1 if load.batch else load.concurrency)
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        timeout=timeout, connector=connector, read_bufsize=1 << 20
    ) as session:

        async def one(group: Sequence[str]) -> list[Answer]:
            async with gate:
                answers = await (_batch if load.batch else _stream)(session, load, group)
            tick(len(answers))
            return answers

        begin = time.perf_counter()
        answered = await asyncio.gather(*map(one, groups))
        seconds = time.perf_counter() - begin
    return [answer for group in answered for answer in group], seconds


async def _stream(
    session: aiohttp.ClientSession, load: Load, prompts: Sequence[str]
) -> list[Answer]:
    body = {"text": prompts[0], "sampling_params": load.sampling, "stream": True}
    answer, begin = Answer(), time.perf_counter()
    async with session.post(f"{load.url}/generate", json=body) as response:
        await _check(response)
        async for chunk in _events(response):
            if "error" in chunk:
                raise CannotSweep(f"the server answered: {chunk['error']}.")
            answer.text, answer.meta = chunk["text"], chunk["meta_info"]
            tokens = answer.meta["completion_tokens"]
            answer.arrivals.append((time.perf_counter() - begin, tokens))
    _check_whole(answer)
    return [answer]


async def _batch(
    session: aiohttp.ClientSession, load: Load, prompts: Sequence[str]
) -> list[Answer]:
    body = {"text": list(prompts), "sampling_params": load.sampling}
    async with session.post(f"{load.url}/generate", json=body) as response:
        await _check(response)
        answers = [Answer(each["text"], each["meta_info"]) for each in await response.json()]
    for answer in answers:
        _check_whole(answer)
    return answers


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in response.content:
        if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
            yield json.loads(line[6:])


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status != 200:
        text = await response.text()
        raise CannotSweep(f"the server answered with status {response.status}: {text[:300]}.")


def _check_whole(answer: Answer) -> None:
    reason = answer.meta.get("finish_reason") or {}
    if reason.get("type") not in ("stop", "length"):
        raise CannotSweep(f"an answer ended with {reason}, not with a stop or at its length.")


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Median and 99th percentile; None of nothing."""
    if not len(values):
        return None
    return {f"p{p}": round(float(np.percentile(values, p)), 3) for p in (50, 99)}


def accept_histogram(answers: Sequence[Answer]) -> list[int]:
    """How many verify steps accepted 0, 1, 2, … drafted tokens, over all answers."""
    counts: Counter[int] = Counter()
    for answer in answers:
        counts.update(dict(enumerate(answer.meta.get("spec_accept_histogram") or [])))
    return [counts[i] for i in range(max(counts, default=-1) + 1)]
