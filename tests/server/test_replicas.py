"""`--dp-size 2`: two replicas behind one port, each with its own drafter, rounds and KV slots."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from tests.server.checks import assert_same, assert_speculated
from tests.server.harness import (
    CHOSEN_WORKERS,
    DFLASH,
    EACH_WAY,
    Server,
    events,
    fails_to_start,
    generate_body,
    group_lives,
    needs_gpus,
    prompts_of,
    running,
)

pytestmark = needs_gpus(2)

BOTH = ("0", "1")
ARGUMENTS = ("--dp-size", str(len(BOTH)), "--enable-metrics")
LONG = {"max_new_tokens": 600, "ignore_eos": True}
ENDLESS = LONG | {"max_new_tokens": 1900}  # what is aborted or killed
FIRST, SECOND = CHOSEN_WORKERS[0], CHOSEN_WORKERS[-1]
END_SECONDS = 20


@pytest.fixture(scope="module", params=CHOSEN_WORKERS)
def server(request: pytest.FixtureRequest, logs: Path) -> Iterator[Server]:
    log = logs / f"replicas-{request.param}.log"
    with running(log, *ARGUMENTS, worker=request.param) as started:
        yield started


def on(replica: str, prompt: str, **sampling: object) -> dict:
    """A request that names its replica."""
    return generate_body(prompt, **sampling) | {"routed_dp_rank": int(replica)}


def counted(server: Server, name: str) -> Counter[str]:
    """A metric by replica."""
    values: Counter[str] = Counter()
    for family in text_string_to_metric_families(server.get("/metrics").text):
        for sample in family.samples:
            if sample.name == f"sglang:{name}":
                values[sample.labels["dp_rank"]] += sample.value
    return values


def loads(server: Server) -> dict[str, dict]:
    return {str(load["dp_rank"]): load for load in server.get("/get_load").json()}


def wait_for_requests(server: Server, requests_of_each: int) -> None:
    deadline = time.monotonic() + 20
    while any(load["num_reqs"] != requests_of_each for load in loads(server).values()):
        assert time.monotonic() < deadline, loads(server)
        time.sleep(0.02)


def test_answers(server: Server, plain: Server, prompts: list[str]) -> None:
    """Those of plain decoding; both replicas took requests, and each counted its own rounds."""
    before = counted(server, "dflash_rounds_total")
    asked = prompts[: prompts_of(16)]
    answers = server.generate_all(asked, concurrency=8)
    rounds: Counter[str] = Counter()
    for prompt, answer in zip(asked, answers, strict=True):
        assert_same(answer, plain.reference(prompt), plain, prompt)
        assert_speculated(answer, 3)
        rounds[str(answer["meta_info"]["dp_rank"])] += answer["meta_info"]["spec_verify_ct"]
    assert rounds.keys() == set(BOTH)
    assert counted(server, "dflash_rounds_total") - before == rounds


def test_a_replica_that_is_named(server: Server, plain: Server, prompts: list[str]) -> None:
    for replica in BOTH:
        answer = server.post("/generate", on(replica, prompts[0])).json()
        assert_same(answer, plain.reference(prompts[0]), plain, prompts[0])
        assert str(answer["meta_info"]["dp_rank"]) == replica
    refused = server.post("/generate", on("2", prompts[0]))
    assert refused.status_code == 400 and "routed_dp_rank=2" in refused.text


def test_abort(server: Server, prompts: list[str]) -> None:
    """It reaches the replica that has the request, whichever that is, and none of the other's."""
    for replica, other in (BOTH, reversed(BOTH)):
        with ThreadPoolExecutor(2) as pool:
            asked = {
                rid: pool.submit(
                    server.post, "/generate", on(rid, prompts[0], **sampling) | {"rid": rid}
                )
                for rid, sampling in ((replica, ENDLESS), (other, LONG))
            }
            wait_for_requests(server, 1)
            assert server.post("/abort_request", {"rid": replica}).status_code == 200
            ends = {rid: answer.result().json()["meta_info"] for rid, answer in asked.items()}
        assert ends[replica]["finish_reason"]["type"] == "abort"
        assert ends[other]["finish_reason"]["type"] == "length"
    wait_for_requests(server, 0)


def test_flush_cache(server: Server, prompts: list[str]) -> None:
    """Every slot of both replicas is free or cached, and then free."""
    wait_for_requests(server, 0)
    for cached in (True, False):
        for replica in BOTH:
            server.post("/generate", on(replica, prompts[1], max_new_tokens=20))
            body = on(replica, prompts[1], max_new_tokens=20)
            if not cached:
                assert server.post("/flush_cache?timeout=20").status_code == 200
            meta = server.post("/generate", body).json()["meta_info"]
            assert (meta["cached_tokens"] > 0) == cached
    assert server.post("/flush_cache?timeout=20").status_code == 200
    assert [load["num_tokens"] for load in loads(server).values()] == [0, 0]


