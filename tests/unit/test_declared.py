"""Bodies read as declared, and the door of an app; on small declarations, and on the release's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Literal

import httpx
import pytest
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from fastapi.testclient import TestClient
from pydantic import BaseModel, TypeAdapter, model_validator
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from starlette.background import BackgroundTask

from sglang_dflash.errors import DFlashError
from sglang_dflash.serving.declared import check_body, read_body
from sglang_dflash.serving.door import guard
from sglang_dflash.serving.streams import begun_response


class Inner(BaseModel):
    kind: Literal["a", "b"]
    size: float = 1.0
    count: int = 0


@dataclass
class Body:
    name: str | list[str]
    count: int = 0
    flag: bool = False
    inner: list[Inner] | None = None
    anything: dict | None = None


@dataclass
class Streamed(Body):
    stream: bool = False


class Careless(BaseModel):
    inner: Inner | None = None

    @model_validator(mode="before")
    @classmethod
    def look(cls, values: Any) -> Any:
        values.get("inner")
        return values


def refusal(body: Any, declared: Any = Body, **keywords: Any) -> str:
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(DFlashError) as caught:
        check_body(text, declared, **keywords)
    told = str(caught.value)
    assert told.endswith(".") and "\n" not in told
    return told


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"name": ["a"], "count": -(1 << 63), "flag": True, "inner": None},
        {"inner": [{"kind": "a", "size": 1}], "anything": {"deep": [{}]}, "unknown": 1},
    ],
)
def test_as_declared(fields: dict[str, Any]) -> None:
    check_body(json.dumps({"name": "x"} | fields).encode(), Body)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"name": 5},
            "name 5 cannot be read (Input should be a valid string; or Input should be a valid array): correct it.",
        ),
        ({"name": ["a", 5]}, "name[1] 5 cannot"),
        ({"count": "5"}, "count '5' cannot be read (Input should be a valid integer): correct it."),
        ({"count": True}, "count True cannot"),
        ({"count": 1 << 63}, "count 9223372036854775808 cannot"),
        ({"count": None}, "count None cannot"),
        ({"flag": 1}, "flag 1 cannot"),
        ({"inner": {}}, "inner {} cannot"),
        ({"inner": [{"size": 1}]}, "inner[0].kind is missing: give it."),
        (
            {"inner": [{"kind": "c"}]},
            "inner[0].kind 'c' cannot be read (Input should be 'a' or 'b')",
        ),
        ({"inner": [{"kind": "a", "size": "1"}]}, "inner[0].size '1' cannot"),
        ({"inner": [{"kind": "a", "count": 1 << 63}]}, "inner[0].count 9223372036854775808 cannot"),
        ({"anything": {"deep": float("nan")}}, "The body is not JSON ("),
        ({"anything": "\ud800"}, "The body is not JSON ("),
    ],
)
def test_not_as_declared(fields: dict[str, Any], sentence: str) -> None:
    assert refusal({"name": "x"} | fields).startswith(sentence)


def test_whole_bodies() -> None:
    assert refusal({}).startswith("name is missing")
    assert refusal([]).startswith("The body [] cannot be read (")
    assert refusal(b"{").startswith("The body is not JSON (")
    assert refusal({"name": "x", "more": 1}, closed=True) == "more 1 is not known: leave it out."
    assert refusal({}, within="part").startswith("part.name is missing")


def test_a_validator_that_stumbles() -> None:
    """The release's own expect an object, also where the body is none."""
    assert refusal([], Careless).startswith("The body cannot be read (")


def test_of_many_wrong_items_the_first_is_named() -> None:
    assert refusal({"name": [5] * 100_000}).startswith("name[0] 5 cannot")


@pytest.fixture
def client() -> TestClient:
    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy"))
    app = FastAPI()

    @app.post("/body")
    async def take(body: Body) -> int:
        return body.count

    @app.post("/perhaps")
    async def perhaps(body: Body | None = None) -> bool:
        return body is None

    @app.get("/nothing")
    async def nothing(count: int = 1) -> int:
        return count

    guard(app, ServerArgs(model_path="dummy"))
    return TestClient(app)


