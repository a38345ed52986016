"""How a server ends: told to, killed in parts, killed whole; with a full disk; and the next one on its port.

Every server here starts on the port of the one before, which had a connection open when it ended. All are forked by
the tests; in `make test-long` each is also a command of its own.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import requests

from tests.server.checks import assert_same, assert_speculated, check
from tests.server.harness import CHOSEN_WORKERS, EACH_WAY, Server, free_port, group_lives, running

END_SECONDS = 20  # of which the release waits 2 for clients that may have left
LONG = {"max_new_tokens": 600, "ignore_eos": True}
ENDLESS = LONG | {"max_new_tokens": 1900}  # what is killed

# Which worker does not matter to most of this, so they take turns.
COMMAND = [pytest.mark.long, pytest.mark.command]
FIRST, SECOND = CHOSEN_WORKERS[0], CHOSEN_WORKERS[-1]


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@contextmanager
def started(
    logs: Path, port: int, worker: str, by_itself: bool, output: Path | None = None
) -> Iterator[Server]:
    log = logs / f"shutdown-{time.monotonic_ns()}.log"
    with running(log, worker=worker, port=port, output=output, by_itself=by_itself) as server:
        yield server


def ended(server: Server, within: float = END_SECONDS) -> int:
    """Status of a server that must end; nobody of its process group may outlive it."""
    status = server.process.wait(within)
    deadline = time.monotonic() + within
    while group_lives(server.process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not group_lives(server.process.pid), "a child outlives its server"
    return status


@pytest.mark.parametrize(
    ("worker", "victim"), [(FIRST, "everything"), (SECOND, "scheduler"), (FIRST, "detokenizer")]
)
@pytest.mark.parametrize("by_itself", EACH_WAY)
def test_killed(
    logs: Path,
    port: int,
    plain: Server,
    prompts: list[str],
    worker: str,
    victim: str,
    by_itself: bool,
) -> None:
    """Requests get an end, not silence, and whoever started the server sees a status that is not 0."""
    with started(logs, port, worker, by_itself) as server:
        check(server, plain, prompts[0], max_new_tokens=40)
        stream = server.stream(prompts[1], **ENDLESS)
        next(stream)
        if victim == "everything":
            os.killpg(server.process.pid, signal.SIGKILL)
        else:
            children = psutil.Process(server.process.pid).children(recursive=True)
            (child,) = [child for child in children if child.name() == f"sglang::{victim}"]
            child.kill()
        with pytest.raises(requests.RequestException):
            list(stream)
        assert ended(server) != 0


@pytest.mark.parametrize(
    ("worker", "disk", "by_itself"),
    [
        (SECOND, "full", False),
        (FIRST, "free", False),
        pytest.param(SECOND, "full", True, marks=COMMAND),
        pytest.param(FIRST, "free", True, marks=COMMAND),
    ],
)
def test_sigterm(
    logs: Path,
    port: int,
    plain: Server,
    prompts: list[str],
    worker: str,
    disk: str,
    by_itself: bool,
) -> None:
    """Who is served gets a whole answer; nobody new is served; the status is 0.

    One of the servers has no room for its log from the start.
    """
    output = Path("/dev/full") if disk == "full" else None
    with started(logs, port, worker, by_itself, output) as server, ThreadPoolExecutor(1) as pool:
        check(server, plain, prompts[0], max_new_tokens=40)
        refuse_some(server, prompts)
        server.wait_until_idle()  # one that was left is not one of the two below
        kept = requests.Session()
        assert kept.get(f"{server.url}/get_model_info", timeout=10).status_code == 200
        stream = server.stream(prompts[1], **LONG)
        next(stream)
        whole = pool.submit(server.generate, prompts[2], **LONG)
        server.wait_for_requests(2)
        server.process.send_signal(signal.SIGTERM)
        for client in (kept, requests.Session()):
            with pytest.raises(requests.ConnectionError):
                for _ in range(50):  # it is a moment until the signal is heard
                    client.get(f"{server.url}/get_model_info", timeout=10)
                    time.sleep(0.02)
        answers = {prompts[1]: list(stream)[-1], prompts[2]: whole.result()}
        for prompt, answer in answers.items():
            assert_same(answer, plain.reference(prompt, **LONG), plain, prompt)
            assert_speculated(answer)
        assert ended(server) == 0


def refuse_some(server: Server, prompts: list[str]) -> None:
    """Requests that end in the middle of things; none of them may be waited for."""
    too_long = {"input_ids": [[5] * 5000, [5, 6, 7]], "rid": ["long", "short"]}
    assert server.post("/generate", too_long).status_code == 400
    server.generate(prompts[0], max_new_tokens=4, n=3)
    with server.post("/generate", {"text": prompts[0], "stream": True}, stream=True):
        pass
