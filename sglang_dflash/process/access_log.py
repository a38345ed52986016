"""Lines of the access log are made after the answers that they tell of.

uvicorn logs a request when its answer begins, before it sends the first byte. To make a line and to write it takes
longer than to send that byte, and whoever reads the server's output decides how long.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

ACCESS_LOGGER = "uvicorn.access"


class _AfterAnswers:
    """Stands for a logger's `info`: what the running event loop was given to send goes first."""

    def __init__(self, logger: logging.Logger):
        self._info = logger.info

    def __call__(self, message: str, *values: Any, **options: Any) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self._info(message, *values, **options)
        else:
            loop.call_soon(lambda: self._info(message, *values, **options))


def log_after_answers() -> None:
    """For this process; a second call changes nothing."""
    logger = logging.getLogger(ACCESS_LOGGER)
    if not isinstance(logger.info, _AfterAnswers):
        logger.info = _AfterAnswers(logger)
