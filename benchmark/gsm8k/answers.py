"""The number that an answer to a GSM8K problem gives."""

from __future__ import annotations

import re
from decimal import Decimal

_NUMBER = r"-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
_BOXED = re.compile(r"\\boxed\s*\{")
_MARKED = re.compile(rf"####\s*[^\d\-.]{{0,3}}({_NUMBER})")
_LAST = re.compile(_NUMBER)


def final_number(text: str) -> Decimal | None:
    r"""The last `\boxed{}` with a number, else what follows the last `####`, else the last number."""
    for content in reversed(_boxed(text)):
        if found := _LAST.findall(content):
            return _value(found[-1])
    for pattern in (_MARKED, _LAST):
        if found := pattern.findall(text):
            return _value(found[-1])
    return None


def _boxed(text: str) -> list[str]:
    """Contents of every `\\boxed{}`, braces inside included."""
    contents = []
    for match in _BOXED.finditer(text):
        depth, at = 1, match.end()
        while at < len(text) and depth:
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            at += 1
        contents.append(text[match.end() : at - 1 if depth == 0 else at])
    return contents


def _value(text: str) -> Decimal:
    return Decimal(text.replace(",", ""))
