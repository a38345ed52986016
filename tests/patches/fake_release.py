"""A tiny release of "sglang" and a queue of patches on it, driven through the command line."""

import os
import subprocess
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from patches.__main__ import main

ROOT = Path(__file__).resolve().parents[2]
NUMBERS = "".join(f"line_{number} = {number}\n" for number in range(30))

HEADER = """\
Subject: {subject}
Description: a reason
 on two lines
Origin: sglang-dflash
Forwarded: not-needed
Drop-When: never
"""

PIN = """\
version = "{version}"
requirement = "sglang=={version}"
wheel = "{wheel}"
sha256 = "{sha256}"
local_version = "{version}+dflash.1"
upstream_tree = "{upstream_tree}"
series_tree = "{upstream_tree}"
max_changed_lines = 20
files = ["sglang/a.py", "sglang/b.py"]
"""


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout


def make_wheel(folder: Path, version: str, files: dict[str, str]) -> Path:
    path = folder / f"sglang-{version}-py3-none-any.whl"
    info = f"sglang-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\nRequires-Dist: torch==0\n"
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
        archive.writestr(f"{info}/METADATA", metadata + "\nLong text\n\nVersion: not this one\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@dataclass
class Queue:
    """patches/, build/ and the commands on them; `run` returns exit status, output and errors."""

    folder: Path
    capsys: pytest.CaptureFixture

    @property
    def patches(self) -> Path:
        return self.folder / "patches"

    @property
    def checkout(self) -> Path:
        return self.folder / "build" / "sglang"

    def run(self, *command: str) -> tuple[int, str, str]:
        places = ["--patches", str(self.patches), "--build", str(self.folder / "build")]
        self.capsys.readouterr()
        status = main([*places, *command])
        return status, *self.capsys.readouterr()

    def good(self, *command: str) -> str:
        status, output, errors = self.run(*command)
        assert status == 0, errors
        return output

    def refused(self, *command: str) -> str:
        """The one line that explains why the command was refused."""
        status, _, errors = self.run(*command)
        assert status == 1
        assert errors.startswith("error: ") and errors.count("\n") == 1, errors
        return errors

    def commit(self, subject: str, name: str, old: str, new: str, header: str = HEADER) -> None:
        path = self.checkout / name
        path.write_text(path.read_text().replace(old, new))
        message = header.format(subject=subject)
        git(self.checkout, "commit", "-q", "-a", "--cleanup=verbatim", "-m", message)

    def files(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.patches.iterdir()}

    def edit(self, pattern: str, old: str, new: str) -> None:
        (path,) = self.patches.glob(pattern)
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    def head_tree(self) -> str:
        return git(self.checkout, "rev-parse", "HEAD:sglang").strip()


def tree_hash(folder: Path, files: dict[str, str]) -> str:
    """Git's hash of the tree `sglang/`, found without the code under test."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    return git(folder, "write-tree", "--prefix=sglang/").strip()


RELEASE = {"sglang/__init__.py": "", "sglang/a.py": NUMBERS, "sglang/b.py": "b = 1\n"}
