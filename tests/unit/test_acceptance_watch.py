"""When the log says that nothing is ever accepted."""

from __future__ import annotations

import pytest

from sglang_dflash.serving.acceptance_watch import (
    STEPS,
    AcceptanceWatch,
    AdapterWatch,
    WeightsWatch,
)


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


def watched(caplog: pytest.LogCaptureFixture, base: int, adapter: int, steps: int = STEPS) -> int:
    """How often it is said of an adapter, when so many drafts of each step are accepted."""
    watch = AdapterWatch({"id": "the adapter"}.__getitem__)
    for _ in range(2 * steps):
        watch.note([None, "id"], [[0] * (1 + base), [0] * (1 + adapter)])
    said = [message for message in caplog.messages if "adapter the adapter" in message]
    assert not said or f"{adapter:.2f} drafts" in said[0] and f"{base:.2f} without" in said[0]
    return len(said)


@pytest.mark.parametrize(("base", "adapter", "said"), [(6, 2, 1), (6, 0, 1), (6, 3, 0), (0, 0, 0)])
def test_adapter(caplog: pytest.LogCaptureFixture, base: int, adapter: int, said: int) -> None:
    """Below half of what is accepted without, and once."""
    assert watched(caplog, base, adapter) == said


def test_adapter_too_early(caplog: pytest.LogCaptureFixture) -> None:
    """Neither after few steps of the adapter, nor without enough of the target alone; vain rounds are none."""
    assert watched(caplog, 6, 0, STEPS // 2 - 1) == 0
    watch = AdapterWatch(str)
    for _ in range(2 * STEPS):
        watch.note(["id", None], [[0], []])
    assert not caplog.messages


def fell(caplog: pytest.LogCaptureFixture) -> int:
    return sum("of the target's weights" in message for message in caplog.messages)


def test_new_weights(caplog: pytest.LogCaptureFixture) -> None:
    """Once, when enough was seen before and after; again when it had been better in between."""
    watch = WeightsWatch()
    watch.new_weights()  # before anything was asked
    watch.note([5] * STEPS)
    watch.new_weights()
    watch.note([2] * (STEPS - 1))
    assert fell(caplog) == 0
    watch.note([2, 2])
    watch.note([2])
    assert fell(caplog) == 1
    assert "since update 2 of the target's weights 1.00 drafts" in caplog.text
    assert "and up to 4.00 were with earlier ones" in caplog.text
    watch.new_weights()
    watch.note([2] * STEPS)
    assert fell(caplog) == 1
    for length, times in ((4, 1), (1, 2)):
        watch.new_weights()
        watch.note([length] * STEPS)
        assert fell(caplog) == times


def test_new_weights_that_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Too few steps before; only one rank speaks."""
    watch, silent = WeightsWatch(), WeightsWatch(speaks=False)
    watch.note([5] * (STEPS - 1))
    silent.note([5] * STEPS)
    for each in (watch, silent):
        each.new_weights()
        each.note([1] * STEPS)
    assert fell(caplog) == 0
