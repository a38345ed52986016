"""Malformed bodies, derived from what the release declares of each of its routes.

This walks the declarations by itself: what the server's own reading of them forgot would be seen.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import inspect
import json
import math
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from fastapi.routing import APIRoute
from pydantic import BaseModel

INT64 = 1 << 63
# Values of every JSON type, and the bounds of numbers; those that a field may be are left out of it.
VALUES: tuple[Any, ...] = (
    *(None, True, 7, 3.5, "x", [], {}),
    *([None], [True], [7], [3.5], ["x"], [[]], [[7]], [["x"]], [{}], {"a": 7}, {"a": {"a": []}}),
    *(INT64, -INT64 - 1, 10**40, math.nan, math.inf, -math.inf, "\ud800"),
    *(["x", 7], [7, "x"], [INT64], [math.nan], {"a": math.nan}),
)


@dataclass(frozen=True)
class Malformed:
    """A body that the release's declaration of the route forbids.

    Attributes:
        field: what is wrong with it, by its path.
    """

    path: str
    method: str
    field: str
    body: Any

    @property
    def text(self) -> str:
        return json.dumps(self.body)


def routes() -> dict[tuple[str, str], Any]:
    """Declared types of JSON bodies by path and method, of the release's app."""
    from sglang.srt.entrypoints.http_server import app
    from sglang.srt.entrypoints.openai.protocol import ResponsesRequest

    declared = {}
    for route in (each for each in app.routes if isinstance(each, APIRoute)):
        parameters = inspect.signature(route.endpoint).parameters.values()
        hints = typing.get_type_hints(route.endpoint)
        # FastAPI reads what is a class with fields, or a dict, from the body.
        bodies = [hints[p.name] for p in parameters if is_body(hints.get(p.name))]
        for kind in bodies:
            kind = ResponsesRequest if kind is dict else kind  # which its endpoint makes of it
            for method in route.methods - {"GET", "HEAD"}:
                declared[route.path, method] = kind
    return declared


def is_body(kind: Any) -> bool:
    return kind is dict or any(map(has_fields, members(kind)))


@cache
def members(kind: Any) -> tuple[Any, ...]:
    """Of a union, else the type itself."""
    if typing.get_origin(kind) is typing.Annotated:
        return members(typing.get_args(kind)[0])
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return tuple(each for part in typing.get_args(kind) for each in members(part))
    return (kind,)


def has_fields(kind: Any) -> bool:
    return inspect.isclass(kind) and (dataclasses.is_dataclass(kind) or issubclass(kind, BaseModel))


@cache
def objects() -> dict[str, Any]:
    """What the endpoints make of fields that are declared as any object; no other keys are known."""
    from sglang.srt.managers.io_struct import SessionParams
    from sglang.srt.sampling.sampling_params import SamplingParams

    hints = typing.get_type_hints(SamplingParams.__init__)
    hints["max_new_tokens"] = int | None  # up to the limit
    parameters = list(inspect.signature(SamplingParams.__init__).parameters.values())[1:]
    sampling = dataclasses.make_dataclass(
        "SamplingParams", [(each.name, hints[each.name], each.default) for each in parameters]
    )
    return {"sampling_params": sampling, "session_params": SessionParams}


@cache
def fields_of(kind: Any) -> dict[str, tuple[Any, bool]]:
    """Type of each field as JSON names it, and whether it must be given."""
    if not dataclasses.is_dataclass(kind):
        fields = {
            field.alias or name: (field.annotation, field.is_required())
            for name, field in kind.model_fields.items()
        }
        if kind.__name__ == "ChatCompletionRequest":  # whose validator makes a choice of null
            fields["tool_choice"] = (fields["tool_choice"][0] | None, False)
        return fields
    hints = typing.get_type_hints(kind)
    if kind.__name__ == "GenerateReqInput":
        hints |= {name: each | list[each] | None for name, each in objects().items()}
    missing = dataclasses.MISSING
    return {
        field.name: (
            hints[field.name],
            field.default is missing and field.default_factory is missing,
        )
        for field in dataclasses.fields(kind)
    }


def allows(kind: Any, value: Any) -> bool:
    """Whether a JSON value is one of the type; of a type that is not known here, any is."""
    return any(_allows(each, value) for each in members(kind))