def test_door(client: TestClient) -> None:
    assert client.post("/body", json={"name": "x", "count": 3}).json() == 3
    assert client.post("/perhaps").json() is True
    assert client.get("/nothing").json() == 1
    wrong = client.post("/body", json={"name": "x", "count": "3"})
    assert wrong.status_code == 400
    assert wrong.json()["detail"].startswith("count '3' cannot be read (")
    text = client.post("/body", content=b"{}", headers={"Content-Type": "text/plain"})
    assert text.status_code == 400
    assert text.json()["detail"] == (
        "Content-Type 'text/plain' cannot be read: send application/json."
    )


@pytest.fixture
def streaming() -> TestClient:
    """An app with one of the routes that are asked most, and others before it."""
    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy"))
    app = FastAPI()

    @app.get("/others")
    async def others() -> None: ...

    @app.post("/generate")
    async def generate(body: Streamed, request: Request) -> Response:
        async def parts() -> AsyncIterator[str]:
            if body.count > 99:
                raise ValueError("too many")
            for number in range(body.count):
                yield f"{number} "

        assert await request.body()
        return StreamingResponse(parts(), media_type="text/event-stream", status_code=201)

    guard(app, ServerArgs(model_path="dummy"))
    return TestClient(app)


def ask(client: TestClient, **body: Any) -> httpx.Response:
    return client.post("/generate", json={"name": "x", **body})


@pytest.mark.parametrize("stream", [True, False])  # straight, and as FastAPI answers
def test_streams(streaming: TestClient, stream: bool) -> None:
    answer = ask(streaming, count=3, stream=stream)
    assert (answer.status_code, answer.text) == (201, "0 1 2 ")
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert ask(streaming, count=0, stream=stream).text == ""
    refused = ask(streaming, count=100, stream=stream)
    assert (refused.status_code, refused.json()["detail"]) == (400, "too many")
    wrong = ask(streaming, count="3", stream=stream)
    assert wrong.status_code == 400 and wrong.json()["detail"].startswith("count '3' cannot")


def test_what_is_asked_most_is_looked_for_first(streaming: TestClient) -> None:
    routes = [route.path for route in streaming.app.routes]
    assert routes[0] == "/generate" and routes[-1] == "/others"
    assert streaming.get("/others").status_code == 200


def test_a_stream_takes_the_straight_way(
    streaming: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def solve(**_: Any) -> None:
        raise RuntimeError("FastAPI was asked")

    monkeypatch.setattr("fastapi.routing.solve_dependencies", solve)
    assert ask(streaming, count=1, stream=True).text == "0 "
    with pytest.raises(RuntimeError, match="FastAPI was asked"):
        ask(streaming, count=1)


def test_the_first_part_goes_out_before_tasks_begin() -> None:
    """Else the event loop has to come round for them first."""
    sent, begun = [], []

    async def parts() -> AsyncIterator[str]:
        yield "first"
        begun.append(len(sent))
        yield "second"

    async def send(message: dict) -> None:
        sent.append(
            (message["type"].rpartition(".")[2], message.get("body"), len(asyncio.all_tasks()))
        )

    async def receive() -> dict:
        await asyncio.sleep(60)

    async def answer() -> None:
        given = StreamingResponse(parts(), background=BackgroundTask(sent.append, "background"))
        await (await begun_response(given))({"type": "http"}, receive, send)

    asyncio.run(answer())
    assert sent[:2] == [("start", None, 1), ("body", b"first", 1)] and begun == [2]
    assert [part[1] for part in sent[2:4]] == [b"second", b""] and sent[4:] == ["background"]


@pytest.mark.parametrize("declared", [GenerateReqInput, CompletionRequest, ChatCompletionRequest])
def test_a_body_is_read_as_fastapi_reads_it(declared: Any) -> None:
    """Which reads leniently what was read strictly."""
    messages = [{"role": "user", "content": [{"type": "text", "text": "é"}]}]
    prompt = {"prompt": [5, 6], "messages": messages, "input_ids": [5, 6], "text": None}
    asked = {"model": "m", "temperature": 1, "max_tokens": 7, "logit_bias": {"5": 1}, "rid": "r"}
    more = {
        "sampling_params": {"temperature": 0.1 + 0.2, "n": 1 << 40},
        "stop": ["a"],
        "top_p": 0.1 + 0.2,
    }
    text = json.dumps({"stream": True, "unknown": 1} | prompt | asked | more)
    _, read = read_body(text.encode(), declared)
    assert type(read) is declared
    lenient = TypeAdapter(declared).validate_python(json.loads(text))
    assert repr(read) == repr(lenient) and "0.30000000000000004" in repr(read)
