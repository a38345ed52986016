"""The width of a round may change from round to round; what comes out may not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.checks import accept_length, assert_same
from tests.server.harness import CHOSEN_WORKERS, Server, in_long, running
from tests.server.test_pool import CARELESS

WIDTHS = (2, 5, 9, 16)


@pytest.mark.parametrize("worker", [CHOSEN_WORKERS[-1], *in_long(*CHOSEN_WORKERS[:-1])])
def test_random_widths(worker: str, logs: Path, plain: Server, prompts: list[str]) -> None:
    """Each round draws its width; graphs, reservations and draft KV follow it."""
    variables = {"SGLANG_DFLASH_RANDOM_WIDTHS": ",".join(map(str, WIDTHS))}
    log = logs / f"width-{worker}.log"
    with running(log, "--reasoning-parser", "qwen3", worker=worker, **variables) as server:
        answers = server.generate_all(prompts[:40], concurrency=8)
        for answer, expected in zip(answers, plain.references(prompts[:40]), strict=True):
            assert_same(answer, expected)
        # Narrow rounds commit less, and wide ones still occur.
        assert 3 < accept_length(answers) < 6.5
        assert max(len(a["meta_info"]["spec_accept_histogram"]) for a in answers) > 9
        server.check_idle()


def test_random_widths_in_a_small_pool(logs: Path, plain: Server, prompts: list[str]) -> None:
    """Slots are reserved for the blocks in flight and the widest behind them; what lies beyond has other owners."""
    worker = CHOSEN_WORKERS[-1]
    variables = CARELESS | {"SGLANG_DFLASH_RANDOM_WIDTHS": ",".join(map(str, WIDTHS))}
    log, pool = logs / f"width-pool-{worker}.log", ("--max-total-tokens", "700")
    with running(log, *pool, "--reasoning-parser", "qwen3", worker=worker, **variables) as server:
        sampling = {"max_new_tokens": 120, "ignore_eos": True}
        body = {"text": prompts[:20], "sampling_params": {"temperature": 0} | sampling}
        answers = server.post("/generate", body).json()
        assert sum(answer["meta_info"]["total_retractions"] for answer in answers) >= 5
        expected = plain.references(prompts[:20], **sampling)
        for prompt, answer, reference in zip(prompts, answers, expected, strict=False):
            assert_same(answer, reference, plain, prompt)
        assert 2 < accept_length(answers) < 6.5
        server.check_idle()
