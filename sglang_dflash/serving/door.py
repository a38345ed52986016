"""What every request meets before an endpoint of the release reads it."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from email.message import Message
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response, params
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from fastapi.routing import APIRoute, request_response
from pydantic import ValidationError

from sglang_dflash.errors import DFlashError
from sglang_dflash.process.access_log import log_after_answers
from sglang_dflash.serving.declared import read_body, sentence
from sglang_dflash.serving.first_tokens import take_ahead
from sglang_dflash.serving.gone import abort_gone
from sglang_dflash.serving.loose import check_loose_parts
from sglang_dflash.serving.metrics import refusing
from sglang_dflash.serving.straight import straight
from sglang_dflash.serving.streams import begun_response

logger = logging.getLogger(__name__)

# How the path of a route ends, the server argument without which it ends the scheduler, and its flag.
_NEEDED = {
    "_expert_distribution_record": (
        "expert_distribution_recorder_mode",
        "--expert-distribution-recorder-mode",
    ),
    "_memory_occupation": ("enable_memory_saver", "--enable-memory-saver"),
}

# Routes of the release that only one replica can serve, with what it was written for.
_ONE_REPLICA = (
    "/init_weights_update_group",
    "/destroy_weights_update_group",
    "/update_weights_from_distributed",
    "/update_weights_from_tensor",
)

# Parts of the paths of what one process of HTTP does for all or keeps to itself, where there are several.
_ONE_PROCESS = (
    *("_session", "_generation", "_lora_adapter", "_memory_occupation", "/v1/responses/"),
    *("/update_weights_from_", "_weights_update_group"),
)


# Routes that are asked all the time. The release declares a hundred others, some of them before these, and each
# request is matched with one after the other, with --enable-metrics twice.
_FIRST = ("/v1/chat/completions", "/v1/completions", "/generate")


def open_door(app: FastAPI, manager: Any) -> None:
    """Before the first request comes, within the event loop; see `guard`.

    Args:
        manager: SGLang's tokenizer manager.
    """
    guard(app, manager.server_args)
    take_ahead(manager)
    abort_gone(manager)


def guard(app: FastAPI, server_args: Any) -> None:
    """Answers malformed requests to all routes of the app with status 400 and a sentence.

    So is answered what an endpoint raises as a ValueError, which is how the release refuses; some of
    its endpoints answer 500 to it, or break a stream off. The app's own exception handlers give the
    answer its form. What is asked most is looked for first.
    """
    for route in app.routes:
        if isinstance(route, APIRoute):
            route.app = request_response(_checked(route, server_args))
    app.router.routes.sort(key=lambda route: getattr(route, "path", None) not in _FIRST)
    log_after_answers()


def _checked(route: APIRoute, server_args: Any) -> Callable[[Request], Awaitable[Response]]:
    handler, declared = route.get_route_handler(), _declared(route)
    ask_for_stream = straight(route) if route.path in _FIRST else None

    async def checked(request: Request) -> Response:
        body = read = response = None
        try:
            with refusing("unreadable"):
                if declared is not None and (text := await request.body()):
                    _check_type(request.headers.get("content-type", ""))
                    body, read = read_body(text, declared)
                    check_loose_parts(body, declared)
                check_operation(route.path, server_args)
            if ask_for_stream is not None:
                response = await ask_for_stream(request, body, read)
            if response is None:
                response = await handler(request)
            if isinstance(response, StreamingResponse):
                response = await begun_response(response)
            return response
        except RequestValidationError as error:
            raise HTTPException(HTTPStatus.BAD_REQUEST, _told(error)) from None
        except ValueError as error:
            if not isinstance(error, DFlashError):
                logger.exception("%s refuses a request", route.path)
            told = sentence(error.errors(), {}) if isinstance(error, ValidationError) else error
            raise HTTPException(HTTPStatus.BAD_REQUEST, str(told)) from None

    return checked


def _declared(route: APIRoute) -> Any:
    """The type of the route's body; None for a form, whose fields FastAPI reads one by one."""
    from sglang.srt.entrypoints.openai.protocol import ResponsesRequest

    field = route.body_field
    if field is None or isinstance(field.field_info, params.Form):
        return None
    # The one endpoint that takes any object, of which it makes this itself.
    return ResponsesRequest if route.path == "/v1/responses" else field.field_info.annotation


def check_operation(path: str, server_args: Any) -> None:
    """Refuses what the server was not started for."""
    for ending, (name, flag) in _NEEDED.items():
        if path.endswith(ending) and not getattr(server_args, name):
            raise DFlashError(f"{path} needs {flag}: start the server with it.")
    if path in _ONE_REPLICA and server_args.dp_size > 1:
        raise DFlashError(
            f"{path} is not supported with --dp-size {server_args.dp_size}: send new weights through "
            "/update_weights_from_disk, or start a server for each replica."
        )
    processes = server_args.tokenizer_worker_num
    if processes > 1 and any(part in path for part in _ONE_PROCESS):
        raise DFlashError(
            f"{path} is not supported with --tokenizer-worker-num {processes}, of which one would not tell the others: "
            "start the server with one."
        )
    if path == "/open_session" and server_args.dp_size > 1:
        # Each replica would answer, which ends the release's server; and a next turn may go to another one.
        raise DFlashError(
            f"/open_session is not supported with --dp-size {server_args.dp_size}, whose replicas share no sessions: "
            "send each turn with all that was said before, or start a server for each replica."
        )


def _check_type(content_type: str) -> None:
    if content_type == "application/json":
        return
    message = Message()
    message["content-type"] = content_type
    subtype = message.get_content_subtype()
    if message.get_content_maintype() != "application" or not (
        subtype == "json" or subtype.endswith("+json")
    ):
        raise DFlashError(f"Content-Type {content_type!r} cannot be read: send application/json.")


def _told(error: RequestValidationError) -> str:
    """A sentence for what only FastAPI reads: parameters of the path and the query, and forms."""
    first = error.errors()[0]
    given = first["input"]
    for step in reversed(first["loc"]):
        given = {step: given}
    return sentence([first], {} if first["type"] == "missing" else given)
