"""Typed reads from a JSON object, with one sentence for whatever is not as it should be."""

from __future__ import annotations

from typing import Any

from sglang_dflash.errors import DFlashError

_REQUIRED: Any = object()


class Fields:
    """Reads one JSON object of a checkpoint.

    Attributes:
        path: of the checkpoint, for the sentence.
        prefix: what stands before a field's name in the sentence, such as "dflash_config.".
    """

    def __init__(self, path: str, raw: dict[str, Any], prefix: str = ""):
        self.path, self.raw, self.prefix = path, raw, prefix

    def inner(self, name: str) -> Fields | None:
        """The object under `name`; None if there is none.

        Raises:
            DFlashError: it is something else than an object.
        """
        value = self.raw.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(name, value, "an object")
        return Fields(self.path, value, f"{self.prefix}{name}.")

    def integer(self, name: str, *, minimum: int, default: Any = _REQUIRED) -> Any:
        value = self._value(name, default)
        if value is default:
            return default
        if type(value) is not int or value < minimum:
            raise self.wrong(name, value, f"a whole number from {minimum}")
        return value

    def number(self, name: str, *, above: float, below: float, default: Any = _REQUIRED) -> Any:
        value = self._value(name, default)
        if value is default:
            return default
        if type(value) not in (int, float) or not above < value < below:
            limits = (
                f"between {above:g} and {below:g}" if below < float("inf") else f"above {above:g}"
            )
            raise self.wrong(name, value, f"a number {limits}")
        return value

    def boolean(self, name: str, *, default: Any = _REQUIRED) -> Any:
        value = self._value(name, default)
        if value is not default and not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return value

    def integers(self, name: str, *, minimum: int) -> tuple[int, ...]:
        """A list of at least one whole number."""
        value = self._value(name, _REQUIRED)
        good = isinstance(value, list) and value
        if not good or not all(type(item) is int and item >= minimum for item in value):
            raise self.wrong(name, value, f"a list of whole numbers from {minimum}")
        return tuple(value)

    def wrong(self, name: str, value: Any, expected: str) -> DFlashError:
        return DFlashError(
            f"{self.prefix}{name} of {self.path} is {value!r}, not {expected}: the checkpoint is damaged; "
            "download it again."
        )

    def _value(self, name: str, default: Any) -> Any:
        value = self.raw.get(name)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise DFlashError(
                f"config.json of {self.path} has no {self.prefix}{name}: it is not a complete DFlash checkpoint; "
                "download it again."
            )
        return default
