"""The way of a streamed request to its endpoint.

FastAPI solves what an endpoint depends on and makes an answer of what it returns. Where it depends on nothing but the
body and streams its answer, nothing of that is left to do once the body is read.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from inspect import iscoroutinefunction
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

Straight = Callable[[Request, Any, Any], Awaitable[Response | None]]


def straight(route: APIRoute) -> Straight | None:
    """What asks the route's endpoint for a stream; None if the endpoint takes more than a body and the request.

    It gets the request, its body and what `read_body` made of that, and gives the answer; or None, and has asked for
    nothing, if the body asks for no stream. The endpoint must answer a request for a stream with a response.
    """
    needs, endpoint = route.dependant, route.endpoint
    more = (needs.path_params, needs.query_params, needs.header_params, needs.cookie_params)
    others = (
        *(needs.websocket_param_name, needs.http_connection_param_name, needs.response_param_name),
        *(needs.background_tasks_param_name, needs.security_scopes_param_name),
    )
    single = len(needs.body_params) == 1 and not route._embed_body_fields
    plain = single and not any(more) and not any(others) and iscoroutinefunction(endpoint)
    if not plain or not all(map(_checks_the_type, needs.dependencies)):
        return None
    [field], request_name = needs.body_params, needs.request_param_name

    async def ask(request: Request, body: Any, read: Any) -> Response | None:
        streams = isinstance(body, dict) and body.get("stream") is True
        if not streams or request.headers.get("content-type") != "application/json":
            return None
        values = {field.name: read}
        if request_name is not None:
            values[request_name] = request
        return await endpoint(**values)

    return ask


def _checks_the_type(needs: Any) -> bool:
    """Whether a dependency is the release's look at the content type."""
    from sglang.srt.entrypoints.http_server import validate_json_request

    return needs.call is validate_json_request
