"""Where the release's endpoints take less than it declares, or make something else of it."""

from __future__ import annotations

import json
from dataclasses import is_dataclass
from typing import Any, get_type_hints

from sglang_dflash.errors import DFlashError
from sglang_dflash.serving.declared import check_body, short

# Fields of which one value is read, declared as that or a list.
_ONE_VALUE = ("extra_key", "cache_salt")
_TOKEN_IDS = 1 << 32  # that a tokenizer can be asked about


def check_loose_parts(body: Any, declared: Any) -> None:
    """Refuses what is as declared, but cannot be read by the endpoint.

    Args:
        body: as read.
        declared: the type of the route's body.

    Raises:
        DFlashError: names the field and its value, and says what is allowed.
    """
    from sglang.srt.entrypoints.openai.protocol import DetokenizeRequest
    from sglang.srt.managers.io_struct import (
        EmbeddingReqInput,
        GenerateReqInput,
        SetInternalStateReq,
        VertexGenerateReqInput,
    )

    if declared in (GenerateReqInput, EmbeddingReqInput):
        return  # they know batches, see `fit_to_prompts`
    if isinstance(body, dict) and body.get("messages") == []:
        raise DFlashError("messages is empty: give at least one.")
    # An id names what is asked for; of requests to the server itself it is one.
    one = ("rid", *_ONE_VALUE) if is_dataclass(declared) else _ONE_VALUE
    for name in one:
        if isinstance(body, dict) and isinstance(body.get(name), list):
            raise DFlashError(f"{name} {short(body[name])} is a list: give one value.")
    if declared is VertexGenerateReqInput:
        _check_vertex(body)
    elif declared is SetInternalStateReq:
        _check_new_arguments(body["server_args"])
    elif declared is DetokenizeRequest:
        _check_tokens(body["tokens"])


def _check_vertex(body: dict[str, Any]) -> None:
    """The parameters are fields of `/generate`, as are some of each instance."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    parameters = body.get("parameters") or {}
    for name in ("text", "input_ids", "input_embeds", "image_data"):
        if name in parameters:
            raise DFlashError(f"parameters.{name} is not read there: give it in instances.")
        for number, instance in enumerate(body["instances"]):
            one = json.dumps({name: instance.get(name)}).encode()
            check_body(one, GenerateReqInput, f"instances[{number}]")
    check_body(json.dumps(parameters).encode(), GenerateReqInput, "parameters", closed=True)


def _check_new_arguments(given: dict[str, Any]) -> None:
    """They have the types that the release declares for its command line; none can be taken away."""
    from sglang.srt.server_args import ServerArgs

    hints = get_type_hints(ServerArgs)
    for name, value in given.items():
        if name not in hints:
            raise DFlashError(f"server_args.{name} is not known: leave it out.")
        if value is None:
            raise DFlashError(f"server_args.{name} is null: give a value.")
        check_body(json.dumps(value).encode(), hints[name], f"server_args.{name}")


def _check_tokens(tokens: list[Any]) -> None:
    for token in tokens:
        if isinstance(token, list):
            _check_tokens(token)
        elif not 0 <= token < _TOKEN_IDS:
            raise DFlashError(f"tokens has {token}, which is no token id: leave it out.")
