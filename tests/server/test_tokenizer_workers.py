"""`--tokenizer-worker-num 2`: two processes take requests over HTTP, and both know what DFLASH refuses."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.server.checks import assert_same, assert_speculated
from tests.server.harness import CHOSEN_WORKERS, Server, events, generate_body, running, tail

LONG = {"max_new_tokens": 1900, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(logs: Path) -> Iterator[Server]:
    """As a command, since each process of HTTP is started anew."""
    log = logs / "tokenizer-workers.log"
    arguments = ("--tokenizer-worker-num", "2", "--enable-metrics")
    with running(log, *arguments, worker=CHOSEN_WORKERS[-1], by_itself=True) as started:
        deadline = time.monotonic() + 60
        while log.read_text().count("Application startup complete") < 2:
            assert time.monotonic() < deadline, tail(log)
            time.sleep(0.2)
        assert "died" not in log.read_text()
        yield started


def processor_times(server: Server) -> list[float]:
    """Seconds that each process of HTTP has worked."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    workers = [each for each in children if "tokenizer_worker" in "".join(each.cmdline())]
    assert len(workers) == 2
    return [sum(each.cpu_times()[:2]) for each in workers]


def test_answers(server: Server, plain: Server, prompts: list[str]) -> None:
    """Those of plain decoding, streamed and not; both processes have worked."""
    before = processor_times(server)
    asked = prompts[:24]
    answers = server.generate_all(asked, concurrency=8)
    for prompt, answer in zip(asked, answers, strict=True):
        assert_same(answer, plain.reference(prompt), plain, prompt)
        assert_speculated(answer, 3)
    for prompt in asked[:4]:
        body = generate_body(prompt) | {"stream": True}
        with server.post("/generate", body, stream=True) as response:
            *_, last = events(response)
        assert_same(last, plain.reference(prompt), plain, prompt)
    after = processor_times(server)
    assert all(late > early for early, late in zip(before, after, strict=True))
    server.check_idle()


def test_abort(server: Server, prompts: list[str]) -> None:
    """Of a request, whichever process has it."""
    for number in range(4):
        with ThreadPoolExecutor(1) as pool:
            body = generate_body(prompts[0], **LONG) | {"rid": f"mine-{number}"}
            asked = pool.submit(server.post, "/generate", body)
            server.wait_for_requests(1)
            assert server.post("/abort_request", {"rid": f"mine-{number}"}).status_code == 200
            meta = asked.result().json()["meta_info"]
        assert meta["finish_reason"]["type"] == "abort"
    server.check_idle()


def test_refusals(server: Server, prompts: list[str]) -> None:
    """By every process, with a sentence, and forgotten; one that is too long says what is not."""
    for _ in range(6):
        answer = server.post("/generate", generate_body(prompts[0], temperature="x"))
        assert answer.status_code == 400 and "temperature 'x' cannot be read" in answer.text
        answer = server.post("/generate", generate_body([5] * 30_000))
        assert answer.status_code == 400 and "context length" in answer.text
    for path in ("/open_session", "/pause_generation", "/load_lora_adapter"):
        refused = server.post(path, {"capacity_of_str_len": 1000} if "open" in path else {})
        assert refused.status_code == 400, refused.text
    server.check_idle()
