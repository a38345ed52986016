"""Answers with a structure, whole: JSON by a schema and tool calls, as the `openai` package reads them."""

from __future__ import annotations

import json
from typing import Any

import openai
import pydantic
import pytest

from tests.server.harness import PAIR
from tests.server.test_openai_sdk import clients, own_removed  # noqa: F401

# Without reasoning, after which alone a grammar would begin, and with all text as content.
AT_ONCE = {"separate_reasoning": False, "chat_template_kwargs": {"enable_thinking": False}}
ASKED = 4  # of the held-out prompts of a kind


def held_out(kind: str) -> list[dict]:
    lines = (PAIR / "data" / "workloads" / f"{kind}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines[:ASKED]]


def fields(problem: dict, **more: Any) -> dict:
    messages = [{"role": "user", "content": problem["question"]}]
    common = {"model": "default", "temperature": 0, "extra_body": AT_ONCE}
    return common | {"messages": messages} | more


def by_schema(problem: dict) -> dict:
    schema = {"name": "answer", "schema": problem["schema"], "strict": True}
    return fields(problem, response_format={"type": "json_schema", "json_schema": schema})


def whole(client: openai.OpenAI, asked: dict, stream: bool) -> dict:
    """Message and end of an answer, put together where it comes in parts."""
    if not stream:
        choice = client.chat.completions.create(**asked).choices[0]
        calls = [each.function for each in choice.message.tool_calls or []]
        told = [(call.name, call.arguments) for call in calls]
        return {"content": choice.message.content, "calls": told, "end": choice.finish_reason}
    content, calls, end = "", {}, None
    for part in client.chat.completions.create(**asked, stream=True):
        for choice in part.choices:
            content += choice.delta.content or ""
            end = choice.finish_reason or end
            for call in choice.delta.tool_calls or []:
                name, arguments = calls.get(call.index, ("", ""))
                more = call.function
                calls[call.index] = name + (more.name or ""), arguments + (more.arguments or "")
    return {"content": content or None, "calls": list(calls.values()), "end": end}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_json_schema(clients: tuple, stream: bool) -> None:  # noqa: F811
    """Asked for JSON, the target writes it by itself, and drafts are accepted under the grammar."""
    right = 0
    for problem in held_out("json"):
        answer, expected = (whole(client, by_schema(problem), stream) for client in clients)
        assert answer == expected
        assert answer["end"] == "stop"
        value = json.loads(answer["content"])
        assert value.keys() == problem["schema"]["properties"].keys()
        right += value == json.loads(problem["answer"])
    assert right >= ASKED - 1


def test_json_of_a_type(clients: tuple) -> None:  # noqa: F811
    """The package makes an object of it."""
    problem = next(p for p in held_out("json") if "final_answer" in p["schema"]["properties"])

    class Solved(pydantic.BaseModel):
        steps: list[str]
        final_answer: int

    answer, expected = (
        client.chat.completions.parse(**fields(problem, response_format=Solved)).choices[0].message
        for client in clients
    )
    assert isinstance(answer.parsed, Solved) and answer.parsed.steps
    assert answer.parsed == expected.parsed


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_tool_calls(clients: tuple, stream: bool, choice: str) -> None:  # noqa: F811
    called = 0
    for problem in held_out("tools"):
        asked = fields(problem, tools=problem["tools"], tool_choice=choice)
        answer, expected = (whole(client, asked, stream) for client in clients)
        assert answer == expected
        for name, arguments in answer["calls"]:
            (tool,) = [t["function"] for t in problem["tools"] if t["function"]["name"] == name]
            given = json.loads(arguments)
            assert given.keys() <= tool["parameters"]["properties"].keys()
            called += 1
        assert answer["end"] == ("tool_calls" if answer["calls"] else "stop")
    assert called >= ASKED - 1


def test_tool_result(clients: tuple) -> None:  # noqa: F811
    """What a tool gave goes back, and the answer is text."""
    (problem, *_) = held_out("tools")
    answers = []
    for client in clients:
        asked = fields(problem, tools=problem["tools"])
        message = client.chat.completions.create(**asked).choices[0].message
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "120"}
        turns = [*asked["messages"], message.model_dump(exclude_none=True), result]
        told = client.chat.completions.create(**(asked | {"messages": turns}))
        answers.append(own_removed(told)["choices"][0])
    assert answers[0] == answers[1]
    assert answers[0]["finish_reason"] == "stop" and answers[0]["message"]["content"]
