"""The GSM8K sweep on the bundled pair: killed in the middle and resumed, it gives the same rows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from benchmark import bench_gsm8k_sweep
from tests.server.harness import (
    CHOSEN_WORKERS,
    DEVICE,
    DRAFTER,
    PAIR,
    ROOT,
    TARGET,
    Server,
    environment,
    prompts_of,
)

QUESTIONS = prompts_of(16, most=32)
SECONDS = 280
CONCURRENCIES = (2, 8)
# What does not depend on time, nor on who started the server.
SAME = (
    *("backend", "tp", "arm", "concurrency", "error", "questions", "right", "accuracy"),
    *("prompt_tokens", "completion_tokens", "verify_steps", "accept_length"),
    *("accept_length_of_tokens", "accept_histogram", "answers_sha256"),
)


def arguments(output: Path) -> list[str]:
    given = ["--output-file", str(output), "--dataset-path", str(PAIR / "data" / "test.jsonl")]
    given += ["--questions-per-concurrency-base", str(QUESTIONS), "--max-new-tokens", "200"]
    given += ["--max-questions-per-config", str(QUESTIONS)]
    return [*given, "--concurrencies", ",".join(map(str, CONCURRENCIES))]


def sweep(output: Path, *more: str) -> subprocess.Popen:
    """With servers of its own."""
    command = [sys.executable, "benchmark/bench_gsm8k_sweep.py", *arguments(output)]
    command += ["--target-model", str(TARGET), "--draft-model", str(DRAFTER), "--tp-sizes", "1,2"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([*command, *more], cwd=ROOT, env=environment(), **pipes)


def rows(output: Path) -> list[dict]:
    return [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else []


def servers(output: Path) -> list[psutil.Process]:
    """Living processes that were started in the folder of the sweep's logs, as servers are."""
    folder = str(output.with_suffix(".logs"))
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == folder and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


exact = pytest.mark.skipif(DEVICE != "cpu", reason="batches of a GPU round in other ways each time")


# A sweep of plain decoding and one worker starts three servers, one of both starts four.
@pytest.fixture(
    params=[CHOSEN_WORKERS[-1:], pytest.param(CHOSEN_WORKERS, marks=pytest.mark.long)],
    ids=",".join,
)
def workers(request: pytest.FixtureRequest) -> list[str]:
    return request.param


@pytest.fixture
def expected(
    tmp_path: Path, plain: Server, workers: list[str], _servers: Callable[[str, str], Server]
) -> list[dict]:
    """Rows of sweeps that nobody interrupts, on the servers of the other tests."""
    output = tmp_path / "whole.jsonl"
    for worker in (None, *workers):
        url = plain.url if worker is None else _servers(worker, "page1").url
        label = () if worker is None else ("--workers", worker)
        given = [*arguments(output), "--base-url", url, *label, "--resume"]
        assert bench_gsm8k_sweep.main(given) == 0
    return rows(output)


def arms_of(workers: list[str]) -> list[tuple[str, int]]:
    return [(arm, c) for arm in ("baseline", *workers) for c in CONCURRENCIES]


@exact
def test_on_servers_that_run(workers: list[str], expected: list[dict]) -> None:
    arms = arms_of(workers)
    assert [(row["arm"], row["concurrency"]) for row in expected] == arms
    assert {row["answers_sha256"] for row in expected} == {expected[0]["answers_sha256"]}
    assert all(row["accuracy"] > 0.9 and row["questions"] == QUESTIONS for row in expected)
    for row in expected[2:]:
        histogram = row["accept_histogram"]
        assert row["accept_length"] > 6 and sum(histogram) == row["verify_steps"] > 0
        # A verify step commits the drafts that it accepts and one more; the prefill gave a token.
        committed = sum(steps * (accepted + 1) for accepted, steps in enumerate(histogram))
        assert committed >= row["completion_tokens"] - QUESTIONS


@exact
@pytest.mark.command
@pytest.mark.long  # four starts of servers as commands
def test_killed_and_resumed(tmp_path: Path, workers: list[str], expected: list[dict]) -> None:
    arms = arms_of(workers)
    torn = tmp_path / "torn.jsonl"
    chosen = ("--workers", ",".join(workers))
    killed = sweep(torn, *chosen)
    deadline = time.monotonic() + SECONDS
    while len(rows(torn)) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(servers(torn)) >= 3
    os.kill(killed.pid, signal.SIGINT)  # Ctrl-C while the first worker serves its second cell
    output, _ = killed.communicate(timeout=60)
    assert killed.returncode == 130 and f"3 of {len(arms)} cells are in" in output, output
    assert servers(torn) == [] and len(rows(torn)) == 3

    resumed = sweep(torn, *chosen, "--resume")
    output, _ = resumed.communicate(timeout=SECONDS)
    assert resumed.returncode == 0, output
    assert f"resumed: 3 of {len(arms)} cells are there already" in output
    assert "tp=2 skipped: this machine has no GPU" in output
    assert "Speedup (DFLASH / baseline)" in output
    assert "| tp \\ conc | 2 | 8 |" in torn.with_suffix(".md").read_text()
    assert servers(torn) == []
    for mine, its in zip(rows(torn), expected, strict=True):
        assert {name: mine[name] for name in SAME} == {name: its[name] for name in SAME}


@pytest.mark.command
@pytest.mark.long
def test_a_server_that_is_not_up_in_time_leaves_nobody(tmp_path: Path) -> None:
    output = tmp_path / "late.jsonl"
    process = sweep(output, "--skip-baseline", "--workers", "v2", "--timeout-s", "1")
    said, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 1, said
    assert servers(output) == []
    assert [row["error"].splitlines()[0] for row in rows(output)] == [
        "the server did not start: v2: it was not healthy after 1 s"
    ] * 2
