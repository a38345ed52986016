"""Aborts by id: an id means what was asked under it, all of that and nothing else."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from tests.server.harness import CHOSEN_WORKERS, Server, decodes, events, generate_body, running

LONG = {"max_new_tokens": 600, "ignore_eos": True}
BLOCKING = {"max_new_tokens": 1900, "ignore_eos": True}
SLOW = BLOCKING | {"temperature": 2.0}
SLOTS = 4
SOON = {
    "SGLANG_REQUEST_STATE_WAIT_TIMEOUT": "1"
}  # seconds until clients without output are looked for


@pytest.fixture(scope="module", params=CHOSEN_WORKERS)
def server(request: pytest.FixtureRequest, logs: Path) -> Iterator[Server]:
    """Few requests run at once, so that others wait."""
    log = logs / f"aborts-{request.param}.log"
    arguments = ("--max-running-requests", str(SLOTS))
    with running(log, *arguments, worker=request.param, **SOON) as started:
        yield started


@pytest.fixture
def pool(server: Server) -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2 * SLOTS) as executor:
        yield executor
    server.check_idle()


def ask(pool: ThreadPoolExecutor, server: Server, **body: Any) -> Future:
    """Asks in the background; gives the answers' ends, or the one answer's."""

    def ends() -> Any:
        answers = server.post("/generate", body).json()
        if isinstance(answers, list):
            return [answer["meta_info"]["finish_reason"]["type"] for answer in answers]
        return answers["meta_info"]["finish_reason"]["type"]

    return pool.submit(ends)


def abort(server: Server, rid: str) -> None:
    assert server.post("/abort_request", {"rid": rid}).status_code == 200


def test_running(server: Server, pool: ThreadPoolExecutor, prompts: list[str]) -> None:
    """An id that only begins with the aborted one is another's."""
    other = ask(pool, server, **generate_body(prompts[1], **LONG), rid="ab")
    own = ask(pool, server, **generate_body(prompts[0], **BLOCKING), rid="a")
    server.wait_for_requests(2)
    abort(server, "a")
    assert own.result() == "abort"
    assert other.result() == "length"


def test_waiting(server: Server, pool: ThreadPoolExecutor, prompts: list[str]) -> None:
    running = [
        ask(pool, server, **generate_body(prompt, **BLOCKING), rid=f"runs-{number}")
        for number, prompt in enumerate(prompts[:SLOTS])
    ]
    server.wait_for_requests(SLOTS)
    other = ask(pool, server, **generate_body(prompts[5], **LONG), rid="wait-10")
    own = ask(pool, server, **generate_body(prompts[4], **BLOCKING), rid="wait-1")
    server.wait_for_requests(SLOTS + 2)
    abort(server, "wait-1")
    assert own.result() == "abort"
    assert not any(answer.done() for answer in running), "nothing had to wait"
    for number in range(SLOTS):
        abort(server, f"runs-{number}")
    assert {answer.result() for answer in running} == {"abort"}
    assert other.result() == "length"


def test_copies(server: Server, pool: ThreadPoolExecutor, prompts: list[str]) -> None:
    """The id of a request with n above 1 means all of its copies."""
    other = ask(pool, server, **generate_body(prompts[1], **LONG), rid="nn")
    own = ask(pool, server, **generate_body(prompts[0], n=3, **BLOCKING), rid="n")
    server.wait_for_requests(4)
    abort(server, "n")
    assert own.result() == ["abort"] * 3
    assert other.result() == "length"


def test_copies_to_be(server: Server, pool: ThreadPoolExecutor, prompts: list[str]) -> None:
    """Aborted before there are copies: the prompt they will share still waits to be run."""
    running = [
        ask(pool, server, **generate_body(prompt, **BLOCKING), rid=f"runs-{number}")
        for number, prompt in enumerate(prompts[:SLOTS])
    ]
    server.wait_for_requests(SLOTS)
    own = ask(pool, server, **generate_body(prompts[5], n=3, **BLOCKING), rid="n")
    server.wait_for_requests(SLOTS + 1)
    abort(server, "n")
    assert own.result() == ["abort"] * 3
    assert not any(answer.done() for answer in running), "nothing had to wait"
    assert server.post("/abort_request", {"abort_all": True}).status_code == 200
    assert {answer.result() for answer in running} == {"abort"}


def test_copies_of_a_batch(server: Server, pool: ThreadPoolExecutor, prompts: list[str]) -> None:
    """One of the ids of a batch means the copies of its prompt, which come first."""
    body = {"text": prompts[:2], "rid": ["p", "pq"], "sampling_params": {"n": 2, **LONG}}
    both = ask(pool, server, **body)
    server.wait_for_requests(4)
    abort(server, "p")
    assert both.result() == ["abort", "abort", "length", "length"]


def test_batch(server: Server, pool: ThreadPoolExecutor, prompts: list[str]) -> None:
    """The one id of a batch means all of it; with a number, one of its prompts."""
    one, all_three = ["length", "abort", "length"], ["abort"] * 3
    for rid, ends, sampling in (("b_1", one, LONG), ("b", all_three, BLOCKING)):
        batch = ask(pool, server, text=prompts[:3], rid="b", sampling_params=sampling)
        server.wait_for_requests(3)
        abort(server, rid)
        assert batch.result() == ends


def test_the_client_of_copies_goes_away(
    server: Server, pool: ThreadPoolExecutor, prompts: list[str]
) -> None:
    """Long before they would have ended: before another that began with them."""
    staying = ask(pool, server, **generate_body(prompts[1], **SLOW), rid="stays")
    server.wait_for_requests(1)
    body = generate_body(prompts[0], n=3, **SLOW) | {"stream": True}
    with server.post("/generate", body, stream=True) as response:
        decodes(events(response))
    until_others_left(server, 1, staying)
    abort(server, "stays")
    assert staying.result() == "abort"


def test_waiting_clients_go_away(
    server: Server, pool: ThreadPoolExecutor, prompts: list[str]
) -> None:
    """Of answers in one piece, while others run on."""
    staying = ask(pool, server, text=prompts[:SLOTS], rid="stays", sampling_params=SLOW)
    server.wait_for_requests(SLOTS)
    leaving = [HTTPConnection(server.url.removeprefix("http://"), timeout=20) for _ in range(2)]
    body = json.dumps(generate_body(prompts[4], **LONG))
    for connection in leaving:
        connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
    server.wait_for_requests(SLOTS + 2)
    for connection in leaving:
        connection.close()
    until_others_left(server, SLOTS, staying)
    abort(server, "stays")
    assert staying.result() == ["abort"] * SLOTS


def until_others_left(server: Server, stay: int, staying: Future) -> None:
    while server.load()["num_reqs"] > stay:
        assert not staying.done(), "they stayed as long"
        time.sleep(0.02)
