"""A process that is forked for the tests is as one that was started as a command."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

from tests.server.harness import DEVICE, ROOT, environment, group_lives, starter

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU nothing is forked")
SEEN = "tests.server.seen"


def test_sees_the_same(tmp_path: Path) -> None:
    env, log = environment(SGLANG_ENABLE_SPEC_V2="1"), tmp_path / "log"
    seen = []
    for by_itself in (True, False):
        process = starter(by_itself)(SEEN, ["3", "more"], env, ROOT, log)
        assert process.wait(60) == 3
        seen.append(json.loads(log.read_text().splitlines()[-1]))
    assert seen[0] == seen[1]
    assert seen[1]["environment"] == env and seen[1]["leads"]


def test_ends_by_a_signal(tmp_path: Path) -> None:
    process = starter(False)("http.server", ["0"], environment(), ROOT, tmp_path / "log")
    assert process.poll() is None and group_lives(process.pid)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.1)
    process.send_signal(signal.SIGKILL)
    assert process.wait(60) == process.poll() == -signal.SIGKILL
    assert not group_lives(process.pid)


def test_another_environment_imports_for_itself(tmp_path: Path) -> None:
    """What modules read when they are imported may be anything."""
    env = environment(SGLANG_SOMETHING="1")
    process = starter(False)(SEEN, ["0"], env, ROOT, tmp_path / "log")
    assert isinstance(process, subprocess.Popen) and process.wait(60) == 0
