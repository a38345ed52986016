"""Results are seen before anything is chosen, where nothing overlaps."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import pytest

from sglang_dflash.scheduler.draft_input import DFlashDraftInput
from sglang_dflash.scheduler.look_first import ON_CPU, look_first


def chosen(device: str, overlap: bool = True) -> tuple[list[str], SimpleNamespace]:
    """What a scheduler does, in its order, when it is to choose while a result is pending."""
    done: list[str] = []

    def choose() -> str:
        done.append("choose" if scheduler.last_batch is not None else "nothing to merge")
        return "batch"

    scheduler = SimpleNamespace(
        enable_overlap=overlap,
        server_args=SimpleNamespace(device=device),
        result_queue=deque([("batch before", "result")]),
        running_batch=SimpleNamespace(spec_info=DFlashDraftInput(8, in_flight=8)),
        last_batch=SimpleNamespace(spec_info=None),
        process_batch_result=lambda batch, result: done.append(result),
        get_next_batch_to_run=choose,
    )
    look_first(scheduler)
    assert scheduler.get_next_batch_to_run() == "batch"
    return done, scheduler


def test_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in flight is nothing then, and the release's loop finds no batch whose result it is to take."""
    monkeypatch.delenv(ON_CPU, raising=False)
    done, scheduler = chosen("cpu")
    assert done == ["result", "choose"] and not scheduler.result_queue
    assert scheduler.last_batch is None and scheduler.running_batch.spec_info.lookahead == 8


@pytest.mark.parametrize(("device", "overlap", "on_cpu"), [("cuda", True, ""), ("cpu", True, "1")])
def test_where_something_overlaps(
    device: str, overlap: bool, on_cpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ON_CPU, on_cpu)
    done, scheduler = chosen(device, overlap)
    assert done == ["choose"] and scheduler.result_queue and scheduler.last_batch is not None


def test_a_scheduler_that_does_not_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ON_CPU, raising=False)
    assert chosen("cpu", overlap=False)[0] == ["choose"]
