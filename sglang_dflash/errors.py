"""Errors that a user can mend."""

from __future__ import annotations

import sys
from types import TracebackType


class DFlashError(ValueError):
    """Something that was asked for cannot be done; the message is one sentence for the user.

    A ValueError, so that SGLang answers a refused request with status 400.
    """


def end_with_the_sentence() -> None:
    """Lets a command that a `DFlashError` ends print the sentence instead of a traceback."""
    sys.excepthook = _print_sentence


_previous_hook = sys.excepthook


def _print_sentence(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    if isinstance(error, DFlashError):
        print(f"error: {error}", file=sys.stderr, flush=True)
    else:
        _previous_hook(kind, error, traceback)
