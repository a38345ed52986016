"""Which state of this package runs, so that figures of two states are not figures of one."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

_DIGITS = 16


@cache
def source_digest() -> str:
    """Of the package's Python files and their names, as they lie there now: 16 hexadecimal digits."""
    return digest_of(Path(__file__).parents[1])


def digest_of(folder: Path) -> str:
    """Of a folder's Python files and their names."""
    found = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        content = file.read_bytes()
        found.update(f"{file.relative_to(folder).as_posix()} {len(content)}\n".encode() + content)
    return found.hexdigest()[:_DIGITS]
