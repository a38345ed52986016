"""A lone request's first token does not wait for the detokenizer; what follows goes through it, in order."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import requests

from tests.server.checks import assert_same
from tests.server.harness import CHOSEN_WORKERS, Server, events, generate_body, running

ARGUMENTS = ("--enable-metrics", "--stream-interval", "8")
TOKENS = 40
FIRST_SECONDS = 20  # without a way around the detokenizer there is never a first token


@pytest.fixture(scope="module", params=CHOSEN_WORKERS)
def server(request: pytest.FixtureRequest, logs: Path) -> Iterator[Server]:
    log = logs / f"first-tokens-{request.param}.log"
    with running(log, *ARGUMENTS, worker=request.param) as server:
        yield server


@contextmanager
def stopped_detokenizer(server: Server) -> Iterator[None]:
    """Yields while it is stopped."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    [process] = [each for each in children if "sglang::detokenizer" in "".join(each.cmdline())]
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


def once_free(server: Server, body: dict) -> requests.Response:
    """The answer under an id that is free as soon as the detokenizer has passed the end of its owner on."""
    deadline = time.monotonic() + FIRST_SECONDS
    while True:
        response = server.post("/generate", body, stream=True)
        if response.status_code == 200 or time.monotonic() > deadline:
            return response
        assert "Duplicate request IDs" in response.text
        time.sleep(0.05)


def observed(server: Server, name: str) -> float:
    lines = server.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"sglang:{name}{{"))


def test_the_detokenizer_is_not_waited_for(
    server: Server, plain: Server, prompts: list[str]
) -> None:
    """The first token comes while it is stopped, and is neither lost nor told twice; it is observed once."""
    expected = plain.generate(prompts[50], max_new_tokens=TOKENS)
    before = observed(server, "time_to_first_token_seconds_count")
    body = generate_body(prompts[50], max_new_tokens=TOKENS) | {"stream": True}
    with stopped_detokenizer(server):
        url = f"{server.url}/generate"
        asked = requests.post(url, json=body, stream=True, timeout=FIRST_SECONDS)
        parts = events(asked)
        first = next(parts)
    assert first["output_ids"] == expected["output_ids"][:1]
    assert first["meta_info"]["completion_tokens"] == 1 and first["text"]
    rest = list(parts)
    lengths = [part["meta_info"]["completion_tokens"] for part in (first, *rest)]
    assert lengths == sorted(set(lengths)) and len(lengths) > 2
    assert all(later["text"].startswith(first["text"]) for later in rest)
    assert_same(rest[-1], expected, plain, prompts[50])
    assert observed(server, "time_to_first_token_seconds_count") == before + 1
    server.check_idle()


@pytest.mark.parametrize("asked", [{"return_logprob": True}, {}], ids=["logprobs", "many"])
def test_what_comes_the_long_way(
    server: Server, plain: Server, prompts: list[str], asked: dict
) -> None:
    """Log-probabilities, and requests of many clients: all parts, once and in order."""
    mine = prompts[60:76] if not asked else prompts[60:62]

    def parts_of(prompt: str) -> list[dict]:
        body = generate_body(prompt, max_new_tokens=TOKENS) | {"stream": True} | asked
        with server.post("/generate", body, stream=True) as response:
            return list(events(response))

    with ThreadPoolExecutor(len(mine)) as pool:
        answers = list(pool.map(parts_of, mine))
    for prompt, parts in zip(mine, answers, strict=True):
        lengths = [part["meta_info"]["completion_tokens"] for part in parts]
        assert lengths == sorted(set(lengths))
        assert_same(parts[-1], plain.generate(prompt, max_new_tokens=TOKENS), plain, prompt)
        if asked:
            assert len(parts[-1]["meta_info"]["output_token_logprobs"]) == lengths[-1]
    server.check_idle()


def test_an_aborted_request(server: Server, prompts: list[str]) -> None:
    """Whose first token the detokenizer still has to pass on; the same id may be asked for again."""
    body = generate_body(prompts[51], max_new_tokens=1000, ignore_eos=True)
    body |= {"stream": True, "rid": "twice"}
    with stopped_detokenizer(server):
        with server.post("/generate", body, stream=True) as response:
            next(events(response))
        server.post("/abort_request", {"rid": "twice"})
    again = body | generate_body(prompts[51], max_new_tokens=TOKENS)
    with once_free(server, again) as response:
        lengths = [part["meta_info"]["completion_tokens"] for part in events(response)]
    assert lengths[0] == 1 and lengths == sorted(set(lengths))
    server.check_idle()
