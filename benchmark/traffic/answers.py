"""From the bytes of a streamed answer to what it says, read after all bytes have come."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import orjson

from benchmark.errors import CellFailed


@dataclass(frozen=True)
class Answer:
    """How a request was answered. Times are seconds of one clock.

    Attributes:
        index: of the prompt in the pool.
        began: when it was sent, or was to be sent.
        ended: when its last byte came.
        times: of each chunk with text.
        characters: how long the text was with that chunk.
        tokens: of the answer, as the server counts them.
        finish: why it ended, "stop" or "length".
        digest: the same for the same text.
    """

    index: int
    began: float
    ended: float
    times: Sequence[float]
    characters: Sequence[int]
    tokens: int
    prompt_tokens: int
    finish: str
    digest: str

    @property
    def first(self) -> float:
        return self.times[0] if len(self.times) else self.ended

    def ttft_ms(self) -> float:
        """Time to the first chunk with text."""
        return (self.first - self.began) * 1e3

    def tpot_ms(self) -> float | None:
        """Time of a token after the first chunk with text, on average; None of a single token."""
        return (self.ended - self.first) * 1e3 / (self.tokens - 1) if self.tokens > 1 else None

    def gaps_ms(self) -> list[float]:
        """Times between chunks, as a user sees them who reads along."""
        return [(after - before) * 1e3 for before, after in pairwise(self.times)]

    def tokens_until(self, seconds: np.ndarray) -> np.ndarray:
        """How many tokens had come at these times, by the share of the text that had."""
        if not len(self.times) or not self.characters[-1]:
            return np.where(seconds >= self.ended, self.tokens, 0).astype(float)
        shares = np.concatenate([[0.0], np.array(self.characters) / self.characters[-1]])
        return self.tokens * shares[np.searchsorted(np.array(self.times), seconds, side="right")]


def parse(index: int, began: float, reads: Sequence[tuple[float, bytes]]) -> Answer:
    """The answer that these bytes, read at these times, are.

    Raises:
        CellFailed: an error of the server, or an answer that does not end as one does.
    """
    times: list[float] = []
    characters: list[int] = []
    text, finish, usage = "", None, None
    for seconds, event in _events(reads):
        if "error" in event or "choices" not in event:
            raise CellFailed(f"the server answered: {message(event)}")
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            finish = choice.get("finish_reason") or finish
            if choice.get("text"):
                text += choice["text"]
                times.append(seconds)
                characters.append(len(text))
    if usage is None or finish not in ("stop", "length"):
        raise CellFailed(f"an answer ended with {finish or 'nothing'} and not with a stop.")
    return Answer(
        index,
        began,
        reads[-1][0],
        times,
        characters,
        usage["completion_tokens"],
        usage["prompt_tokens"],
        finish,
        hashlib.sha256(text.encode()).hexdigest()[:4],
    )


def _events(reads: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, dict]]:
    """Server-sent events with the time at which each was complete."""
    rest = b""
    for seconds, data in reads:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                yield seconds, orjson.loads(line[6:])


def refusal(status: int, text: str) -> str:
    try:
        text = message(orjson.loads(text))
    except (ValueError, TypeError, AttributeError):
        pass
    return f"the server answered with status {status}: {text.strip()[:300] or 'no reason given'}"


def message(body: dict) -> str:
    error = body.get("error", body)
    return str(error.get("message", error) if isinstance(error, dict) else error)
