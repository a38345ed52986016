"""Whether kernels stand for the many small steps between a round's passes, which the host launches one by one else.

They do where `round/at_once_check.py` has seen them do the same.
"""

from __future__ import annotations

_used = False


def used() -> bool:
    return _used


def use(kernels: bool) -> None:
    global _used
    _used = kernels
