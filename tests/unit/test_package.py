"""Importing the package with and without the patched SGLang, and which worker it gives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import sglang_dflash
from sglang_dflash.errors import DFlashError

ROOT = Path(__file__).parents[2]


def run(code: str, *paths: Path) -> subprocess.CompletedProcess:
    """Runs code in an interpreter without site packages, so that only `paths` have an SGLang."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-S", "-c", code]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


def test_stock_sglang(tmp_path: Path) -> None:
    speculative = tmp_path / "sglang" / "srt" / "speculative"
    speculative.mkdir(parents=True)
    (tmp_path / "sglang" / "__init__.py").write_text("raise RuntimeError('imported')")
    (speculative / "spec_info.py").write_text("class SpeculativeAlgorithm: pass\n")
    result = run("import sglang_dflash", tmp_path, ROOT)
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith("ImportError: The SGLang in ") and "run `make setup`" in last
    (speculative / "spec_info.py").write_text("from sglang_dflash import worker_class\n")
    assert run("import sglang_dflash", tmp_path, ROOT).returncode == 0


def test_no_sglang() -> None:
    result = run("import sglang_dflash", ROOT)
    assert result.returncode == 1
    assert "none is installed: run `make setup`" in result.stderr.splitlines()[-1]


def test_a_refusal_ends_with_its_sentence() -> None:
    code = (
        "import sys; sys.path.insert(0, 'sglang_dflash'); import errors\n"
        "errors.end_with_the_sentence()\n"
        "raise errors.DFlashError('--flag 3 is wrong: leave it out.')"
    )
    command = [sys.executable, "-S", "-c", code]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert result.stderr == "error: --flag 3 is wrong: leave it out.\n"
    other = subprocess.run(
        [*command[:-1], code.replace("errors.DFlashError", "ValueError")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert other.returncode == 1
    assert "Traceback" in other.stderr  # a defect keeps its traceback


def test_workers() -> None:
    assert sglang_dflash.worker_class(overlap=False).__name__ == "DFlashWorker"
    assert sglang_dflash.worker_class(overlap=True).__name__ == "DFlashWorkerV2"


def test_error_is_a_value_error() -> None:
    assert issubclass(DFlashError, ValueError)  # SGLang answers those with status 400
