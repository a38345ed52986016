"""What clients and operators do to a server, and that it survives, or ends as it should."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import requests

from tests.server.checks import assert_same, assert_speculated, check
from tests.server.harness import (
    CHOSEN_WORKERS,
    DFLASH,
    ROOT,
    WORKERS,
    Server,
    command,
    end,
    environment,
    events,
    free_port,
    generate_body,
    group_lives,
    wait_until_healthy,
)

LONG = {"max_new_tokens": 1500, "ignore_eos": True}


def test_client_goes_away_in_a_stream(dflash: Server, plain: Server, prompts: list[str]) -> None:
    """Its slots come back at once, not when the answer would have ended."""
    body = generate_body(prompts[70], **LONG) | {"stream": True}
    with dflash.post("/generate", body, stream=True) as response:
        next(events(response))
    deadline = time.monotonic() + 10
    while dflash.load()["num_reqs"] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert dflash.load()["num_reqs"] == 0
    check(dflash, plain, prompts[70], max_new_tokens=30)


def test_abort_in_the_queue(dflash: Server, plain: Server, prompts: list[str]) -> None:
    """The server runs 16 at once; the one that waits behind them goes before it began."""
    with ThreadPoolExecutor(17) as pool:
        running = [
            pool.submit(dflash.post, "/generate", generate_body(prompt, **LONG) | {"rid": f"r{i}"})
            for i, prompt in enumerate(prompts[71:87])
        ]
        while dflash.load()["num_reqs"] < 16:
            time.sleep(0.02)
        body = generate_body(prompts[87], **LONG) | {"rid": "waits", "stream": True}
        with dflash.post("/generate", body, stream=True) as response:
            while dflash.load()["num_reqs"] < 17:
                time.sleep(0.02)
            assert dflash.post("/abort_request", {"rid": "waits"}).status_code == 200
            *_, last = events(response)
        assert last["meta_info"]["finish_reason"]["type"] == "abort"
        assert last["meta_info"].get("completion_tokens", 0) == 0
        assert dflash.load()["num_reqs"] >= 1 and not all(each.done() for each in running)
        dflash.post("/abort_request", {"rid": "", "abort_all": True})
    check(dflash, plain, prompts[87], max_new_tokens=30)


def test_abort_in_prefill(either: Server, plain: Server, tokenizer, prompts: list[str]) -> None:
    """A prompt of many chunks, aborted as soon as it is sent, again and again."""
    text = "".join(prompts[88:108])
    prompt = tokenizer.encode(text)[:1900]
    for attempt in range(6):
        rid = f"prefill-{attempt}"
        ids = [*prompt[attempt:], *prompt[:attempt]]  # not in the cache
        body = generate_body(ids, max_new_tokens=100, ignore_eos=True) | {"rid": rid}
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(either.post, "/generate", body)
            time.sleep(0.01 + 0.03 * attempt)
            either.post("/abort_request", {"rid": rid})
            ended = asked.result()
        whole = ended.status_code == 200 and ended.json()["meta_info"]["finish_reason"]["type"]
        assert ended.status_code in (200, 400, 499, 500, 503) and whole != "stop"
    check(either, plain, prompts[88], max_new_tokens=30)


def test_duplicate_ids(dflash: Server, plain: Server, prompts: list[str]) -> None:
    """The second is refused with a sentence; the first goes on."""
    body = generate_body(prompts[89], max_new_tokens=300, ignore_eos=True) | {"rid": "twin"}
    with dflash.post("/generate", body | {"stream": True}, stream=True) as response:
        stream = events(response)
        next(stream)
        second = dflash.post("/generate", body)
        *_, last = stream
    assert second.status_code == 400 and "twin" in second.text
    assert (
        last["output_ids"]
        == plain.reference(prompts[89], max_new_tokens=300, ignore_eos=True)["output_ids"]
    )
    both = {"text": prompts[89:91], "rid": ["same", "same"], "sampling_params": {}}
    answer = dflash.post("/generate", both)
    assert answer.status_code == 400 and "same" in answer.text
    check(dflash, plain, prompts[90], max_new_tokens=30)


@contextmanager
def server_of_its_own(
    worker: str, output: Path, port: int | None = None, *arguments: str
) -> Iterator[Server]:
    """A server that a test may end in its own way; nothing of it is left, whatever happens."""
    port = port or free_port()
    env = environment(**WORKERS[worker]) | {"PYTHONUNBUFFERED": "1"}
    with output.open("w") as out:
        process = subprocess.Popen(
            command(*DFLASH, *arguments, port=port),
            env=env,
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            start_new_session=True,
        )
    try:
        server = Server(process, port, output)
        wait_until_healthy(server)
        yield server
    finally:
        if process.poll() is None or group_lives(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def all_gone(process: subprocess.Popen, seconds: float) -> None:
    """The server ended with a status that is not 0, and left nobody."""
    assert process.wait(seconds) != 0
    deadline = time.monotonic() + 10
    while group_lives(process.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not group_lives(process.pid), "a child outlives its server"


def child(server: Server, title: str) -> psutil.Process:
    for process in psutil.Process(server.process.pid).children(recursive=True):
        if title in " ".join(process.cmdline()):
            return process
    raise AssertionError(f"no process named {title}")


@pytest.mark.parametrize("worker", CHOSEN_WORKERS)
def test_killed_scheduler_and_the_same_port(
    worker: str, plain: Server, prompts: list[str], tmp_path: Path
) -> None:
    """The whole server ends, and the next one starts on its port at once and serves right."""
    port = free_port()
    with server_of_its_own(worker, tmp_path / "first.log", port) as server:
        body = generate_body(prompts[91], **LONG)
        errors: list[Exception] = []

        def ask() -> None:
            try:
                server.post("/generate", body)
            except requests.RequestException as error:
                errors.append(error)

        client = threading.Thread(target=ask)
        client.start()
        time.sleep(0.5)
        child(server, "scheduler").kill()
        all_gone(server.process, 30)
        client.join(30)
        assert errors, "the client of a dead server waits for ever"
    with server_of_its_own(worker, tmp_path / "second.log", port) as server:
        answer = server.generate(prompts[91], max_new_tokens=60)
        assert_same(answer, plain.generate(prompts[91], max_new_tokens=60))
        assert_speculated(answer)
        child(server, "detokenizer").kill()
        all_gone(server.process, 30)


def test_drains(plain: Server, prompts: list[str], tmp_path: Path) -> None:
    """SIGTERM: what runs is answered in full, also after a request that was refused; then it ends."""
    with server_of_its_own(CHOSEN_WORKERS[-1], tmp_path / "log") as server:
        too_long = server.post("/generate", generate_body([5] * 3000, max_new_tokens=4))
        assert too_long.status_code == 400
        batch = {"input_ids": [[5, 6, 7], [5] * 3000], "sampling_params": {"max_new_tokens": 4}}
        assert server.post("/generate", batch).status_code == 400
        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(server.generate, prompt, **LONG) for prompt in prompts[92:96]]
            time.sleep(0.5)
            server.process.terminate()
            answers = [each.result() for each in asked]
        for prompt, answer in zip(prompts[92:96], answers, strict=True):
            assert answer["meta_info"]["completion_tokens"] == LONG["max_new_tokens"]
            assert_same(answer, plain.reference(prompt, **LONG))
        server.process.wait(30)
        deadline = time.monotonic() + 10
        while group_lives(server.process.pid) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not group_lives(server.process.pid)


def test_full_disk(plain: Server, prompts: list[str]) -> None:
    """Nothing that it logs can be written: it starts, serves right, and ends."""
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    with server_of_its_own(CHOSEN_WORKERS[-1], full, None, "--log-requests") as server:
        for prompt in prompts[96:100]:
            answer = server.generate(prompt, max_new_tokens=60)
            assert_same(answer, plain.reference(prompt, max_new_tokens=60))
            assert_speculated(answer)
        server.check_idle()
        end(server.process)
