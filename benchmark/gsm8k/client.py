"""Asks a server, and notes when which tokens came."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import aiohttp
import orjson

from benchmark.errors import CellFailed

READ_BUFFER = 10 << 20  # bytes; a chunk holds the whole answer so far


@dataclass
class Answer:
    """How a question was answered.

    Attributes:
        arrivals: (seconds since it was sent, tokens so far) of each chunk with new tokens.
        meta: SGLang's `meta_info` of the whole answer.
        seconds: from sending the question to the end of the answer.
    """

    text: str = ""
    meta: dict[str, Any] = field(default_factory=dict)
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def tokens(self) -> int:
        return self.meta["completion_tokens"]

    @property
    def verify_steps(self) -> int:
        return self.meta.get("spec_verify_ct") or 0

    def note(self, chunk: dict[str, Any], seconds: float) -> None:
        self.text, self.meta, self.seconds = chunk["text"], chunk["meta_info"], seconds
        tokens = self.meta["completion_tokens"]
        if tokens > (self.arrivals[-1][1] if self.arrivals else 0):
            self.arrivals.append((seconds, tokens))

    def first_token_ms(self) -> float:
        return self.arrivals[0][0] * 1e3

    def inter_token_ms(self) -> list[float]:
        """A value for each token after the first chunk; tokens of one chunk share the wait for it."""
        times: list[float] = []
        for (before, had), (after, has) in pairwise(self.arrivals):
            times += [(after - before) * 1e3 / (has - had)] * (has - had)
        return times


@dataclass(frozen=True)
class Load:
    """How questions are asked.

    Attributes:
        url: of the server.
        sampling: SGLang's `sampling_params`.
        concurrency: questions under way at once.
        batch: so many questions in one POST, and the next when all of them are answered; otherwise
            a POST each, and a new one as soon as one is answered.
        seconds: in which all must be answered.
    """

    url: str
    sampling: dict[str, Any]
    concurrency: int
    batch: bool
    seconds: float


def ask(
    load: Load, prompts: Sequence[list[int]], tick: Callable[[int], Any] = lambda n: None
) -> tuple[list[Answer], float]:
    """All answers in order, and the seconds from the first question to the last answer.

    Args:
        prompts: token ids of each.
        tick: told how many more were answered.

    Raises:
        CellFailed: the server refused, broke off, or took too long.
    """
    try:
        return asyncio.run(asyncio.wait_for(_ask_all(load, prompts, tick), load.seconds))
    except TimeoutError:
        raise CellFailed(
            f"{len(prompts)} questions took more than {load.seconds:g} s: raise --timeout-s, or ask "
            "fewer."
        ) from None
    except aiohttp.ClientError as error:
        raise CellFailed(f"the server broke off ({type(error).__name__}): see its log.") from None


async def _ask_all(
    load: Load, prompts: Sequence[list[int]], tick: Callable[[int], Any]
) -> tuple[list[Answer], float]:
    size = load.concurrency if load.batch else 1
    gate = asyncio.Semaphore(1 if load.batch else load.concurrency)
    groups = [prompts[i : i + size] for i in range(0, len(prompts), size)]
    async with aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=None),
        connector=aiohttp.TCPConnector(limit=0),
        read_bufsize=READ_BUFFER,
    ) as session:

        async def answered(group: Sequence[list[int]]) -> list[Answer]:
            async with gate:
                answers = await _stream(session, load, group)
            tick(len(answers))
            return answers

        begin = time.perf_counter()
        done = await asyncio.gather(*map(answered, groups))
        seconds = time.perf_counter() - begin
    return [answer for group in done for answer in group], seconds


async def _stream(
    session: aiohttp.ClientSession, load: Load, prompts: Sequence[list[int]]
) -> list[Answer]:
    ids = list(prompts) if load.batch else prompts[0]
    body = {"input_ids": ids, "sampling_params": load.sampling, "stream": True}
    answers = [Answer() for _ in prompts]
    begin = time.perf_counter()
    async with session.post(f"{load.url}/generate", json=body) as response:
        if response.status != 200:
            raise CellFailed(_refusal(response.status, await response.text()))
        async for chunk in _events(response):
            if "error" in chunk:
                raise CellFailed(f"the server answered: {_message(chunk)}")
            answers[chunk.get("index", 0)].note(chunk, time.perf_counter() - begin)
    for answer in answers:
        _check_whole(answer)
    return answers


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in response.content:
        if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
            yield orjson.loads(line[6:])


def _refusal(status: int, text: str) -> str:
    try:
        text = _message(orjson.loads(text))
    except (ValueError, KeyError, TypeError):
        pass
    return f"the server answered with status {status}: {text.strip()[:300] or 'no reason given'}"


def _message(body: dict[str, Any]) -> str:
    error = body["error"]
    return str(error.get("message", error) if isinstance(error, dict) else error)


def _check_whole(answer: Answer) -> None:
    reason = answer.meta.get("finish_reason") or {}
    if reason.get("type") not in ("stop", "length") or not answer.arrivals:
        raise CellFailed(f"an answer ended with {reason or 'nothing'} and not with a stop.")
