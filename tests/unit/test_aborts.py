"""Which requests an abort by id means, where no server can be made to show it."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from sglang.srt.constrained.grammar_manager import GrammarManager
from sglang.srt.managers.io_struct import AbortReq

from sglang_dflash.serving.aborts import abort_family, made_of, standing_for


class Waiting(SimpleNamespace):
    """A request whose grammar is being compiled."""

    def __init__(self, rid: str):
        super().__init__(rid=rid, grammar=Future(), aborted=False)

    def set_finish_with_abort(self, message: str) -> None:
        self.aborted = True


@pytest.mark.parametrize(
    ("asked", "aborted"), [({"rid": "a"}, ["a"]), ({"abort_all": True}, ["ab", "a", "b"])]
)
def test_waiting_for_a_grammar(asked: dict, aborted: list[str]) -> None:
    queue = [Waiting("ab"), Waiting("a"), Waiting("b")]
    GrammarManager.abort_requests(SimpleNamespace(grammar_queue=queue), AbortReq(**asked))
    assert [request.rid for request in queue if request.aborted] == aborted
    assert all(request.grammar.cancelled() == request.aborted for request in queue)


class Manager:
    """A tokenizer manager that notes what it aborts."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    def abort_request(self, rid: str) -> None:
        abort_family(self, rid)
        self.sent.append(rid)


def test_nothing_is_kept() -> None:
    """After a batch its ids mean nothing, and what took one of them meanwhile keeps it."""
    manager, first, second = Manager(), SimpleNamespace(rid=["a_0"]), SimpleNamespace(rid=["a_0"])
    with standing_for(manager, "a", first):
        made_of(manager, "a_0", "copy")
        later = standing_for(manager, "a", second)
        later.__enter__()
    assert manager.sent == ["copy"]
    manager.abort_request("a")
    assert manager.sent == ["copy", "a_0", "a"]
    later.__exit__(None, None, None)
    assert manager.families_by_rid == {}
