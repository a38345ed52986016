"""Attention of blocks in graphs: Triton's as FA3's, and servers with either, whatever K/V are stored in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from tests.gpu.test_graphs import fallbacks
from tests.server.checks import accept_length, assert_same
from tests.server.conftest import PLAIN
from tests.server.harness import CHOSEN_WORKERS, DFLASH, Server, fails_to_start, running

PROBLEMS = 100
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
needs_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")

AUTO = "fa3" if HOPPER else "triton"
FLAG = "--speculative-dflash-attention"


@needs_hopper
@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "lengths", [[216], [16, 17, 500, 2048, 1024], [9000], [40, 3000] * 20], ids=str
)
def test_triton_as_fa3(lengths: list[int], causal: bool, page_size: int) -> None:
    from sglang_dflash.gpu.fa3_attention import Fa3BlockAttention
    from sglang_dflash.gpu.triton_attention import TritonBlockAttention
    from tests.gpu.attention_times import Blocks

    blocks = Blocks(lengths, causal, page_size, layers=1)
    made, expected = (
        blocks.run(blocks.attention(kind)) for kind in (TritonBlockAttention, Fa3BlockAttention)
    )
    torch.testing.assert_close(made, expected, atol=1e-2, rtol=0)


@needs_hopper
@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_narrow_as_fa3(width: int, causal: bool, page_size: int) -> None:
    from sglang_dflash.gpu.fa3_attention import Fa3BlockAttention
    from sglang_dflash.gpu.narrow_attention import NarrowBlockAttention
    from tests.gpu.attention_times import Blocks

    lengths = [width, 127, 250, 2000] * 10
    blocks = Blocks(lengths, causal, page_size, layers=1, width=width)
    made, expected = (
        blocks.run(blocks.attention(kind)) for kind in (NarrowBlockAttention, Fa3BlockAttention)
    )
    torch.testing.assert_close(made, expected, atol=1e-2, rtol=2**-7)


# Rows of each request, and keys that its last row sees.
MIXES = {
    "rows of narrow blocks": [(1 + i % 4, 40 + 50 * i) for i in range(60)] + [(9, 9)],
    "blocks": [(16, 216), (16, 17), (16, 500), (16, 9000)],
    "blocks and prompts": [(16, 40), (16, 3000)] * 10 + [(300, 2500), (0, 0), (1, 1), (67, 67)],
    "a chunk": [(0, 0), (1500, 9000), (36, 36)],
}


@needs_hopper
@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("mix", MIXES)
def test_triton_as_fa3_side_by_side(mix: str, page_size: int) -> None:
    """FA3 as it is told of the longest request, in passes of up to 1,024 rows less than it has."""
    from sglang_dflash.gpu.fa3_attention import Fa3BlockAttention
    from sglang_dflash.gpu.narrow_attention import NarrowBlockAttention
    from sglang_dflash.gpu.triton_attention import TritonBlockAttention
    from tests.gpu.attention_times import Passes

    rows = Passes(MIXES[mix], page_size, layers=1)
    kinds = (Fa3BlockAttention, TritonBlockAttention, NarrowBlockAttention)
    expected, *others = (rows.run(rows.attention(kind)) for kind in kinds)
    for made in others:
        # Rows that see few keys have results of any size, which both round to bfloat16.
        torch.testing.assert_close(made, expected, atol=1e-2, rtol=2**-7)


# Arguments, and what computes attention of target and drafter.
CASES = {
    "auto": ((), AUTO),
    "triton": ((FLAG, "triton"), "triton"),
    "triton-page64": ((FLAG, "triton", "--page-size", "64"), "triton"),
    "flashinfer": (("--attention-backend", "flashinfer"), AUTO),
    "flashinfer-triton": (("--attention-backend", "flashinfer", FLAG, "triton"), "triton"),
    "triton-window": ((FLAG, "triton", "--speculative-dflash-draft-window-size", "64"), "triton"),
    "backend": ((FLAG, "backend"), "backend"),
}


@pytest.mark.parametrize("worker", CHOSEN_WORKERS)
@pytest.mark.parametrize("case", CASES)
def test_attention(case: str, worker: str, logs: Path, plain: Server, prompts: list[str]) -> None:
    arguments, attention = CASES[case]
    log = logs / f"attention-{case}-{worker}.log"
    with running(
        log, *arguments, "--enable-metrics", "--reasoning-parser", "qwen3", worker=worker
    ) as server:
        assert server.info()["dflash_attention"] == {"target": attention, "drafter": attention}
        assert ("DFLASH captured" in log.read_text()) == (attention != "backend")
        answers = server.generate_all(prompts[:PROBLEMS], concurrency=8)
        expected = plain.generate_all(prompts[:PROBLEMS], concurrency=8)
        for prompt, answer, reference in zip(prompts, answers, expected, strict=False):
            assert_same(answer, reference, plain, prompt)
        assert (4 if "window" in case else 6) <= accept_length(answers) <= 10
        assert fallbacks(server) == 0
        server.check_idle()


@pytest.fixture(scope="module")
def plain_with(logs: Path) -> Iterator[Callable[[str, str], Server]]:
    """Plain decoding by backend and dtype of K/V, started when it is first asked for."""
    started: dict[tuple[str, str], Server] = {}
    with ExitStack() as stack:

        def server(backend: str, kv_dtype: str) -> Server:
            key = backend, kv_dtype
            if key not in started:
                arguments = ("--attention-backend", backend, "--kv-cache-dtype", kv_dtype)
                log = logs / f"plain-{backend}-{kv_dtype}.log"
                started[key] = stack.enter_context(running(log, *PLAIN, *arguments))
            return started[key]

        yield server


# Backend, dtype of K/V, and what computes the target's attention. Kernels round products of FP8, and weights of
# keys to it, each in an order of its own, so ties are wider than those of bfloat16.
FP8 = [
    ("fa3", "fp8_e4m3", AUTO),
    ("flashinfer", "fp8_e4m3", "triton"),
    ("triton", "fp8_e4m3", "triton"),
    ("flashinfer", "fp8_e5m2", "triton"),
    ("triton", "fp8_e5m2", "triton"),
]
FP8_TIE = 0.5


@pytest.mark.parametrize("worker", CHOSEN_WORKERS)
@pytest.mark.parametrize(("backend", "kv_dtype", "attention"), FP8)
def test_fp8(
    backend: str,
    kv_dtype: str,
    attention: str,
    worker: str,
    logs: Path,
    plain_with: Callable[[str, str], Server],
    prompts: list[str],
) -> None:
    """As plain decoding from K/V of the same dtype; the drafter's stay as they are."""
    log, plain = logs / f"{backend}-{kv_dtype}-{worker}.log", plain_with(backend, kv_dtype)
    arguments = ("--attention-backend", backend, "--kv-cache-dtype", kv_dtype, "--enable-metrics")
    with running(log, *arguments, "--reasoning-parser", "qwen3", worker=worker) as server:
        assert server.info()["dflash_attention"] == {"target": attention, "drafter": AUTO}
        answers = server.generate_all(prompts[:PROBLEMS], concurrency=8)
        expected = plain.generate_all(prompts[:PROBLEMS], concurrency=8)
        same = 0
        for prompt, answer, reference in zip(prompts, answers, expected, strict=False):
            same += answer["output_ids"] == reference["output_ids"]
            assert_same(answer, reference, plain, prompt, tie=FP8_TIE)
        print(backend, kv_dtype, worker, same, "of", PROBLEMS, accept_length(answers))
        assert accept_length(answers) >= 5
        assert fallbacks(server) == 0
        server.check_idle()


@needs_hopper
def test_fa3_does_not_read_e5m2(logs: Path) -> None:
    arguments = (*DFLASH, FLAG, "fa3", "--kv-cache-dtype", "fp8_e5m2")
    status, output = fails_to_start(logs / "refused.log", *arguments)
    assert status != 0
    assert f"{FLAG} fa3 cannot run here, because it does not read K/V in float8_e5m2: " in output
