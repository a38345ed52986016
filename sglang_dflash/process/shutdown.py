"""SIGTERM: who is served gets the whole answer, nobody new is, and the server ends with status 0.

SGLang looks every five seconds whether a request is left, takes new ones meanwhile, and then kills itself,
so the status is that of a crash. Here uvicorn, which knows what is still to be sent, ends the server.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from types import FrameType
from typing import TYPE_CHECKING

from sglang.srt.managers.tokenizer_manager import ServerStatus, SignalHandler
from sglang.srt.utils import get_bool_env_var
from uvicorn import Server

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.1


class DrainingSignals(SignalHandler):
    """SGLang's handler of signals, made when its loop first runs, with another end on SIGTERM."""

    def __init__(self, tokenizer_manager: TokenizerManager):
        super().__init__(tokenizer_manager)
        # Until SGLang takes the signal over, it is uvicorn's.
        self.server = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
        self.draining: asyncio.Task | None = None

    def sigterm_handler(self, signum: int | None = None, frame: FrameType | None = None) -> None:
        """Drains; SGLang's own end where no request can end, or where waiting is not wanted."""
        manager = self.tokenizer_manager
        if (
            not isinstance(self.server, Server)
            or manager.server_status == ServerStatus.UnHealthy
            or get_bool_env_var("SGL_FORCE_SHUTDOWN")
        ):
            super().sigterm_handler(signum, frame)
        elif self.draining is None:
            logger.info("SIGTERM received: no new requests; ending when the others have theirs.")
            self.draining = asyncio.get_running_loop().create_task(self._drain(self.server))

    async def _drain(self, server: Server) -> None:
        for listener in server.servers:
            listener.close()
        for connection in list(server.server_state.connections):
            connection.shutdown()  # at once, or after the answer that it waits for
        while server.server_state.tasks:
            await asyncio.sleep(POLL_SECONDS)
        # The processes that SGLang now ends are no crash.
        if (watchdog := self.tokenizer_manager._subprocess_watchdog) is not None:
            watchdog.stop()
        server.should_exit = True
