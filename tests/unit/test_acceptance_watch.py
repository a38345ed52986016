"""When the log says that nothing is ever accepted."""

from __future__ import annotations

import pytest

from sglang_dflash.serving.acceptance_watch import STEPS, AcceptanceWatch


def spoke(caplog: pytest.LogCaptureFixture) -> int:
    """How often the watch has spoken, of its drafter."""
    return sum(
        "none of the first" in message and "/a/drafter" in message for message in caplog.messages
    )


def test_nothing_accepted(caplog: pytest.LogCaptureFixture) -> None:
    """Once, at the first step at which it is certain, in the middle of a batch or not."""
    watch = AcceptanceWatch("/a/drafter")
    watch.note([1] * (STEPS - 1))
    assert spoke(caplog) == 0
    for _ in range(STEPS):
        watch.note([1] * 7)
    assert spoke(caplog) == 1


@pytest.mark.parametrize("at", [0, 1, STEPS - 1])
def test_something_accepted(caplog: pytest.LogCaptureFixture, at: int) -> None:
    watch = AcceptanceWatch("/a/drafter")
    lengths = [1] * (2 * STEPS)
    lengths[at] = 2
    for length in lengths:
        watch.note([length])
    assert spoke(caplog) == 0


def test_too_early(caplog: pytest.LogCaptureFixture) -> None:
    watch = AcceptanceWatch("/a/drafter")
    watch.note([1] * (STEPS - 1))
    watch.note([])
    assert spoke(caplog) == 0
    watch.note([1])
    assert spoke(caplog) == 1


def test_one_rank_speaks(caplog: pytest.LogCaptureFixture) -> None:
    AcceptanceWatch("/a/drafter", speaks=False).note([1] * STEPS)
    assert spoke(caplog) == 0
