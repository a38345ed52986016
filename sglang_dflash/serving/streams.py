"""A refusal has its status where the answer would be streamed, too.

SGLang answers 200 to a request for a stream before it looks at it, and what is wrong is an event. Here
the answer begins with its first part, or with the refusal.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any


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
