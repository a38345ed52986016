"""The `openai` package asks: it reads what a server with DFLASH answers, and it is what plain decoding answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.server.harness import Server

# What an answer has of its own each time.
OWN = ("id", "created")
QUESTION = 40  # of the held-out problems

CHATS = {
    "plain": {},
    "cut": {"max_tokens": 17},
    "stop": {"stop": ["\n"]},
    "two": {"n": 2},
    "logprobs": {"logprobs": True, "top_logprobs": 3, "max_tokens": 24},
    "penalties": {"frequency_penalty": 0.5, "presence_penalty": 0.2},
    "bias": {"logit_bias": {"20": -100}},
}
COMPLETIONS = {
    "plain": {},
    "echo": {"echo": True, "max_tokens": 12},
    "two": {"n": 2, "max_tokens": 12},
    "logprobs": {"logprobs": 3, "max_tokens": 24},
}


def sdk(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def clients(dflash: Server, plain: Server) -> Iterator[tuple[openai.OpenAI, openai.OpenAI]]:
    """Of DFLASH and of plain decoding; the first must have speculated."""
    before = counted(dflash)
    yield sdk(dflash), sdk(plain)
    rounds, accepted = (now - then for now, then in zip(counted(dflash), before, strict=True))
    assert rounds > 0 and accepted > 0


def counted(server: Server) -> tuple[float, float]:
    """Rounds of requests, and drafted tokens that were accepted."""
    return tuple(server.metric(f"dflash_{name}_total") for name in ("rounds", "accepted_tokens"))


def messages(problems: list[dict], index: int = QUESTION) -> list[dict]:
    return [{"role": "user", "content": problems[index]["question"]}]


def chat(client: openai.OpenAI, asked: list[dict], **fields: Any) -> dict:
    common = {"model": "default", "temperature": 0, "extra_body": {"separate_reasoning": False}}
    return own_removed(client.chat.completions.create(messages=asked, **common, **fields))


def own_removed(answer: Any) -> dict:
    """What both servers must say alike; the radix cache is each one's own."""
    told = answer.model_dump(exclude=OWN)
    (told.get("usage") or {}).pop("prompt_tokens_details", None)
    return told


def nearly(told: Any) -> Any:
    """Log-probabilities of blocks and of single tokens are sums in another order."""
    if isinstance(told, float):
        return pytest.approx(told, abs=1e-3)
    if isinstance(told, dict):
        return {name: nearly(value) for name, value in told.items()}
    return [nearly(value) for value in told] if isinstance(told, list) else told


@pytest.mark.parametrize("asked", CHATS)
def test_chat(clients: tuple, problems: list[dict], asked: str) -> None:
    answer, expected = (chat(client, messages(problems), **CHATS[asked]) for client in clients)
    assert answer == nearly(expected)
    assert len(answer["choices"]) == CHATS[asked].get("n", 1)


@pytest.mark.parametrize("asked", ["plain", "stop", "two", "logprobs"])
def test_chat_stream(clients: tuple, problems: list[dict], asked: str) -> None:
    """The parts of a stream are those of the whole answer."""
    client, expecting = clients
    expected = chat(expecting, messages(problems), **CHATS[asked])["choices"]
    streamed = [""] * len(expected)
    ends: list[str | None] = [None] * len(expected)
    likely: list[list[str]] = [[] for _ in expected]
    stream = client.chat.completions.create(
        model="default",
        messages=messages(problems),
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"separate_reasoning": False},
        **CHATS[asked],
    )
    for part in stream:
        for choice in part.choices:
            streamed[choice.index] += choice.delta.content or ""
            ends[choice.index] = choice.finish_reason or ends[choice.index]
            if choice.logprobs:
                likely[choice.index] += [each.token for each in choice.logprobs.content]
    assert streamed == [choice["message"]["content"] for choice in expected]
    assert ends == [choice["finish_reason"] for choice in expected]
    if asked == "logprobs":
        assert likely == [[t["token"] for t in c["logprobs"]["content"]] for c in expected]
    assert part.usage.completion_tokens > 1


@pytest.mark.parametrize("asked", COMPLETIONS)
def test_completions(clients: tuple, prompts: list[str], asked: str) -> None:
    answer, expected = (
        own_removed(
            client.completions.create(
                model="default", prompt=prompts[QUESTION], temperature=0, **COMPLETIONS[asked]
            )
        )
        for client in clients
    )
    assert answer == nearly(expected)


REFUSED = {
    "temperature": {"temperature": -1},
    "top_logprobs": {"logprobs": True, "top_logprobs": 100000},
    "max_tokens": {"max_tokens": -5},
    "schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"type": "no-such-type"}},
        }
    },
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("refused", REFUSED)
def test_errors(dflash: Server, problems: list[dict], refused: str, stream: bool) -> None:
    """A refusal is the SDK's own error for it, also of a stream."""
    fields = {"model": "default", "messages": messages(problems), "stream": stream}
    with pytest.raises(openai.BadRequestError) as raised:
        sdk(dflash).chat.completions.create(**fields, **REFUSED[refused])
    assert raised.value.status_code == 400 and str(raised.value)


def test_cancelled(clients: tuple, dflash: Server, problems: list[dict]) -> None:
    """A stream that is closed ends its request; `dflash` sees that its slots are free again."""
    client, _ = clients
    fields = {"model": "default", "messages": messages(problems), "stream": True, "temperature": 0}
    forever = {"max_tokens": 1500, "extra_body": {"ignore_eos": True}}
    with client.chat.completions.create(**fields, **forever) as stream:
        next(iter(stream))
    whole = chat(client, messages(problems, 41))
    assert whole["choices"][0]["finish_reason"] == "stop"


def test_async_clients(dflash: Server, plain: Server, problems: list[dict]) -> None:
    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{dflash.url}/v1", api_key="none") as client:
            answers = await asyncio.gather(
                *(
                    client.chat.completions.create(
                        model="default",
                        messages=messages(problems, index),
                        temperature=0,
                        extra_body={"separate_reasoning": False},
                    )
                    for index in range(42, 46)
                )
            )
        return [answer.choices[0].message.content for answer in answers]

    expected = [chat(sdk(plain), messages(problems, index)) for index in range(42, 46)]
    told = [answer["choices"][0]["message"]["content"] for answer in expected]
    assert asyncio.run(ask_all()) == told
