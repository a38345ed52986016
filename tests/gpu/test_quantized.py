"""Targets of quantized weights in graphs, by the release's own kernels: answers of plain decoding of the same build."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.checks import assert_same, assert_speculated
from tests.server.harness import CHOSEN_WORKERS, DRAFTER, TARGET, running
from tests.unit.quantized import KINDS, write_quantized

# Layouts in which the release reads a quantized LM head.
HEADS = ("gptq", "gptq-act-order")


@pytest.mark.parametrize(
    ("kind", "head"), [(kind, False) for kind in KINDS] + [(kind, True) for kind in HEADS]
)
def test_equal(kind: str, head: bool, tmp_path: Path, logs: Path, prompts: list[str]) -> None:
    """Alone and all at once; FP8 targets with FP8 drafters. Ties are as close as the same kernels make them."""
    target = write_quantized(Path(TARGET), tmp_path / "target", kind, head)
    drafter = DRAFTER
    if kind.startswith("fp8"):
        drafter = write_quantized(Path(DRAFTER), tmp_path / "drafter", kind)
    pair, asked = ("--model-path", str(target)), prompts[:100]
    if kind.startswith("gptq"):
        pair += ("--dtype", "float16")  # the only one that the release has for these layouts
    with running(logs / f"{kind}-{head}-plain.log", *pair) as plain:
        pair += ("--speculative-draft-model-path", str(drafter))
        for worker in CHOSEN_WORKERS:
            log = logs / f"{kind}-{head}-{worker}.log"
            with running(log, *pair, worker=worker) as server:
                assert "without CUDA graphs" not in log.read_text()
                for concurrency in (1, 16):
                    answers = server.generate_all(asked, concurrency)
                    for prompt, answer in zip(asked, answers, strict=True):
                        assert_same(answer, plain.reference(prompt), plain, prompt)
                        assert_speculated(answer, 2)
                server.check_idle()
