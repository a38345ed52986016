"""Memory that a GPU server releases and resumes, with graphs that were captured before."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.server.checks import accept_length, assert_same
from tests.server.harness import CHOSEN_WORKERS, TARGET, Server, running
from tests.server.test_weights import occupy, refused, updated

ASKED = dict(max_new_tokens=100)
GRAPHS = {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1"}
# Arguments, environment, and whether the target's weights come back by themselves.
WAYS: dict[str, tuple[tuple[str, ...], dict[str, str], bool]] = {
    "graphs stay": ((), {}, False),
    "graphs go": ((), GRAPHS, False),
    "rows that pay": (("--speculative-dflash-verify", "auto"), GRAPHS, False),
    "backed up": (("--enable-weights-cpu-backup",), {}, True),
    "without graphs": (("--disable-cuda-graph",), {}, False),
    "triton, pages": (("--attention-backend", "triton", "--page-size", "16"), GRAPHS, False),
}
RELEASED = 0.8  # of what it should be: the library gives back whole segments


def used() -> int:
    """Bytes of the GPU that are taken, by whomever."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def settled(looked: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while not (seen := looked()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return seen


@pytest.fixture(params=[(worker, way) for worker in CHOSEN_WORKERS for way in WAYS])
def server(request: pytest.FixtureRequest, logs: Path) -> Iterator[tuple[Server, bool]]:
    worker, way = request.param
    arguments, variables, comes_back = WAYS[way]
    log = logs / f"saver-{worker}-{way.replace(' ', '-')}.log"
    with running(log, "--enable-memory-saver", *arguments, worker=worker, **variables) as started:
        yield started, comes_back


def test_released_and_resumed(
    server: tuple[Server, bool], plain: Server, prompts: list[str]
) -> None:
    """The memory is there for others; afterwards answers, and what of the drafts is accepted, are as before."""
    saver, comes_back = server

    def answers() -> float:
        made = saver.generate_all(prompts[:12], 4, **ASKED)
        for prompt, answer in zip(prompts, made, strict=False):
            assert_same(answer, plain.reference(prompt, **ASKED), plain, prompt)
        return accept_length(made)

    before, full = answers(), used()
    kv = saver.info()["memory_usage"]["kvcache"] * (1 << 30)
    for _ in range(2):
        occupy(saver, "release", "kv_cache")
        assert settled(lambda: full - used() > RELEASED * kv), (full, used(), kv)
        assert refused(saver, "/generate", _asked(prompts[0]), status=503)
        occupy(saver, "release")
        assert saver.get("/health").status_code == 200
        occupy(saver, "resume", "weights")
        if not comes_back:
            assert updated(saver, "disk", model_path=str(TARGET))[0]
        occupy(saver, "resume", "kv_cache", "cuda_graph")
        assert answers() == pytest.approx(before, rel=0.1)
    assert settled(lambda: abs(full - used()) < 0.1 * full), (full, used())
    saver.check_idle()


def _asked(prompt: str) -> dict[str, Any]:
    return {"text": prompt, "sampling_params": {"max_new_tokens": 4}}
