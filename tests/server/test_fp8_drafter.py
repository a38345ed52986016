"""A drafter in FP8: the answers of plain decoding, with drafts that are about as often right."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.checks import accept_length, assert_same, assert_speculated
from tests.server.harness import CHOSEN_WORKERS, DEVICE, Server, in_long, running

FP8 = ("--speculative-draft-model-quantization", "fp8")
FUSED = "the drafter with fused layers in FP8"


@pytest.mark.parametrize("worker", [CHOSEN_WORKERS[-1], *in_long(*CHOSEN_WORKERS[:-1])])
def test_equal(worker: str, logs: Path, plain: Server, prompts: list[str]) -> None:
    asked, log = prompts[:40], logs / f"fp8-drafter-{worker}.log"
    with running(logs / f"own-drafter-{worker}.log", worker=worker) as server:
        own = accept_length(server.generate_all(asked, concurrency=8))
    with running(log, *FP8, worker=worker) as server:
        answers = server.generate_all(asked, concurrency=8)
        for prompt, answer, expected in zip(asked, answers, plain.references(asked), strict=True):
            assert_same(answer, expected, plain, prompt)
            assert_speculated(answer, 3)
        found = accept_length(answers)
        server.check_idle()
    assert 0.95 * own < found and found != own
    assert (FUSED in log.read_text()) == (DEVICE == "cuda")
