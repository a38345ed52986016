"""Which rounds are replayed from graphs."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.server.checks import assert_same, assert_speculated, decoded_in_graphs
from tests.server.harness import CHOSEN_WORKERS, ROOT, Server, running

ARGUMENTS = (
    "--enable-metrics",
    *("--sampling-backend", "pytorch"),  # which has no kernels to compile in the middle
)
SCHEMA = '{"type": "object", "properties": {"answer": {"type": "integer"}}}'


def fallbacks(server: Server) -> int:
    """Rounds that ran kernel by kernel though graphs are captured."""
    found = re.findall(
        r'^sglang:dflash_fallbacks_total\{.*reason="no_graph".*\} (\S+)',
        server.get("/metrics").text,
        re.M,
    )
    return int(sum(map(float, found)))


KINDS = (
    {"temperature": 0.7, "top_p": 0.9},
    {"logit_bias": {"300": 5.0}},
    {"min_new_tokens": 5},
    {"frequency_penalty": 0.3},
    {"json_schema": SCHEMA},
)


@pytest.mark.parametrize(("backend", "ranks"), [("fa3", 1), ("flashinfer", 1), ("fa3", 2)])
@pytest.mark.parametrize("worker", CHOSEN_WORKERS)
def test_every_request_stays_in_the_graphs(
    worker: str, backend: str, ranks: int, logs: Path, plain: Server, prompts: list[str]
) -> None:
    """Whatever one request asks: greedy ones beside it answer as plain decoding does."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    log = logs / f"graphs-{worker}-{backend}-{ranks}.log"
    arguments = (*ARGUMENTS, "--attention-backend", backend, "--tp-size", str(ranks))
    with running(log, *arguments, worker=worker) as server, ThreadPoolExecutor(8) as pool:
        assert "DFLASH captured" in log.read_text()
        for sampling in KINDS:
            greedy = {prompt: pool.submit(server.generate, prompt) for prompt in prompts[:4]}
            asked = {"max_new_tokens": 60} | sampling
            drawn = [pool.submit(server.generate, prompt, **asked) for prompt in prompts[2:6]]
            for prompt, answer in greedy.items():
                assert_same(answer.result(), plain.reference(prompt), plain, prompt)
                assert_speculated(answer.result(), at_least=4)
            for answer in drawn:
                assert answer.result()["meta_info"]["spec_verify_ct"] > 0
        assert fallbacks(server) == 0 and decoded_in_graphs(server).keys() == {True}
        server.check_idle()


def own_kernels(cache: Path) -> set[Path]:
    """What Triton has compiled of this project's kernels."""
    found = (ROOT / "sglang_dflash/gpu/kernels").glob("*.py")
    names = {
        name for file in found for name in re.findall(r"^def (_\w+)\(", file.read_text(), re.M)
    }
    return {path for path in cache.rglob("*.ptx") if path.stem in names}


@pytest.mark.parametrize("worker", CHOSEN_WORKERS)
def test_nothing_is_compiled_later(
    worker: str, logs: Path, tmp_path: Path, prompts: list[str]
) -> None:
    """Few clients and many, whose blocks have other widths and numbers of rows: nobody waits for a compiler."""
    log = logs / f"compiled-{worker}.log"
    with running(log, *ARGUMENTS, worker=worker, TRITON_CACHE_DIR=str(tmp_path)) as server:
        before = own_kernels(tmp_path)
        assert before
        for concurrency in (1, 4, 16):
            server.generate_all(prompts[: 8 * concurrency], concurrency=concurrency)
        assert own_kernels(tmp_path) == before
