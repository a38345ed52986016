"""1 to 64 clients, whose prompts go into rounds: answers of plain decoding, and as many drafts accepted.

On a GPU prompts are in graphs; a CPU computes the same passes: `eager_passes.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.checks import accept_length, assert_same
from tests.server.harness import CHOSEN_WORKERS, DEVICE, LAUNCHER, Server, running
from tests.server.riders import ran

PASSES = {"cpu": ("tests.server.eager_passes",), "cuda": LAUNCHER}[DEVICE]
ARGUMENTS = (
    *("--enable-metrics", "--reasoning-parser", "qwen3", "--context-length", "2048"),
    *("--max-running-requests", "64", "--speculative-dflash-verify", "all"),
    *("--max-total-tokens", "60000"),  # the problems are still cached when they come again
)
# Fewer sizes of passes: each is run once when the server starts.
PASS_ROWS = ("--piecewise-cuda-graph-max-tokens", "320") if DEVICE == "cpu" else ()
CLIENTS = (1, 8, 16, 32, 64)
WAYS = [(worker, page) for worker in CHOSEN_WORKERS for page in ("1", "16")]
# Held-out problems, and what the serving benchmark asks of them as chat.
PROBLEMS, CHAT = 200, 1000
TOLERANCE = {"cpu": 1e-9, "cuda": 0.005}[DEVICE]
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def alone(logs: Path, prompts: list[str]) -> list[dict]:
    """Answers of a server on which no prompt goes into a round."""
    off = ("--speculative-dflash-prompt-slowdown", "0")
    with running(logs / "traffic-alone.log", *ARGUMENTS, *off, worker=CHOSEN_WORKERS[-1]) as server:
        return server.generate_all(prompts[:CHAT], concurrency=8)


@pytest.fixture(scope="module", params=WAYS, ids="-".join)
def server(request: pytest.FixtureRequest, logs: Path) -> Iterator[Server]:
    worker, page = request.param
    log = logs / f"traffic-{worker}-{page}.log"
    arguments = (*ARGUMENTS, *PASS_ROWS, "--page-size", page)
    with running(log, *arguments, worker=worker, launcher=PASSES) as server:
        yield server


def check(answers: list[dict], prompts: list[str], plain: Server, alone: list[dict]) -> None:
    """What plain decoding answers, in as many rounds as where prompts run by themselves."""
    expected = plain.references(prompts)
    for answer, its, prompt in zip(answers, expected, prompts, strict=True):
        assert_same(answer, its, plain, prompt)
    length = accept_length(alone[: len(answers)])
    assert length > 4 and accept_length(answers) == pytest.approx(length, rel=TOLERANCE)


@pytest.mark.parametrize("clients", CLIENTS)
def test_problems(
    server: Server, plain: Server, prompts: list[str], alone: list[dict], clients: int
) -> None:
    """Without prefixes that are cached, and with."""
    asked, before = prompts[:PROBLEMS], ran(server)
    for cached in (False, True):
        answers = server.generate_all(asked, clients)
        hits = sum(answer["meta_info"]["cached_tokens"] for answer in answers)
        assert (
            hits > sum(answer["meta_info"]["prompt_tokens"] for answer in answers) / 2
        ) == cached
        check(answers, asked, plain, alone)
    assert clients == 1 or (ran(server) - before)["in_rounds"] > 0
    server.check_idle()


@pytest.mark.parametrize("clients", CLIENTS[1::3])
def test_chat(
    server: Server, plain: Server, prompts: list[str], alone: list[dict], clients: int
) -> None:
    check(server.generate_all(prompts[:CHAT], clients), prompts[:CHAT], plain, alone)
    server.check_idle()
