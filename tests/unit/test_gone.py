"""What a stream leaves behind: nothing once it is over, and an abort where its client has gone."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from sglang_dflash.serving.aborts import standing_for
from sglang_dflash.serving.door import open_door


class State:
    """Of a request that is being answered."""


class Manager:
    """A tokenizer manager that notes what it aborts."""

    create_abort_task = TokenizerManager.create_abort_task
    server_args = SimpleNamespace(tokenizer_worker_num=2)  # first tokens have no way of their own
    recv_from_detokenizer = None

    def __init__(self) -> None:
        self.rid_to_state: dict[str, State] = {}
        self.aborted: list[str] = []

    def abort_request(self, rid: str) -> None:
        self.aborted.append(rid)


@pytest.fixture
def manager() -> Manager:
    manager = Manager()
    open_door(FastAPI(), manager)
    return manager


def ended(manager: Manager, *rids: str) -> list[Callable[[], None]]:
    """A stream has ended, no matter how: what is still to be done then, of which nothing may keep the request."""

    async def end() -> list[Callable[[], None]]:
        later: list[Callable[[], None]] = []
        loop = asyncio.get_running_loop()
        loop.call_later = lambda _, call, *given: later.append(lambda: call(*given))
        request = GenerateReqInput(text=["a"] * len(rids), stream=True)
        kept, background = weakref.ref(request), manager.create_abort_task(request)
        request.rid = list(rids)
        request.is_single = len(rids) == 1
        if request.is_single:
            [request.rid] = rids
        del request
        task = asyncio.create_task(background())
        del background
        for _ in range(3):
            await asyncio.sleep(0)
        assert task.done() and kept() is None
        return later

    return asyncio.run(end())


def test_a_stream_that_is_over(manager: Manager) -> None:
    """Its id may be another's soon."""
    assert not ended(manager, "a")
    assert not ended(manager, "a", "b")


@pytest.mark.parametrize("rids", [("a",), ("a", "b")])
def test_a_client_that_has_gone(manager: Manager, rids: tuple[str, ...]) -> None:
    """All of its requests that still run are aborted, after a while as the release does."""
    manager.rid_to_state = {rid: State() for rid in (rids[-1], "another's")}
    [later] = ended(manager, *rids)
    assert not manager.aborted
    later()
    assert manager.aborted == [rids[-1]]


@pytest.mark.parametrize("others", [{}, {"a": State()}])
def test_an_id_that_has_another_owner_by_then(manager: Manager, others: dict[str, State]) -> None:
    """Who asks again under the id of what has ended meanwhile is not aborted for it."""
    manager.rid_to_state = {"a": State()}
    [later] = ended(manager, "a")
    manager.rid_to_state = others
    later()
    assert not manager.aborted


@pytest.mark.parametrize("answered", [True, False])
def test_copies_that_run_under_other_ids(manager: Manager, answered: bool) -> None:
    batch = standing_for(manager, None, SimpleNamespace(rid=["a", "b"]))
    with nullcontext() if answered else batch:
        assert len(ended(manager, "a", "b")) == (not answered)
