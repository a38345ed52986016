"""The OpenAI-compatible API counts tokens as plain decoding does."""

from __future__ import annotations

from typing import Any

from tests.server.harness import Server, events


def chat_body(question: str, **fields: Any) -> dict:
    """A greedy request, with all text as content: the target never closes a thought."""
    messages = [{"role": "user", "content": question}]
    common = {"model": "default", "temperature": 0, "separate_reasoning": False}
    return common | {"messages": messages} | fields


def chat(server: Server, question: str, **fields: Any) -> dict:
    response = server.post("/v1/chat/completions", chat_body(question, **fields))
    assert response.status_code == 200, response.text
    return response.json()


def complete(server: Server, prompt: str, **fields: Any) -> dict:
    body = {"model": "default", "prompt": prompt, "temperature": 0, "max_tokens": 200} | fields
    response = server.post("/v1/completions", body)
    assert response.status_code == 200, response.text
    return response.json()


def counts(answer: dict) -> dict:
    """Usage without what depends on the radix cache."""
    return {name: count for name, count in answer["usage"].items() if name.endswith("_tokens")}


def test_chat(either: Server, plain: Server, problems: list[dict], tokenizer) -> None:
    for problem in problems[30:34]:
        answer, expected = (chat(server, problem["question"]) for server in (either, plain))
        assert answer["choices"] == expected["choices"]
        assert counts(answer) == counts(expected)
        text = answer["choices"][0]["message"]["content"]
        # The stop token counts; the text does not show it.
        assert answer["usage"]["completion_tokens"] == len(tokenizer.encode(text)) + 1


def test_reasoning_tokens(either: Server, plain: Server, problems: list[dict]) -> None:
    """All tokens before the end-of-thinking tag count, those of accepted spans too."""
    answer, expected = (chat(server, problems[34]["question"]) for server in (either, plain))
    assert expected["usage"]["reasoning_tokens"] > 16
    assert counts(answer) == counts(expected)


def test_chat_stream(either: Server, plain: Server, problems: list[dict]) -> None:
    expected = chat(plain, problems[35]["question"])
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    body = chat_body(problems[35]["question"], **stream)
    with either.post("/v1/chat/completions", body, stream=True) as response:
        chunks = list(events(response))
    deltas = [choice["delta"].get("content") or "" for c in chunks for choice in c["choices"]]
    assert "".join(deltas) == expected["choices"][0]["message"]["content"]
    assert counts(chunks[-1]) == counts(expected)


def test_completions(either: Server, plain: Server, prompts: list[str]) -> None:
    for fields in ({}, {"max_tokens": 17}, {"stop": ["\n"]}, {"n": 2}, {"echo": True}):
        answer, expected = (complete(server, prompts[36], **fields) for server in (either, plain))
        assert answer["choices"] == expected["choices"], fields
        assert counts(answer) == counts(expected), fields
