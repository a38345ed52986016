"""How the losslessness tool ends, and what it says meanwhile, with servers that only pretend."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_dflash.losslessness.client import ask_all
from sglang_dflash.losslessness.progress import Progress, duration

ROOT = Path(__file__).parents[2]
SERVER = """
import http.server, json, os, pathlib, sys, time

class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, status, body):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def do_GET(self):
        self.answer(200, {"tokenizer_path": "none"})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        mode = os.environ["PRETEND"]
        if mode == "hang":
            time.sleep(3600)
        if mode == "fail":
            return self.answer(500, {"error": {"message": "broken"}})
        time.sleep(0.2)
        meta = {"finish_reason": {"type": "length"}, "spec_verify_ct": 1, "completion_tokens": 2}
        new = asked["sampling_params"]["max_new_tokens"]
        self.answer(200, {"output_ids": [1] * new, "meta_info": meta})

pathlib.Path(os.environ["PIDS"], str(os.getpid())).touch()
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def start(tmp_path: Path) -> Callable[[str], subprocess.Popen]:
    """Starts the tool; its servers answer as told, and leave their process ids in `pids`."""
    package = tmp_path / "sglang"
    (package / "srt" / "speculative").mkdir(parents=True)
    (package / "srt" / "speculative" / "spec_info.py").write_text("# sglang_dflash")
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(SERVER)
    (tmp_path / "pids").mkdir()
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"input_ids": [1, 2]}\n' * 40)

    def run(pretend: str, *options: str) -> subprocess.Popen:
        variables = {"PRETEND": pretend, "PIDS": str(tmp_path / "pids")}
        return subprocess.Popen(
            [sys.executable, "-m", "sglang_dflash.losslessness", "--prompts", str(prompts)]
            + ["--model-path", "x", "--draft-model-path", "y", "--mode", "greedy", *options],
            env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"} | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return run


def lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def started(folder: Path) -> list[int]:
    """Process ids of both servers, once they are asked."""
    deadline = time.monotonic() + 60
    while len(pids := [int(path.name) for path in folder.iterdir()]) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(2)
    return pids


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)]
)
def test_told_to_end(start: Callable, tmp_path: Path, number: signal.Signals) -> None:
    process = start("hang")
    servers = started(tmp_path / "pids")
    process.send_signal(number)
    try:
        output, _ = process.communicate(timeout=15)
        assert process.returncode == 128 + number, output
        assert "Traceback" not in output
        assert not any(lives(pid) for pid in servers)
    finally:
        process.kill()
        for pid in filter(lives, servers):
            os.kill(pid, signal.SIGKILL)


def test_failure_in_the_middle(start: Callable, tmp_path: Path) -> None:
    process = start("fail")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "answers with status 500: broken" in output
    assert not any(lives(int(path.name)) for path in (tmp_path / "pids").iterdir())


def test_limit_and_progress(start: Callable) -> None:
    """As many prompts as it says; an estimate after the first answer, without a terminal, too."""
    output, _ = start("work", "--limit", "5", "--concurrency", "1").communicate(timeout=60)
    assert "Greedy: 5 answers" in output
    assert "greedy, speculative: 0 of 5; time left: known after the first" in output
    assert re.search(r"greedy, speculative: 1 of 5; about \d+ s left", output), output


def test_both_servers_are_asked_at_the_same_time() -> None:
    """Each answer waits for one of the other server; all come back in their order."""
    both = threading.Barrier(2, timeout=10)

    def ask(item: int) -> int:
        both.wait()
        return 10 * item

    progress = Progress(stream=io.StringIO())
    asked = [(ask, range(3)), (ask, [7, 8, 9])]
    assert ask_all("both", asked, 1, progress, 1.0) == [[0, 10, 20], [70, 80, 90]]


def test_estimate() -> None:
    """Twice as many tokens are still to come in the phase that is planned."""
    now, stream = 0.0, io.StringIO()
    progress = Progress({"first": 40, "second": 80}, stream, clock=lambda: now)
    with progress.phase("first", 4, 10) as done:
        now = 5.0
        done()
        assert progress.seconds_left() == 3 * 5 + 8 * 5
        for _ in range(3):
            done()
        assert progress.seconds_left() == 80 * 5 / 40
    with progress.phase("second", 2, 40) as done:
        assert progress.seconds_left() == 80 * 5 / 40
        now = 25.0
        done()
        assert progress.seconds_left() == 20
    assert stream.getvalue().splitlines()[:2] == [
        "first: 0 of 4; time left: known after the first",
        "first: 1 of 4; about 55 s left",
    ]


@pytest.mark.parametrize(
    ("seconds", "told"), [(3.2, "3 s"), (99, "99 s"), (150, "2 min"), (9000, "2.5 h")]
)
def test_duration(seconds: float, told: str) -> None:
    assert duration(seconds) == told
