"""Which rounds are replayed from graphs."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.server.harness import CHOSEN_WORKERS, Server, running

# Blocks of two tokens make so many rounds that those of a short drawn request are few.
ARGUMENTS = (
    *("--enable-metrics", "--speculative-dflash-block-size", "2"),
    *("--sampling-backend", "pytorch"),  # which has no kernels to compile in the middle
)


def fallbacks(server: Server) -> int:
    """Rounds that ran kernel by kernel because somebody drew."""
    found = re.findall(
        r'^sglang:dflash_fallbacks_total\{.*reason="sampling".*\} (\S+)',
        server.get("/metrics").text,
        re.M,
    )
    return int(sum(map(float, found)))


KINDS = ({"temperature": 0.7}, {"logit_bias": {"300": 5.0}}, {"min_new_tokens": 5})


@pytest.mark.parametrize("worker", CHOSEN_WORKERS)
def test_who_has_left_gives_the_graphs_back(worker: str, logs: Path, prompts: list[str]) -> None:
    """A short request that draws beside long greedy ones costs them the rounds that it lives, no more."""
    log, long = logs / f"graphs-{worker}.log", {"max_new_tokens": 1500, "ignore_eos": True}
    with running(log, *ARGUMENTS, worker=worker) as server, ThreadPoolExecutor(4) as pool:
        for sampling in KINDS:
            before = fallbacks(server)
            greedy = [pool.submit(server.generate, prompt, **long) for prompt in prompts[:3]]
            short = {"max_new_tokens": 20, "ignore_eos": True} | sampling
            drawn = server.generate(prompts[3], **short)["meta_info"]["spec_verify_ct"]
            rounds = [each.result()["meta_info"]["spec_verify_ct"] for each in greedy]
            cost = fallbacks(server) - before
            print(worker, sampling, "rounds", rounds, "drawn", drawn, "kernel by kernel", cost)
            assert 0 < cost <= drawn + 2
            assert min(rounds) > 10 * drawn
        server.check_idle()
