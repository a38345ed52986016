"""Targets whose sliding layers have a pool of their own, in graphs: gpt-oss, and MiMo-V2-Flash with its other heads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.checks import accept_length, assert_tie
from tests.server.harness import CHOSEN_WORKERS, Server, running
from tests.unit.decoders import write_drafter
from tests.unit.sliding import (
    DRAFTER_ON_GPUS,
    ON_GPUS,
    PROMPTS,
    TOKENS,
    write_gpt_oss,
    write_mimo,
)

LONG = [[(13 * i + n) % 300 + 5 for i in range(400 + 40 * n)] for n in range(4)]
ASKED = [*PROMPTS, *LONG]
# The release's check of slots while requests run knows one pool; its check of an idle server knows both.
ONCE_IDLE = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "0"}
WAYS = {
    "fa3": (),
    "pages": ("--page-size", "64", "--speculative-dflash-verify", "auto"),
    "triton": ("--speculative-dflash-attention", "triton"),
    "backend": ("--speculative-dflash-attention", "backend"),
}


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_drafter(tmp_path_factory.mktemp("drafter"), **DRAFTER_ON_GPUS)


@pytest.fixture(scope="module", params=["gpt-oss", "mimo"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "mimo":
        return write_mimo(folder, embedding=0.4, **ON_GPUS)
    return write_gpt_oss(folder, embedding=0.4)


@pytest.fixture(scope="module")
def pair(target: Path, logs: Path) -> Iterator[tuple[Server, list[list[int]]]]:
    """Plain decoding of the same build, and what it answers."""
    log = logs / f"{target.name}-plain.log"
    given = ("--model-path", str(target), "--skip-tokenizer-init")
    with running(log, *given, **ONCE_IDLE) as plain:
        yield plain, [plain.generate(ids, **TOKENS)["output_ids"] for ids in ASKED]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("worker", CHOSEN_WORKERS)
def test_equal(
    worker: str,
    way: str,
    target: Path,
    drafter: Path,
    pair: tuple[Server, list[list[int]]],
    logs: Path,
) -> None:
    """Beyond windows, alone and all at once, with prompts beside rounds and with what the prefix cache has."""
    plain, expected = pair
    log = logs / f"{target.name}-{worker}-{way}.log"
    given = ("--model-path", str(target), "--skip-tokenizer-init")
    given += ("--speculative-draft-model-path", str(drafter), *WAYS[way])
    with running(log, *given, worker=worker, **ONCE_IDLE) as server:
        assert ("without CUDA graphs" in log.read_text()) == (way == "backend")
        for concurrency in (1, len(ASKED), len(ASKED)):
            answers = server.generate_all(ASKED, concurrency, **TOKENS)
            for prompt, answer, ids in zip(ASKED, answers, expected, strict=True):
                if answer["output_ids"] != ids:
                    assert_tie(answer["output_ids"], ids, plain, prompt)
            assert accept_length(answers) > 1.1
        server.check_idle()
