"""Prompts that arrive while others decode go into the graphs of their rounds."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.server.checks import accept_length, assert_same
from tests.server.harness import CHOSEN_WORKERS, Server, running
from tests.server.riders import LENGTHS, RIDERS, SHORT, decoding, ran

ARGUMENTS = (
    "--enable-metrics",
    *("--context-length", "2048", "--reasoning-parser", "qwen3"),
)


@pytest.mark.parametrize(
    ("page_size", "ranks", "attention"),
    [(1, 1, "auto"), (16, 1, "auto"), (1, 2, "auto"), (16, 1, "triton")],
)
@pytest.mark.parametrize("worker", CHOSEN_WORKERS)
def test_prompts_ride(
    worker: str,
    page_size: int,
    ranks: int,
    attention: str,
    logs: Path,
    plain: Server,
    tokenizer,
    prompts: list[str],
) -> None:
    """Of all lengths, with and without a prefix that is cached: all answer as plain decoding does."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    log, text = (
        logs / f"prompts-{worker}-{page_size}-{ranks}-{attention}.log",
        "".join(prompts[100:140]),
    )
    ids, riders = tokenizer.encode(text), prompts[90:94]
    asked = [ids[20 * i :][:length] for i, length in enumerate(LENGTHS)]
    asked += [[*asked[-1][:700], *ids[30 * i :][:20]] for i in range(4)]
    arguments = (*ARGUMENTS, "--page-size", str(page_size), "--tp-size", str(ranks))
    arguments += ("--speculative-dflash-attention", attention)
    with running(log, *arguments, worker=worker) as server, ThreadPoolExecutor(16) as pool:
        assert "graphs of prompts" in log.read_text()
        with decoding(server, pool, riders, **RIDERS) as decoded:
            before = ran(server)
            answers = list(pool.map(lambda prompt: server.generate(prompt, **SHORT), asked))
            moved = ran(server) - before
        assert moved["in_rounds"] > moved["alone"]
        pairs = [(asked, SHORT, answers), (riders, RIDERS, decoded)]
        for each, sampling, made in pairs:
            expected = plain.references(each, **sampling)
            for prompt, answer, reference in zip(each, made, expected, strict=True):
                assert_same(answer, reference, plain, prompt)
        assert accept_length([*answers, *decoded]) > 1.5
        server.check_idle()
