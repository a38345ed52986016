"""The overlay as a wheel has all of its modules, and runs where this folder is not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILD = "from setuptools.build_meta import build_wheel; build_wheel('..')"
IMPORT = "import sglang_dflash; print(sglang_dflash.__file__, sglang_dflash.worker_class(True))"


def python(code: str, folder: Path, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_wheel(tmp_path: Path) -> None:
    source, installed = tmp_path / "source", tmp_path / "installed"
    skipped = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "sglang_dflash", source / "sglang_dflash", ignore=skipped)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    python(BUILD, source)
    (wheel,) = tmp_path.glob("sglang_dflash-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    modules = {path.relative_to(ROOT) for path in (ROOT / "sglang_dflash").rglob("*.py")}
    assert modules == {path.relative_to(installed) for path in installed.rglob("*.py")}
    told = python(IMPORT, tmp_path, PYTHONPATH=str(installed)).split()
    assert told[0] == str(installed / "sglang_dflash" / "__init__.py")
    assert "DFlashWorkerV2" in told[-1]
