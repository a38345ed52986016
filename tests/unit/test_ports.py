"""Ports of the servers that tests start: what one run has chosen, no other run chooses."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server import harness, ports

ANOTHER_RUN = """
import random, sys
from tests.server import ports
asked = iter(map(int, sys.argv[1:]))
random.SystemRandom.randrange = lambda *_: next(asked)
print(ports.free_port())
"""


def test_chosen_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while nobody listens there yet."""
    tried: Iterator[int] = iter([ports.free_port(), mine := ports.free_port()])
    monkeypatch.setattr(random.SystemRandom, "randrange", lambda *_: next(tried))
    with pytest.raises(StopIteration):  # both are taken, by this run itself
        ports.free_port()
    monkeypatch.undo()
    other = ports.free_port()
    ports._chosen.pop().close()  # as if that run had ended
    command = [sys.executable, "-c", ANOTHER_RUN, str(mine), str(other)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == [str(other)]


def test_chosen_for_ranks() -> None:
    """Where they meet is no port that the system gives to a client meanwhile; those of replicas follow it."""
    given = harness.command(port=ports.free_port())
    meet = int(given[given.index("--nccl-port") + 1])
    assert 20000 <= meet < 32000
    assert meet in [int(Path(mark.name).name) for mark in ports._chosen]
    given = harness.command("--dp-size", "2", port=ports.free_port())
    meet = int(given[given.index("--nccl-port") + 1])
    assert [int(Path(mark.name).name) for mark in ports._chosen[-2:]] == [meet, meet + 1]


def test_chosen_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them, or none: of a row with one that is taken the others stay free."""
    row, other = ports.free_port(2), ports.free_port(2)
    ports._chosen.pop(-4).close()  # the first of the row is free again
    tried = iter([row, other])
    monkeypatch.setattr(random.SystemRandom, "randrange", lambda *_: next(tried))
    with pytest.raises(StopIteration):
        ports.free_port(2)
    mark = ports._mark_of(row)
    assert mark is not None
    mark.close()
