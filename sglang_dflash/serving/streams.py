"""A refusal has its status where the answer would be streamed, too.

SGLang answers 200 to a request for a stream before it looks at it, and what is wrong is an event. Here
the answer begins with its first part, or with the refusal.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send


async def begun(parts: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """The same parts, once there is one.

    Raises:
        ValueError: the request is refused.
    """
    try:
        first = await anext(parts)
    except StopAsyncIteration:
        return parts

    async def whole() -> AsyncIterator[Any]:
        yield first
        async for part in parts:
            yield part

    return whole()


class BegunResponse(StreamingResponse):
    """A streamed answer of which the first part is there: it goes out before anything else is done.

    Starlette first starts tasks, one that streams and one that listens whether the client leaves.
    """

    def __init__(self, given: StreamingResponse, first: str | bytes | memoryview):
        """
        Args:
            given: the answer, without the first part.
        """
        super().__init__(given.body_iterator, given.status_code, background=given.background)
        self.raw_headers = given.raw_headers
        self._first = first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start"} | start)
        await self._send_part(self._first, send)
        await asyncio.sleep(0)  # the event loop sends when nobody goes on
        await super().__call__(scope, receive, send)

    async def stream_response(self, send: Send) -> None:
        async for part in self.body_iterator:
            await self._send_part(part, send)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_part(self, part: str | bytes | memoryview, send: Send) -> None:
        body = part.encode(self.charset) if isinstance(part, str) else part
        await send({"type": "http.response.body", "body": body, "more_body": True})


async def begun_response(given: StreamingResponse) -> StreamingResponse:
    """The same answer, once its first part is there.

    Raises:
        ValueError: the request is refused.
    """
    try:
        first = await anext(given.body_iterator)
    except StopAsyncIteration:
        return given
    return BegunResponse(given, first)


async def refused_at_once(parts: AsyncIterator[dict]) -> AsyncIterator[dict]:
    """The parts of one request's answer; that of the scheduler's refusal is raised.

    Raises:
        ValueError: with the scheduler's sentence.
    """
    beginning = True
    async for part in parts:
        reason = part["meta_info"].get("finish_reason")
        if beginning and isinstance(reason, dict) and reason.get("type") == "abort":
            if reason.get("status_code") == HTTPStatus.BAD_REQUEST:
                raise ValueError(reason["message"])
        beginning = False
        yield part
