"""Attention backends of target and drafter, with pages, without graphs: as plain decoding answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.checks import accept_length, assert_same
from tests.server.harness import CHOSEN_WORKERS, Server, running

PROBLEMS = 200
# Target, drafter, page size, and what else.
CASES = {
    "fa3-no-graphs": ("fa3", "fa3", "1", "--disable-cuda-graph"),
    "fa3-page64": ("fa3", "fa3", "64"),
    "fa3-page256": ("fa3", "fa3", "256"),
    "flashinfer": ("flashinfer", "flashinfer", "1"),
    "flashinfer-page16": ("flashinfer", "flashinfer", "16"),
    "fa3-flashinfer": ("fa3", "flashinfer", "1"),
    "flashinfer-fa3": ("flashinfer", "fa3", "16"),
    "triton": ("triton", "triton", "1"),
    "fa3-triton": ("fa3", "triton", "16"),
}


@pytest.mark.parametrize("worker", CHOSEN_WORKERS)
@pytest.mark.parametrize("case", CASES)
def test_backend(case: str, worker: str, logs: Path, plain: Server, prompts: list[str]) -> None:
    target, drafter, page, *more = CASES[case]
    arguments = ("--attention-backend", target, "--speculative-draft-attention-backend", drafter)
    log = logs / f"{case}-{worker}.log"
    with running(
        log, *arguments, "--page-size", page, *more, "--reasoning-parser", "qwen3", worker=worker
    ) as server:
        answers = server.generate_all(prompts[:PROBLEMS], concurrency=8)
        expected = plain.generate_all(prompts[:PROBLEMS], concurrency=8)
        for prompt, answer, reference in zip(prompts, answers, expected, strict=False):
            assert_same(answer, reference, plain, prompt)
        assert 6 <= accept_length(answers) <= 10
        server.check_idle()
