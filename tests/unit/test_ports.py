"""Ports of the servers that tests start: what one run has chosen, no other run chooses."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator

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
