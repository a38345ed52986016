"""SGLang's router in front of two servers: requests go to both, past one that died, and to it again when it is back."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import requests

from tests.server.checks import assert_same, assert_speculated, counted
from tests.server.harness import (
    CHOSEN_WORKERS,
    ROOT,
    Server,
    decodes,
    environment,
    events,
    free_port,
    generate_body,
    prompts_of,
    running,
)
from tests.server.processes import start

LONG = {"max_new_tokens": 600, "ignore_eos": True}
LONGER = {"max_new_tokens": 1900, "ignore_eos": True}
# Workers are asked each second, and what two answers say is so.
CHECKS = "--health-check-interval-secs 1 --health-failure-threshold 2 --health-success-threshold 1"


class Routed(NamedTuple):
    """The router, to be asked as a server is, the servers behind it, and what starts the second one."""

    router: Server
    servers: tuple[Server, Server]
    start_second: Callable[[], Server]


@pytest.fixture(scope="module")
def routed(logs: Path) -> Iterator[Routed]:
    ports, workers = (free_port(), free_port()), (CHOSEN_WORKERS[0], CHOSEN_WORKERS[-1])
    with ExitStack() as stack:

        def started(number: int) -> Server:
            log = logs / f"routed-{number}-{time.monotonic_ns()}.log"
            server = running(log, "--enable-metrics", worker=workers[number], port=ports[number])
            return stack.enter_context(server)

        servers = started(0), started(1)
        with router_of(servers, "round_robin", logs) as router:
            yield Routed(router, servers, lambda: started(1))


@contextmanager
def router_of(servers: Sequence[Server], policy: str, logs: Path) -> Iterator[Server]:
    """A router in front of servers, which ends with status 0."""
    port, log = free_port(), logs / f"router-{policy}.log"
    arguments = ["--worker-urls", *(server.url for server in servers), "--port", str(port)]
    arguments += ["--host", "127.0.0.1", "--prometheus-port", str(free_port())]
    arguments += ["--policy", policy, *CHECKS.split()]
    process = start("sglang_router.launch_router", arguments, environment(), ROOT, log)
    router = Server(process, port, log)
    try:
        wait_for_healthy(router, len(servers))
        yield router
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_for_healthy(router: Server, workers: int) -> None:
    """Until the router takes so many for healthy."""
    deadline, told = time.monotonic() + 30, None
    while time.monotonic() < deadline:
        try:
            told = router.get("/readiness").json()
            if told.get("healthy_workers") == workers:
                return
        except requests.ConnectionError:
            assert router.process.poll() is None, router.log.read_text()
        time.sleep(0.1)
    raise TimeoutError(f"{told}, not {workers}")


def rounds(server: Server) -> float:
    return counted(server)["rounds_total", ""]


def is_whole(stream: Iterator[dict]) -> bool:
    """Whether an answer comes to its end."""
    try:
        return list(stream)[-1]["meta_info"]["finish_reason"] is not None
    except requests.RequestException:
        return False


def test_answers(routed: Routed, plain: Server, prompts: list[str]) -> None:
    """Those of plain decoding, streamed or not; both servers took requests."""
    before = [rounds(server) for server in routed.servers]
    asked = prompts[: prompts_of(16)]
    for prompt, answer in zip(asked, routed.router.generate_all(asked, 4), strict=True):
        assert_same(answer, plain.reference(prompt), plain, prompt)
        assert_speculated(answer, 3)
    for prompt in asked[:2]:
        last = list(routed.router.stream(prompt))[-1]
        assert_same(last, plain.reference(prompt), plain, prompt)
    assert all(rounds(server) > old for server, old in zip(routed.servers, before, strict=True))


def test_cache_aware(routed: Routed, plain: Server, prompts: list[str], logs: Path) -> None:
    """Prompts that begin alike go to one server, where both models have K/V of their beginning; others to the other."""
    beginnings = [" ".join(prompts[n : n + 4]) for n in range(20, 36, 4)]
    before = [rounds(server) for server in routed.servers]
    with router_of(routed.servers, "cache_aware", logs) as router:
        for turn, last in enumerate(prompts[40:43]):
            asked = [f"{beginning} {last}" for beginning in beginnings]
            # At once: beginnings that nobody has go to the server that has less to do.
            for prompt, answer in zip(asked, router.generate_all(asked, 4), strict=True):
                assert_same(answer, plain.reference(prompt), plain, prompt)
                assert_speculated(answer, 2)
                meta = answer["meta_info"]
                assert (meta["cached_tokens"] >= 0.5 * meta["prompt_tokens"]) == (turn > 0)
    assert all(rounds(server) > old for server, old in zip(routed.servers, before, strict=True))


def test_refusal(routed: Routed, prompts: list[str]) -> None:
    for stream in (False, True):
        body = generate_body(prompts[0], temperature=-1) | {"stream": stream}
        refused = routed.router.post("/generate", body)
        assert refused.status_code == 400 and "temperature" in refused.text


def test_a_client_goes_away(routed: Routed, prompts: list[str]) -> None:
    body = generate_body(prompts[0], **LONGER) | {"stream": True}
    with routed.router.post("/generate", body, stream=True) as response:
        decodes(events(response))
        # The router's health checks are requests, too.
        assert any(server.load()["num_reqs"] for server in routed.servers)
    for server in routed.servers:
        server.check_idle()


def test_idle_beside_health_checks(routed: Routed) -> None:
    """What a router asks a server that has nothing to do is no leak."""
    server, over = routed.servers[1], threading.Event()

    def ask() -> None:
        while not over.is_set():
            server.get("/health")

    with ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(ask) for _ in range(2)]
        try:
            for _ in range(20):
                server.check_idle()
        finally:
            over.set()
        for each in asking:
            each.result()


def test_one_dies_and_comes_back(routed: Routed, plain: Server, prompts: list[str]) -> None:
    """What it was answering in one piece is asked of the other server; a stream that has begun breaks off."""
    asked = prompts[:4]
    streams = [routed.router.stream(prompt, **LONGER) for prompt in asked[:2]]
    for stream in streams:
        next(stream)
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = [pool.submit(routed.router.generate, prompt, **LONG) for prompt in asked]
        while any(server.load()["num_reqs"] < 2 for server in routed.servers):
            assert not any(answer.done() for answer in answers), "it must die with requests"
        os.killpg(routed.servers[1].process.pid, signal.SIGKILL)
        for prompt, answer in zip(asked, answers, strict=True):
            assert_same(answer.result(), plain.reference(prompt, **LONG), plain, prompt)
    assert sorted(is_whole(stream) for stream in streams) == [False, True]
    wait_for_healthy(routed.router, 1)
    for prompt in asked:
        assert routed.router.generate(prompt, max_new_tokens=8)["output_ids"]
    back = routed.start_second()
    wait_for_healthy(routed.router, 2)
    before = rounds(back)
    routed.router.generate_all(asked, 2)
    assert rounds(back) > before
