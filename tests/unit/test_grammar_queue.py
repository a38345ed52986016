"""How long the scheduler looks for grammars that are being compiled."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from sglang.srt.constrained import grammar_manager
from sglang.srt.constrained.grammar_manager import GrammarManager


def waiting(done: bool) -> SimpleNamespace:
    future: Future = Future()
    if done:
        future.set_result(SimpleNamespace(copy=lambda: None))
    return SimpleNamespace(
        grammar=future, grammar_key=("regex", "a"), grammar_wait_ct=0, finished=lambda: False
    )


@pytest.mark.parametrize(
    ("done", "others", "sleeps", "ready"),
    [
        ([True, True], False, 0, 2),  # all are there
        ([True, False], False, 3, 1),  # nobody else waits: 5 ms, in which a grammar may come
        ([True, False], True, 0, 1),  # who runs does not wait
        ([False], True, 0, 0),
    ],
)
def test_how_long(
    done: list[bool], others: bool, sleeps: int, ready: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept, clock = [], iter(range(1000))
    monkeypatch.setattr(
        grammar_manager,
        "time",
        SimpleNamespace(sleep=slept.append, perf_counter=lambda: next(clock)),
    )
    queue = [waiting(each) for each in done]
    manager = SimpleNamespace(
        grammar_backend=SimpleNamespace(set_cache=lambda key, grammar: None),
        grammar_queue=list(queue),
        grammar_sync_size=1,
        SGLANG_GRAMMAR_POLL_INTERVAL=4,
        SGLANG_GRAMMAR_MAX_POLL_ITERATIONS=100,
        scheduler=SimpleNamespace(running_batch=SimpleNamespace(is_empty=lambda: not others)),
    )
    found = GrammarManager.get_ready_grammar_requests(manager)
    assert len(slept) == sleeps and len(found) == ready
    assert manager.grammar_queue == [
        req for req, there in zip(queue, done, strict=True) if not there
    ]
    assert [req.grammar_wait_ct for req in manager.grammar_queue] == [1] * (len(done) - ready)
