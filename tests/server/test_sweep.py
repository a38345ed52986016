"""The GSM8K sweep on the bundled pair: killed in the middle and resumed, it gives the same rows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.server.harness import DEVICE, PAIR, ROOT, environment

QUESTIONS = 32
SECONDS = 280
# What does not depend on time.
SAME = ("questions", "accuracy", "completion_tokens", "verify_steps", "accept_length")
SAME += ("accept_length_of_tokens", "accept_histogram", "answers_sha256", "key")


def sweep(output: Path, *more: str) -> subprocess.Popen:
    command = [sys.executable, "benchmark/bench_gsm8k_sweep.py", "--output-file", str(output)]
    command += ["--dataset-path", str(PAIR / "data" / "test.jsonl"), "--tp-sizes", "1"]
    command += ["--concurrencies", "1,4", "--workers", "v1,v2", "--max-new-tokens", "200"]
    command += ["--questions-per-concurrency-base", str(QUESTIONS), "--disable-tqdm"]
    command += ["--max-questions-per-config", str(QUESTIONS), *more, "--", "--sleep-on-idle"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=environment(), **pipes)


def rows(output: Path) -> list[dict]:
    return [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else []


def servers(output: Path) -> list[psutil.Process]:
    """Living processes that write into the sweep's logs."""
    folder = str(output.with_suffix(".logs"))
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == folder and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.skipif(DEVICE != "cpu", reason="batches of a GPU round in other ways each time")
def test_killed_and_resumed(tmp_path: Path) -> None:
    whole, torn = tmp_path / "whole.jsonl", tmp_path / "torn.jsonl"
    process = sweep(whole)
    output, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, output
    assert "Speedup (DFLASH v2 / baseline)" in output and "v2 / v1" in output
    expected = rows(whole)
    arms = [("baseline", 1), ("baseline", 4), ("v1", 1), ("v1", 4), ("v2", 1), ("v2", 4)]
    assert [(row["arm"], row["concurrency"]) for row in expected] == arms
    assert {row["answers_sha256"] for row in expected} == {expected[0]["answers_sha256"]}
    assert all(row["accept_length"] > 6 for row in expected[2:])
    assert all(row["accuracy"] > 0.9 and row["questions"] == QUESTIONS for row in expected)

    killed = sweep(torn)
    deadline = time.monotonic() + SECONDS
    while len(rows(torn)) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert servers(torn)
    os.kill(killed.pid, signal.SIGINT)  # Ctrl-C in the middle of v1
    output, _ = killed.communicate(timeout=60)
    assert killed.returncode == 130 and "--resume goes on" in output
    assert servers(torn) == [] and 3 <= len(rows(torn)) < 6

    resumed = sweep(torn, "--resume")
    output, _ = resumed.communicate(timeout=SECONDS)
    assert resumed.returncode == 0, output
    assert servers(torn) == []
    for mine, its in zip(rows(torn), expected, strict=True):
        assert {name: mine[name] for name in SAME} == {name: its[name] for name in SAME}
