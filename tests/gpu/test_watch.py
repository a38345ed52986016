"""Rounds by the thousand: memory stays where it is, and the ranks of a group agree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.server.checks import accept_length, assert_same, counted
from tests.server.harness import CHOSEN_WORKERS, Server, running

WATCH = re.compile(r"DFLASH watch: (.*)")
LONG = ("--context-length", "8192", "--speculative-dflash-block-size", "2")


def seen(log: Path) -> list[dict[str, int]]:
    """The lines of the watch, in order; of the first rank."""
    lines = [line for line in log.read_text().splitlines() if "TP" not in line or "TP0" in line]
    found = [WATCH.search(line) for line in lines]
    return [
        {name: int(value) for name, value in (pair.split("=") for pair in match[1].split())}
        for match in found
        if match
    ]


@pytest.mark.parametrize("worker", CHOSEN_WORKERS)
def test_no_memory_is_allocated(worker: str, logs: Path, prompts: list[str]) -> None:
    """1,000 rounds of eight requests that neither come nor go take no memory from the device.

    Blocks of two tokens, and a context beyond what the target was trained for, make so many rounds
    of one batch; what they say does not matter here.
    """
    log = logs / f"memory-{worker}.log"
    variables = {"SGLANG_DFLASH_WATCH": "100", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
    arguments = (*LONG, "--max-total-tokens", "40000")
    with running(log, *arguments, worker=worker, **variables) as server:
        body = {
            "text": prompts[:8],
            "sampling_params": {"temperature": 0, "max_new_tokens": 3000, "ignore_eos": True},
        }
        assert len(server.post("/generate", body).json()) == 8
    lines = [line for line in seen(log) if line["rounds"] >= 200]
    first, last = lines[0], next(line for line in lines if line["rounds"] >= 1200)
    print(worker, first, last)
    assert last["segments"] == first["segments"]
    assert last["reserved"] == first["reserved"]
    assert last["allocated"] <= first["allocated"] + (1 << 20)


@pytest.mark.parametrize("worker", CHOSEN_WORKERS)
@pytest.mark.parametrize(("ranks", "verify"), [(2, "all"), (2, "auto"), (4, "all")])
def test_ranks_agree(
    ranks: int, verify: str, worker: str, logs: Path, plain: Server, prompts: list[str]
) -> None:
    """10,000 rounds at concurrency 1, 4 and 16, compared between the ranks one by one.

    Each rank decides for itself what is verified, how many rounds a step has, and whether results are looked at first.
    """
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    log = logs / f"ranks-{ranks}-{verify}-{worker}.log"
    with running(
        log,
        *("--tp-size", str(ranks), "--reasoning-parser", "qwen3"),
        *("--speculative-dflash-verify", verify, "--enable-metrics"),
        worker=worker,
        SGLANG_DFLASH_WATCH="100",
        SGLANG_DFLASH_ORDER="",
    ) as server:
        for concurrency in (1, 4, 16):
            answers = server.generate_all(prompts[:200], concurrency=concurrency)
            expected = plain.generate_all(prompts[:200], concurrency=concurrency)
            for prompt, answer, reference in zip(prompts, answers, expected, strict=False):
                assert_same(answer, reference, plain, prompt)
            assert (6 if verify == "all" else 3) <= accept_length(answers) <= 10
        while not (lines := seen(log)) or lines[-1]["rounds"] < 10_000:
            server.generate_all(prompts[:200], concurrency=2)
        counts = counted(server)
    assert lines[-1]["disagreements"] == 0
    several = sum(counts["steps_total", str(rounds)] for rounds in range(2, 5))
    print(f"{several:.0f} steps of several rounds, {counts['steps_total', '1']:.0f} of one")
    assert (several > 100) == (verify == "auto" and worker == "v2")


@pytest.mark.parametrize("worker", CHOSEN_WORKERS)
def test_ranks_agree_on_draws(worker: str, logs: Path, prompts: list[str]) -> None:
    """Though each has random numbers of its own: what the first rank drew is what all commit."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    log, arguments = (
        logs / f"draws-{worker}.log",
        ("--tp-size", "2", "--sampling-backend", "pytorch"),
    )
    # At a temperature at which the target is of many minds, which at usual ones it is not.
    drawn = {"temperature": 3.0, "max_new_tokens": 100, "ignore_eos": True}
    with running(
        log,
        *arguments,
        worker=worker,
        launcher=("tests.gpu.own_seeds",),
        SGLANG_DFLASH_WATCH="20",
    ) as server:
        answers = server.generate_all(prompts[:48], concurrency=16, **drawn)
        assert len({tuple(answer["output_ids"]) for answer in answers}) == len(answers)
        server.check_idle()
    assert seen(log)[-1]["rounds"] > 200
    assert seen(log)[-1]["disagreements"] == 0
