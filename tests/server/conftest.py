"""Servers that live through the session, and problems with their prompts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.server import harness
from tests.server.harness import CHOSEN_WORKERS, PAIR, TARGET, Server, running

# Variants of the server with DFLASH on which the tests of single requests run. The second has pages
# and prefills in chunks that are shorter than most prompts of the tests.
VARIANTS = {
    "page1": ("--enable-metrics",),
    "page16": ("--page-size", "16", "--chunked-prefill-size", "64"),
}
CONTEXT = 2048  # half of the target's own, which is reached in half the time
COMMON = (
    *("--context-length", str(CONTEXT)),
    *("--reasoning-parser", "qwen3"),  # counts reasoning tokens
    *("--tool-call-parser", "qwen25"),
    "--enable-custom-logit-processor",
    "--enable-return-hidden-states",
    "--enable-priority-scheduling",
)
# With overlap the release applies penalties a token late, and how late depends on the load.
PLAIN = (*COMMON, "--disable-overlap-schedule")


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("servers")


@pytest.fixture(scope="session", autouse=True)
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of all processes of this run; at the end all servers ended as they should."""
    own = tmp_path_factory.getbasetemp()
    folder = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    harness.share(folder)
    yield folder
    harness.await_ends()


@pytest.fixture(scope="session")
def answers(shared: Path) -> Path:
    """What plain decoding answered, for all processes of this run; float32 on a CPU is exact."""
    folder = shared / "plain-answers"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def _plain(logs: Path, answers: Path) -> Iterator[Server]:
    with running(logs / "plain.log", *PLAIN, answers=answers) as server:
        yield server


@pytest.fixture(scope="session")
def _servers(logs: Path) -> Iterator[Callable[[str, str], Server]]:
    """Starts each variant of each worker when it is first asked for."""
    started: dict[tuple[str, str], Server] = {}
    with ExitStack() as stack:

        def server(worker: str, variant: str) -> Server:
            if (worker, variant) not in started:
                log = logs / f"{worker}-{variant}.log"
                arguments = (*COMMON, *VARIANTS[variant])
                started[worker, variant] = stack.enter_context(
                    running(log, *arguments, worker=worker)
                )
            return started[worker, variant]

        yield server


@pytest.fixture
def plain(_plain: Server) -> Server:
    """Plain decoding of the same target on the same build."""
    return _plain


@pytest.fixture(params=CHOSEN_WORKERS)
def dflash(request: pytest.FixtureRequest, _servers: Callable) -> Iterator[Server]:
    """Speculation with pages of one token; after each test every KV slot must be free."""
    server = _servers(request.param, "page1")
    yield server
    server.check_idle()


@pytest.fixture(params=[(worker, variant) for worker in CHOSEN_WORKERS for variant in VARIANTS])
def either(request: pytest.FixtureRequest, _servers: Callable) -> Iterator[Server]:
    """Speculation in each variant; after each test every KV slot must be free."""
    server = _servers(*request.param)
    yield server
    server.check_idle()


@pytest.fixture(scope="session")
def problems() -> list[dict[str, str]]:
    """Held-out problems in GSM8K's format: question, answer."""
    return [json.loads(line) for line in (PAIR / "data" / "test.jsonl").open()]


@pytest.fixture(scope="session")
def prompts(problems: list[dict[str, str]], tokenizer) -> list[str]:
    """The problems' questions in the chat format."""
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": problem["question"]}],
            tokenize=False,
            add_generation_prompt=True,
        )
        for problem in problems
    ]


@pytest.fixture(scope="session")
def tokenizer():
    from transformers import AutoTokenizer  # seconds, also where tests are only handed out

    return AutoTokenizer.from_pretrained(TARGET)
