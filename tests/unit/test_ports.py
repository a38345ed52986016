"""Ports of the servers that tests start: what one run has chosen, no other run chooses."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server import harness

ANOTHER_RUN = """
import random, sys
from tests.server import harness
ports = iter(map(int, sys.argv[1:]))
random.SystemRandom.randrange = lambda *_: next(ports)
print(harness.free_port())
"""


def test_chosen_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while nobody listens there yet."""
    ports: Iterator[int] = iter([harness.free_port(), mine := harness.free_port()])
    monkeypatch.setattr(random.SystemRandom, "randrange", lambda *_: next(ports))
    with pytest.raises(StopIteration):  # both are taken, by this run itself
        harness.free_port()
    monkeypatch.undo()
    other = harness.free_port()
    harness._chosen.pop().close()  # as if that run had ended
    command = [sys.executable, "-c", ANOTHER_RUN, str(mine), str(other)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == [str(other)]


def test_chosen_for_ranks() -> None:
    """Where they meet is no port that the system gives to a client meanwhile; each replica chooses its own."""
    given = harness.command(port=harness.free_port())
    meet = int(given[given.index("--nccl-port") + 1])
    assert 20000 <= meet < 32000
    assert meet in [int(Path(mark.name).name) for mark in harness._chosen]
    assert "--nccl-port" not in harness.command("--dp-size", "2", port=harness.free_port())