def _allows(kind: Any, value: Any) -> bool:
    origin, args = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin is typing.Literal:
        return any(value == each and type(value) is type(each) for each in args)
    if has_fields(origin):
        if isinstance(value, dict) and origin in objects().values():
            if not value.keys() <= fields_of(origin).keys():
                return False
        return isinstance(value, dict) and all(
            allows(inner, value[name]) if name in value else not required
            for name, (inner, required) in fields_of(origin).items()
        )
    if origin in (list, dict):
        inner = args[-1] if args else Any
        items = value if isinstance(value, list) else isinstance(value, dict) and value.values()
        return isinstance(value, origin) and all(allows(inner, item) for item in items)
    if inspect.isclass(origin) and issubclass(origin, enum.Enum):
        return value in [each.value for each in origin]
    return _allows_plain(origin, value)


def _allows_plain(kind: Any, value: Any) -> bool:
    if kind in (None, type(None)):
        return value is None
    if kind is bool:
        return isinstance(value, bool)
    if kind is int:
        return type(value) is int and -INT64 <= value < INT64
    if kind is float:
        return type(value) in (int, float) and math.isfinite(value)
    if kind in (str, bytes):
        return isinstance(value, str) and value.isascii()
    return "NaN" not in (text := json.dumps(value)) and "Infinity" not in text


def example(kind: Any) -> Any:
    """A value that is allowed, with nothing that needs not be given."""
    kind = members(kind)[0]
    if getattr(kind, "__name__", None) == "GenerateReqInput":
        return {"text": "How many?", "sampling_params": {"max_new_tokens": 1}}
    origin, args = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin is typing.Literal:
        return args[0]
    if has_fields(origin):
        return {
            name: example(inner)
            for name, (inner, required) in fields_of(origin).items()
            if required
        }
    if origin is list:
        return [example(args[0])] if args else []
    return {bool: True, int: 1, float: 1.0, str: "x", dict: {}}.get(origin)


@cache
def malformed(kind: Any) -> list[tuple[str, Any]]:
    """Bodies of a declared type with one wrong field or without one that it needs, and the field."""
    wrong = [("(body)", value) for value in VALUES if not allows(kind, value)]
    return wrong + list(_with_wrong_fields(kind, kind, example(kind), ()))


def _with_wrong_fields(
    whole: Any, kind: Any, sound: Any, at: tuple[str | int, ...]
) -> Iterator[tuple[str, Any]]:
    for each in members(kind):
        if not has_fields(each):
            continue
        base = example(each)
        if each in objects().values():
            yield ".".join(map(str, (*at, "unknown"))), _put(sound, at, base | {"unknown": 1})
        for name, (inner, required) in fields_of(each).items():
            values = [*VALUES, *_deeper(inner)]
            for value in values:
                body = _put(sound, at, base | {name: value})
                if not allows(whole, body):
                    yield ".".join(map(str, (*at, name))), body
            if required:
                body = _put(sound, at, {key: base[key] for key in base if key != name})
                if not allows(whole, body):
                    yield ".".join(map(str, (*at, name))), body
            if len(at) < 4:
                yield from _nested(whole, inner, _put(sound, at, base), (*at, name))


def _deeper(kind: Any) -> list[Any]:
    """A list with one good item and one wrong one."""
    for each in members(kind):
        if typing.get_origin(each) is list:
            return [[example(typing.get_args(each)[0]), wrong] for wrong in (None, 7, "x", {})]
    return []


def _nested(
    whole: Any, kind: Any, sound: Any, at: tuple[str | int, ...]
) -> Iterator[tuple[str, Any]]:
    for each in members(kind):
        if typing.get_origin(each) is list:
            inner = typing.get_args(each)[0]
            if any(map(has_fields, members(inner))):
                yield from _with_wrong_fields(whole, inner, _put(sound, at, [None]), (*at, 0))
        elif has_fields(each):
            yield from _with_wrong_fields(whole, each, sound, at)


def _put(body: Any, at: tuple[str | int, ...], value: Any) -> Any:
    if not at:
        return value
    step, *rest = at
    body = copy.copy(body)
    body[step] = _put(body[step] if rest else None, tuple(rest), value)
    return body


def everything() -> list[Malformed]:
    return [
        Malformed(path, method, field, body)
        for (path, method), kind in sorted(routes().items())
        for field, body in malformed(kind)
    ]
