"""Fused layers on GPUs: against the release's own forward pass, on one and on two ranks, and in a server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sglang_dflash.gpu.rank_sums import FUSE_SUMS, RankSums, open_rank_sums
from sglang_dflash.gpu.targets import fused_body
from sglang_dflash.gpu.tiling_times import time_tilings
from sglang_dflash.gpu.tilings import Tilings, tilings_of_process
from tests.server.checks import accept_length, assert_same
from tests.server.harness import CHOSEN_WORKERS, Server, running
from tests.server.ports import free_port
from tests.unit.targets import TARGETS, Blocks, difference, make_target, rank_of

ROOT = Path(__file__).parents[2]
# bfloat16 rounds by up to 0.4%, and a layer some ten times, at random; a norm, a residual or a rank that is
# left out or counted twice makes a difference of the size of the values.
ROUNDING = 0.03
# Sizes that tilings and experts' kernels are made for.
SIZES = dict(
    hidden_size=512,
    intermediate_size=1024,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
)
# Blocks of 4 rows each: products by tilings, by algorithms of cuBLAS that are looked for, and by its own; sums that
# start early and that do not.
REQUESTS = (1, 4, 7, 14, 30, 40, 48)
SEARCHED = 4 * 48


def differences(name: str, tilings: Tilings, ranks: RankSums | None) -> float:
    """How far fused layers are from the release's in bfloat16, in this rank."""
    moe = {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}
    sizes = SIZES | (moe if "moe" in name else {})
    model = make_target(name, "cuda", torch.bfloat16, **sizes)
    body = fused_body(model, tilings, ranks, [SEARCHED])
    assert body is not None and any(key.rows == SEARCHED for key in tilings.found)
    found = []
    for requests in REQUESTS:
        blocks = Blocks(model, "cuda", requests)
        expected = blocks.plain()
        found.append(difference(blocks.fused(body), expected))
    return max(found)


def compare(ranks: int, port: int, rank: int, folder: Path) -> dict[str, float]:
    """Of all targets, with sums over the ranks as the environment says, and with tilings that were just found."""
    os.environ["XDG_CACHE_HOME"] = str(folder)
    with rank_of(ranks, rank, port, "cuda"):
        sums = open_rank_sums(SIZES["hidden_size"], 4 * max(REQUESTS), torch.bfloat16)
        # On GPUs without NVLink between them the release sums whatever is asked for.
        print("shared memory", sums is not None and sums.shared is not None, file=sys.stderr)
        tilings = tilings_of_process(time_tilings)
        return {name: differences(name, tilings, sums) for name in TARGETS}


@pytest.mark.parametrize(("ranks", "fuse_sums"), [(1, "0"), (2, "0"), (2, "1"), (4, "0"), (4, "1")])
def test_as_the_release_computes(
    ranks: int, fuse_sums: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hidden states, taps and K/V of Llama, Qwen2, Qwen3 and of mixtures of experts."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    monkeypatch.setenv(FUSE_SUMS, fuse_sums)
    command = [sys.executable, "-m", "tests.gpu.test_fused", str(ranks), str(free_port())]
    started = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        for rank in range(ranks)
    ]
    try:
        for process in started:
            output, _ = process.communicate(timeout=240)
            assert process.returncode == 0
            found = json.loads(output.splitlines()[-1])
            print(found)
            assert len(found) == len(TARGETS)
            assert max(found.values()) < ROUNDING
    finally:
        for process in started:
            process.kill()


@pytest.mark.parametrize(("ranks", "fuse_sums"), [(1, "0"), (2, "0"), (2, "1")])
@pytest.mark.parametrize("worker", CHOSEN_WORKERS)
def test_answers_of_plain_decoding(
    worker: str, ranks: int, fuse_sums: str, logs: Path, plain: Server, prompts: list[str]
) -> None:
    """With both models' layers fused, at batch sizes with tilings and without."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    log = logs / f"fused-{worker}-{ranks}-{fuse_sums}.log"
    sums = {FUSE_SUMS: fuse_sums}
    with running(log, "--tp-size", str(ranks), worker=worker, **sums) as server:
        text = log.read_text(errors="replace")
        assert "DFLASH runs the target with fused layers, the drafter with fused layers" in text
        assert ranks == 1 or "over the ranks" in text
        for concurrency in (1, 8):
            answers = server.generate_all(prompts[:40], concurrency=concurrency)
            expected = plain.generate_all(prompts[:40], concurrency=concurrency)
            for prompt, answer, reference in zip(prompts, answers, expected, strict=False):
                assert_same(answer, reference, plain, prompt)
            assert 6 <= accept_length(answers) <= 10
        server.check_idle()


if __name__ == "__main__":
    size, address, own, cache = *map(int, sys.argv[1:4]), Path(sys.argv[4])
    print(json.dumps(compare(size, address, own, cache)))
