"""The number that an answer to a GSM8K problem gives."""

from __future__ import annotations

import re
from decimal import Decimal

# A minus is a sign unless it stands after an operand: "10-3" ends in 3.
_NUMBER = r"(?:(?<![\d)}])-)?\$?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?"
_LAST = re.compile(_NUMBER)
_MARKED = re.compile(rf"####[^\d\n]*?({_NUMBER})")
_BOXED = re.compile(r"\\boxed\s*\{")
# How LaTeX sets 1,000 and $5.
_LATEX = ((r"{,}", ","), (r"\,", ""), (r"\!", ""), (r"\$", "$"))


def final_number(text: str) -> Decimal | None:
    r"""The number in the last `\boxed{}`, else after the last `####`, else the last number at all.

    What comes before the end of a chain of thought (`</think>`) is not the answer.
    """
    text = text.rpartition("</think>")[2]
    for latex, plain in _LATEX:
        text = text.replace(latex, plain)
    for content in reversed(_boxed(text)):
        if found := _LAST.findall(content):
            return _value(found[-1])
    for pattern in (_MARKED, _LAST):
        if found := pattern.findall(text):
            return _value(found[-1])
    return None


def _boxed(text: str) -> list[str]:
    """Contents of every `\\boxed{}`, braces inside included; one that was cut off runs to the end."""
    contents = []
    for match in _BOXED.finditer(text):
        depth, at = 1, match.end()
        while at < len(text) and depth:
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            at += 1
        contents.append(text[match.end() : at - 1 if depth == 0 else at])
    return contents


def _value(text: str) -> Decimal:
    return Decimal(text.replace(",", "").replace("$", ""))
