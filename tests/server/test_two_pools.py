"""Targets whose sliding layers have a pool of their own: the answers of plain decoding, and no slot lost in either."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest

from tests.server.checks import accept_length
from tests.server.harness import (
    CHOSEN_WORKERS,
    DEVICE,
    Server,
    events,
    generate_body,
    running,
)
from tests.unit.decoders import write_drafter
from tests.unit.sliding import PROMPTS, TOKENS, WINDOW, write_mimo

pytestmark = pytest.mark.skipif(
    DEVICE != "cpu",
    reason="its tiny heads are made for a CPU; tests/gpu/test_two_pools.py has larger ones",
)

# Each size once, and prompts in chunks that are shorter than a window, or no multiple of a page.
PAGES = {
    "v1": ("--page-size", "1", "--chunked-prefill-size", "20"),
    "v2": ("--page-size", "16", "--chunked-prefill-size", "64"),
}
PASSES = (
    *("tests.server.eager_passes", "--piecewise-cuda-graph-max-tokens", "128"),
    *("--speculative-dflash-verify", "all"),
)
# Both pools hold about two requests.
TIGHT = ("--max-total-tokens", "512", "--max-running-requests", "8")
CARELESS = {
    "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "8",
    "SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR": "0",
    "SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS": "1",
}
# The release's check of slots while requests run knows one pool; its check of an idle server knows both.
ONCE_IDLE = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "0"}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory, logs: Path) -> partial[AbstractContextManager]:
    """Starts a server of the target, and with a worker of a drafter that repeats what it sees."""
    folder = tmp_path_factory.mktemp("two-pools")
    target, drafter = write_mimo(folder / "target", embedding=0.4), folder / "drafter"
    drafter.mkdir()
    write_drafter(drafter)
    pair = ("--model-path", str(target), "--skip-tokenizer-init")

    def started(name: str, *arguments: str, worker: str | None = None, **more):
        given = pair + (("--speculative-draft-model-path", str(drafter)) if worker else ())
        log = logs / f"two-pools-{name}-{worker}.log"
        return running(log, *given, *arguments, worker=worker, **more | ONCE_IDLE)

    return started


@pytest.fixture(scope="module")
def expected(start) -> list[list[int]]:
    """What plain decoding answers."""
    with start("plain") as plain:
        answers = [plain.generate(ids, **TOKENS)["output_ids"] for ids in PROMPTS]
    assert sum(len(set(ids)) > 3 for ids in answers) > len(PROMPTS) / 2
    return answers


@pytest.fixture(scope="module", params=CHOSEN_WORKERS)
def server(request: pytest.FixtureRequest, start) -> Iterator[Server]:
    arguments = (*PAGES[request.param], "--enable-streaming-session")
    with start("roomy", *arguments, worker=request.param) as started:
        yield started


def check(server: Server, expected: list[list[int]], concurrency: int) -> list[dict]:
    answers = server.generate_all(PROMPTS, concurrency, **TOKENS)
    assert [answer["output_ids"] for answer in answers] == expected
    assert accept_length(answers) > 1.2
    return answers


def test_equal(server: Server, expected: list[list[int]]) -> None:
    """Contexts of many windows, alone and all at once, then with what the prefix cache has of them."""
    check(server, expected, 1)
    server.check_idle()
    for concurrency in (len(PROMPTS), 2):
        answers = check(server, expected, concurrency)
    assert (
        sum(answer["meta_info"]["cached_tokens"] > WINDOW for answer in answers) > len(answers) / 2
    )
    server.check_idle()


def test_turns(server: Server, expected: list[list[int]]) -> None:
    """A session goes on from K/V of which sliding layers have the end only."""
    session = server.post("/open_session", {"capacity_of_str_len": 10000, "streaming": True}).json()
    prompt, first, rest = PROMPTS[-1], expected[-1][:40], expected[-1][40:]
    half = generate_body(prompt, **TOKENS | {"max_new_tokens": 40})
    turn = {"session_params": {"id": session}}
    assert server.post("/generate", half | turn).json()["output_ids"] == first
    # The next turn's prompt is a token that the answer would have had.
    body = generate_body(rest[:1], **TOKENS | {"max_new_tokens": len(rest) - 1})
    assert server.post("/generate", body | turn).json()["output_ids"] == rest[1:]
    assert server.post("/close_session", {"session_id": session}).status_code == 200
    server.check_idle()


def test_aborts(server: Server, expected: list[list[int]]) -> None:
    """Requests that go when windows have left a part of them."""
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        streams = list(pool.map(partial(first_of_stream, server), PROMPTS))
    assert all(streams)
    server.check_idle()
    check(server, expected, len(PROMPTS))


def first_of_stream(server: Server, prompt: list[int]) -> bool:
    """Reads a stream until windows have moved, and hangs up."""
    body = generate_body(prompt, max_new_tokens=600, ignore_eos=True) | {"stream": True}
    with server.post("/generate", body, stream=True) as response:
        return any(event["meta_info"]["completion_tokens"] > WINDOW for event in events(response))


@pytest.mark.parametrize("worker", CHOSEN_WORKERS)
def test_retraction(start, expected: list[list[int]], worker: str) -> None:
    with start("tight", *PAGES[worker][:2], *TIGHT, worker=worker, **CARELESS) as server:
        answers = check(server, expected, len(PROMPTS))
        assert sum(answer["meta_info"]["total_retractions"] for answer in answers) > 0
        server.check_idle()


def test_prompts_in_rounds(start, expected: list[list[int]]) -> None:
    """Prompts and blocks in one pass, whose sliding layers read tables of their own."""
    worker = CHOSEN_WORKERS[-1]
    module, *arguments = PASSES
    paged = (*arguments, *PAGES[worker])
    with start("passes", *paged, worker=worker, launcher=(module,)) as server:
        for concurrency in (1, len(PROMPTS), len(PROMPTS)):
            check(server, expected, concurrency)
        server.check_idle()


def test_without_prefix_cache(start, expected: list[list[int]]) -> None:
    with start("uncached", "--disable-radix-cache", worker=CHOSEN_WORKERS[0]) as server:
        check(server, expected, len(PROMPTS))
        server.check_idle()
