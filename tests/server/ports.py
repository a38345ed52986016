"""Ports of the servers that tests start: what one run has chosen, no other run chooses."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO

_chosen: list[IO[str]] = []  # locks of ports


def free_port(count: int = 1) -> int:
    """The first of so many in a row, below those that the system gives to clients, one of which could take it first.

    A server listens seconds after its port was chosen: until this process ends, no other run of the tests chooses it.
    """
    while True:
        first = random.SystemRandom().randrange(20000, 32000 - count)
        ports = range(first, first + count)
        marks = [mark for port in ports if (mark := _mark_of(port))]
        if len(marks) == count:
            _chosen.extend(marks)
            return first
        for mark in marks:
            mark.close()


def _mark_of(port: int) -> IO[str] | None:
    """An open file that keeps other runs from a port; None if it is not free."""
    folder = Path(tempfile.gettempdir()) / f"sglang-dflash-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    mark = (folder / str(port)).open("w")
    with socket.socket() as probe, suppress(OSError):
        fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        probe.bind(("127.0.0.1", port))
        return mark
    mark.close()
    return None
