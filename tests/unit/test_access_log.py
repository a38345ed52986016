"""When lines of the access log are made."""

from __future__ import annotations

import asyncio
import logging

import pytest

from sglang_dflash.process.access_log import ACCESS_LOGGER, log_after_answers


def test_an_answer_goes_before_its_line(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger(ACCESS_LOGGER)
    log_after_answers()
    log_after_answers()  # once is enough
    done: list[int] = []

    async def answer() -> None:
        logger.info("%s - %d", "client", 200)
        done.append(len(caplog.records))
        await asyncio.sleep(0)
        done.append(len(caplog.records))

    with caplog.at_level(logging.INFO, ACCESS_LOGGER):
        asyncio.run(answer())
        logger.info("without a loop")
    assert done == [0, 1]
    assert caplog.messages == ["client - 200", "without a loop"]
