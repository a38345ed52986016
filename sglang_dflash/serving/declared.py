"""What the release declares of a request, read strictly.

The release reads bodies as FastAPI does: a string of digits is a number there, and any number is one,
also where a tensor cannot hold it. Here a value has the declared type or is refused. The types are the
release's own, so that a field which a later release adds is read like all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import orjson
from pydantic import TypeAdapter, ValidationError
from pydantic_core import SchemaValidator

from sglang_dflash.errors import DFlashError

_INT64 = 1 << 63
_FLOAT32 = 3.4028234663852886e38
# Parts of a schema that hold values, not schemas.
_VALUES = ("metadata", "default", "expected", "serialization", "members")


@cache
def _validator(declared: Any) -> SchemaValidator:
    # Otherwise models are read by what pydantic made for them, which knows nothing of this schema.
    return SchemaValidator(_narrowed(TypeAdapter(declared).core_schema), _use_prebuilt=False)


def _narrowed(schema: Any) -> Any:
    """The schema with numbers that a tensor can hold; of a list's wrong items it names the first."""
    if isinstance(schema, list | tuple):
        return type(schema)(_narrowed(part) for part in schema)
    if not isinstance(schema, dict):
        return schema
    narrowed = {key: part if key in _VALUES else _narrowed(part) for key, part in schema.items()}
    if schema.get("type") == "int":
        narrowed.setdefault("ge", -_INT64)
        narrowed.setdefault("le", _INT64 - 1)
    elif schema.get("type") == "float":
        narrowed |= {"allow_inf_nan": False}
        narrowed.setdefault("ge", -_FLOAT32)
        narrowed.setdefault("le", _FLOAT32)
    elif schema.get("type") == "list":
        narrowed["fail_fast"] = True
    return narrowed


def check_body(text: bytes, declared: Any, within: str = "", closed: bool = False) -> Any:
    """The body, which is refused if it is not as declared; see `read_body`."""
    return read_body(text, declared, within, closed)[0]


def read_body(
    text: bytes, declared: Any, within: str = "", closed: bool = False
) -> tuple[Any, Any]:
    """The body as JSON has it and as what was declared; it is refused if it is not that.

    Args:
        text: JSON as received.
        declared: a dataclass, a pydantic model or any type that pydantic reads.
        within: the field that the body was taken from.
        closed: whether keys are refused that are not declared; the release ignores them.

    Raises:
        DFlashError: names the field and its value, and says what is allowed.
    """
    try:
        body = orjson.loads(text)  # knows no NaN, no infinity and no half of a character
    except orjson.JSONDecodeError as error:
        raise DFlashError(f"The body is not JSON ({error}): correct it.") from None
    try:
        extra = "forbid" if closed else None
        read = _validator(declared).validate_json(text, strict=True, extra=extra)
    except ValidationError as error:
        raise DFlashError(sentence(error.errors(), body, within)) from None
    except (AttributeError, KeyError, TypeError) as error:  # from a validator of the release's
        raise DFlashError(f"The body cannot be read ({error}): correct it.") from None
    return body, read


def check_values(values: dict[str, Any], declared: Any) -> None:
    """Refuses Python values that are not as declared.

    Raises:
        DFlashError: as `check_body`.
    """
    try:
        _validator(declared).validate_python(values, strict=True)
    except ValidationError as error:
        raise DFlashError(sentence(error.errors(), values)) from None


def sentence(errors: Sequence[Any], body: Any, within: str = "") -> str:
    """What is wrong deepest in the body, and all that may stand there.

    Args:
        errors: pydantic's.
        body: what they are about.
        within: the field that it was taken from.
    """
    places = [_place(error, body) for error in errors]
    first = max(range(len(errors)), key=lambda number: len(places[number][0]))
    path, value = places[first]
    name = _name([within, *path] if within else path)
    if errors[first]["type"] == "missing":
        return f"{name} is missing: give it."
    if errors[first]["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{name} {short(value)} is not known: leave it out."
    reasons = [
        error["msg"].removeprefix("Value error, ").rstrip(".").replace("\n", " ")
        for error, place in zip(errors, places, strict=True)
        if place[0] == path and error["type"] != "missing"
    ]
    why = "; or ".join(dict.fromkeys(reasons))
    return f"{name} {short(value)} cannot be read ({why}): correct it."


def _place(error: Any, body: Any) -> tuple[list[str | int], Any]:
    """Where the error is in the body, and what is there; a union's members are no places."""
    path: list[str | int] = []
    value = body
    for step in error["loc"]:
        known = isinstance(value, dict) and step in value
        if known or (isinstance(value, list) and isinstance(step, int) and step < len(value)):
            path.append(step)
            value = value[step]
    if error["type"] == "missing":
        path.append(error["loc"][-1])
    return path, value


def _name(path: Sequence[str | int]) -> str:
    """As in `messages[0].role`."""
    steps = [f"[{step}]" if isinstance(step, int) else f".{step}" for step in path]
    return "".join(steps).removeprefix(".").replace("\n", " ") or "The body"


def short(value: Any, limit: int = 60) -> str:
    """A value in a sentence."""
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "…"
