"""A server outlives the disk that its log is written to.

`logging` drops what it cannot write. Progress bars and prints raise instead, and one in the scheduler
ends it, with everybody's requests.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable
from typing import Any, TextIO

# No room, none in the quota, a device that fails.
_LOST = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


class LossyStream:
    """A text stream that drops what finds no room; once there is room, it writes again."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        self._try(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, action: Callable, *arguments: Any) -> None:
        try:
            action(*arguments)
        except OSError as error:
            if error.errno not in _LOST:
                raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def outlive_full_disk() -> None:
    """Makes the output of this process lossy; called before its loggers take the streams."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, LossyStream):
            setattr(sys, name, LossyStream(stream))
