"""Queues on a tiny release, and a Python that has the set-up's own tools."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from patches.upstream import sha256
from tests.patches.fake_release import PIN, RELEASE, ROOT, Queue, make_wheel, tree_hash


@pytest.fixture
def empty_queue(tmp_path, capsys) -> Queue:
    """A pinned release without patches, downloaded and not unpacked."""
    queue = Queue(tmp_path, capsys)
    wheel = make_wheel(tmp_path / "build" / "download", "1.0", RELEASE)
    queue.patches.mkdir()
    values = {"version": "1.0", "wheel": wheel.name, "sha256": sha256(wheel)}
    tree = tree_hash(tmp_path / "hash", RELEASE)
    (queue.patches / "pin.toml").write_text(PIN.format(upstream_tree=tree, **values))
    (queue.patches / "series").write_text("")
    return queue


@pytest.fixture
def queue(empty_queue) -> Queue:
    """Two patches to one file, exported and applied."""
    empty_queue.good("apply")
    empty_queue.commit("First change", "sglang/a.py", "line_5 = 5", "line_5 = 55")
    empty_queue.commit("Second change", "sglang/a.py", "line_20 = 20", "line_20 = 0")
    empty_queue.good("refresh")
    return empty_queue


@pytest.fixture
def tool_python() -> str:
    """A Python with pip and wheel: .venv has neither, the set-up's own environment has both."""
    build = Path(os.environ.get("BUILD") or "build")
    for path in (ROOT / build / "bootstrap/bin/python", Path(sys.executable)):
        if path.exists():
            done = subprocess.run([path, "-c", "import pip, wheel"], capture_output=True)
            if done.returncode == 0:
                return str(path)
    pytest.skip("no Python with pip and wheel: run `make setup`")
