"""When the log says that nothing is ever accepted."""

from __future__ import annotations

import pytest

from sglang_dflash.serving.acceptance_watch import STEPS, AcceptanceWatch


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Steps after which the watch spoke."""
    steps: list[int] = []
    monkeypatch.setattr(AcceptanceWatch, "_warn", lambda self: steps.append(self.steps))
    return steps


def test_nothing_accepted(said: list[int]) -> None:
    """Once, at the first step at which it is certain, in the middle of a batch or not."""
    watch = AcceptanceWatch()
    for _ in range(STEPS):
        watch.note([1] * 7)
    assert said == [STEPS]


@pytest.mark.parametrize("at", [0, 1, STEPS - 1])
def test_something_accepted(said: list[int], at: int) -> None:
    watch = AcceptanceWatch()
    lengths = [1] * (2 * STEPS)
    lengths[at] = 2
    for length in lengths:
        watch.note([length])
    assert said == []


def test_too_early(said: list[int]) -> None:
    watch = AcceptanceWatch()
    watch.note([1] * (STEPS - 1))
    watch.note([])
    assert said == []
    watch.note([1])
    assert said == [STEPS]
