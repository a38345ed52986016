"""`make lint` holds the order of the rooms: tried on a copy of the package in which a file breaks it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ONE_WAY, ACYCLIC = "Rooms import one way", "No two files know each other"


def broken(folder: Path) -> set[str]:
    """Contracts of pyproject.toml that the package in `folder` breaks."""
    program = Path(sys.executable).with_name("lint-imports")
    command = [program, "--config", ROOT / "pyproject.toml", "--no-cache"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    found = {name for name in (ONE_WAY, ACYCLIC) if f"{name} BROKEN" in done.stdout}
    assert done.returncode == bool(found), done.stdout + done.stderr
    return found


@pytest.fixture
def package(tmp_path: Path) -> Path:
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "sglang_dflash", tmp_path / "sglang_dflash", ignore=ignore)
    return tmp_path / "sglang_dflash"


def test_as_it_is(package: Path) -> None:
    assert broken(package.parent) == set()


@pytest.mark.parametrize(
    ("lower", "higher", "breaks"),
    [
        ("gpu/fa3_attention.py", "sglang_dflash.round.opened", {ONE_WAY}),
        ("round/commit.py", "sglang_dflash.scheduler.results", {ONE_WAY}),
        ("drawing/penalties.py", "sglang_dflash.serving.metrics", {ONE_WAY}),
        ("errors.py", "sglang_dflash.soak", {ONE_WAY}),
        ("scheduler/reserve.py", "sglang_dflash.scheduler.draft_input", {ACYCLIC}),
    ],
)
def test_an_import_against_the_order(
    package: Path, lower: str, higher: str, breaks: set[str]
) -> None:
    """Also one for types alone."""
    with (package / lower).open("a") as file:
        file.write(f"\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import {higher}\n")
    assert broken(package.parent) >= breaks
