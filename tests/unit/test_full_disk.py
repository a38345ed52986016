"""Output to a disk that is full: dropped, and the status is that of the program."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sglang_dflash.process.full_disk import LossyStream

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
sys.path.insert(0, "sglang_dflash/process")
from full_disk import outlive_full_disk
if {lossy}:
    outlive_full_disk()
    outlive_full_disk()
print("x" * 20000, flush=True)
print("y", file=sys.stderr, flush=True)
sys.exit(7)
"""


@pytest.mark.parametrize(("lossy", "status"), [(True, 7), (False, 1)])
def test_full_disk(lossy: bool, status: int) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-S", "-c", PROGRAM.format(lossy=lossy)]
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=full, timeout=60)
    assert done.returncode in ((status,) if lossy else (status, 120))


def test_room(tmp_path: Path) -> None:
    """What fits is written, and the rest of the stream is as it was."""
    with (tmp_path / "log").open("w") as file:
        stream = LossyStream(file)
        assert stream.write("word\n") == 5
        stream.flush()
        assert (tmp_path / "log").read_text() == "word\n"
        assert stream.encoding == file.encoding and not stream.closed


def test_other_errors() -> None:
    """A stream that is closed is a defect, and stays one."""
    stream = LossyStream(Path("/dev/null").open("w"))
    stream.close()
    with pytest.raises(ValueError):
        stream.write("x")