def test_the_controller_rests(server: Server) -> None:
    """With --sleep-on-idle; it would take a core from the replicas otherwise."""
    wait_for_requests(server, 0)
    children = psutil.Process(server.process.pid).children()
    (controller,) = [
        child for child in children if "data_parallel_controller" in child.cmdline()[0]
    ]
    before = controller.cpu_times()
    time.sleep(1)
    after = controller.cpu_times()
    assert after.user + after.system - before.user - before.system < 0.3


def test_no_sessions(server: Server, prompts: list[str]) -> None:
    """In the release the second replica's answer to `/open_session` ends the server."""
    refused = server.post("/open_session", {"capacity_of_str_len": 1000})
    assert refused.status_code == 400
    assert "/open_session is not supported with --dp-size 2" in refused.text
    assert server.generate(prompts[2], max_new_tokens=8)["output_ids"]


def ended(server: Server) -> int:
    """Status of a server that must end with all its processes."""
    status = server.process.wait(END_SECONDS)
    deadline = time.monotonic() + END_SECONDS
    while group_lives(server.process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not group_lives(server.process.pid), "a child outlives its server"
    return status


def test_sigterm(logs: Path, plain: Server, prompts: list[str]) -> None:
    """Requests of both replicas get their whole answers."""
    with (
        running(logs / "replicas-sigterm.log", *ARGUMENTS, worker=FIRST) as server,
        ThreadPoolExecutor(2) as pool,
    ):
        asked = [
            pool.submit(server.post, "/generate", on(replica, prompt, **LONG))
            for replica, prompt in zip(BOTH, prompts, strict=False)
        ]
        wait_for_requests(server, 1)
        server.process.send_signal(signal.SIGTERM)
        for prompt, answer in zip(prompts, asked, strict=False):
            assert_same(answer.result().json(), plain.reference(prompt, **LONG), plain, prompt)
        assert ended(server) == 0


@pytest.mark.parametrize("by_itself", EACH_WAY)
def test_a_replica_is_killed(logs: Path, prompts: list[str], by_itself: bool) -> None:
    """The server ends, with a sentence that says why; the release goes on without it."""
    log = logs / f"replicas-killed-{by_itself}.log"
    with running(log, *ARGUMENTS, worker=SECOND, by_itself=by_itself) as server:
        with server.post(
            "/generate", on("0", prompts[0], **ENDLESS) | {"stream": True}, stream=True
        ) as response:
            stream = events(response)
            next(stream)
            children = psutil.Process(server.process.pid).children(recursive=True)
            (victim,) = [
                child for child in children if child.name().startswith("sglang::scheduler_DP1")
            ]
            os.kill(victim.pid, signal.SIGKILL)
            with pytest.raises(requests.RequestException):
                list(stream)
        assert ended(server) != 0
        log = server.log.read_text(errors="replace")
        assert f"Rank 0 of replica 1 (process {victim.pid}) ended with exit code -9" in log


@pytest.mark.long
def test_with_processes_of_http(logs: Path, plain: Server, prompts: list[str]) -> None:
    """Each of two processes gives requests to both replicas, aborts what either has, and ends with the others."""
    log, workers = logs / "replicas-http.log", ("--tokenizer-worker-num", "2")
    with running(log, *ARGUMENTS, *workers, worker=SECOND, by_itself=True) as server:
        asked = prompts[: prompts_of(16)]
        answers = server.generate_all(asked, concurrency=8)
        for prompt, answer in zip(asked, answers, strict=True):
            assert_same(answer, plain.reference(prompt), plain, prompt)
            assert_speculated(answer, 3)
        assert {str(answer["meta_info"]["dp_rank"]) for answer in answers} == set(BOTH)
        for replica in BOTH:
            with ThreadPoolExecutor(1) as pool:
                body = on(replica, prompts[0], **LONG) | {"rid": f"of {replica}"}
                answer = pool.submit(server.post, "/generate", body)
                deadline = time.monotonic() + 20
                while not sum(load["num_reqs"] for load in server.get("/get_load").json()):
                    assert time.monotonic() < deadline
                    time.sleep(0.02)
                assert server.post("/abort_request", {"rid": f"of {replica}"}).status_code == 200
                assert answer.result().json()["meta_info"]["finish_reason"]["type"] == "abort"
        server.process.send_signal(signal.SIGTERM)
        assert ended(server) == 0


def test_more_than_there_are_gpus(tmp_path: Path) -> None:
    arguments = (*DFLASH, "--device", "cuda", "--dp-size", "64")
    status, output = fails_to_start(tmp_path / "log", *arguments)
    last = output.strip().splitlines()[-1]
    assert status == 1 and "Traceback" not in output, output
    assert last.startswith("error: --dp-size 64 with --tp-size 1 needs 64 GPUs") and last.endswith(
        "."
    )
