"""Streams whose client has gone are aborted, and those that are over leave nothing behind.

The release does it after each stream, whether its client has gone or not, in a task that first sleeps for two seconds.
So long it keeps all that the request was, some 200 objects: with 200 answers in a second more than the requests that
run, and every full garbage collection walks them while all others wait.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING

from starlette.background import BackgroundTask

from sglang_dflash.serving.aborts import family_of

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

_SECONDS = 2  # the release's


def abort_gone(manager: TokenizerManager) -> None:
    """Instead of the release's way to do it; before the first request comes."""

    def create_abort_task(obj: GenerateReqInput) -> BackgroundTask:
        """Called before the request has its ids; what it gives, once the stream has ended in whatever way."""

        async def abort_if_gone() -> None:  # Starlette gives what is no coroutine to a thread
            rids = [obj.rid] if obj.is_single else obj.rid
            found = ((rid, _answered(manager, rid)) for rid in rids)
            running = {rid: weakref.ref(answered) for rid, answered in found if answered}
            if running:
                asyncio.get_running_loop().call_later(_SECONDS, _abort, manager, running)

        return BackgroundTask(abort_if_gone)

    manager.create_abort_task = create_abort_task


def _answered(manager: TokenizerManager, rid: str) -> object | None:
    """What is being answered under an id, if anything is."""
    return manager.rid_to_state.get(rid) or family_of(manager, rid)


def _abort(manager: TokenizerManager, running: Mapping[str, weakref.ref[object]]) -> None:
    """Meanwhile they may have ended, and others may have their ids."""
    for rid, gone in running.items():
        if (answered := _answered(manager, rid)) is not None and answered is gone():
            manager.abort_request(rid)
