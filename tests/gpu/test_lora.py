"""LoRA adapters on a GPU: rounds are captured with the target alone, and with its LoRA layers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.server.adapters import ATTENTION, ENDS, MLP, write_adapter
from tests.server.checks import accept_length, assert_same, counted
from tests.server.harness import CHOSEN_WORKERS, Server, generate_body, running

MADE = {"layers": (*ATTENTION, *MLP), "all": (*ATTENTION, *MLP, *ENDS)}
NAMES = (None, *MADE)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("adapters")
    return [
        f"{name}={write_adapter(folder / name, seed, scale=0.05, modules=modules)}"
        for seed, (name, modules) in enumerate(MADE.items())
    ]


@pytest.fixture(scope="module", params=["csgmv", "triton"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def reference(backend: str, paths: list[str], logs: Path) -> Iterator[Server]:
    flags = ("--lora-paths", *paths, "--lora-backend", backend)
    if backend == "csgmv":
        # Its kernels take from a graph how many adapters were in the batch at capture, one, and leave out the others
        # (SGLang's pull request 28371).
        flags += ("--disable-cuda-graph",)
    with running(logs / f"lora-plain-{backend}.log", *flags) as server:
        yield server


@pytest.fixture(scope="module", params=CHOSEN_WORKERS)
def adapted(
    request: pytest.FixtureRequest, backend: str, paths: list[str], logs: Path
) -> Iterator[Server]:
    flags = ("--lora-paths", *paths, "--lora-backend", backend, "--enable-metrics")
    log = logs / f"lora-{backend}-{request.param}.log"
    with running(log, *flags, worker=request.param) as server:
        assert "DFLASH runs the target under LoRA adapters with fused layers" in log.read_text()
        yield server


def ask(server: Server, prompt: str, adapter: str | None) -> dict:
    body = generate_body(prompt, max_new_tokens=128) | {"lora_path": adapter}
    response = server.post("/generate", body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("at_once", [1, 12])
def test_equal(adapted: Server, reference: Server, prompts: list[str], at_once: int) -> None:
    asked = [(prompt, name) for prompt in prompts[:8] for name in NAMES]
    with ThreadPoolExecutor(at_once) as pool:
        answers = list(pool.map(lambda each: ask(adapted, *each), asked))
    with ThreadPoolExecutor(8) as pool:
        expected = list(pool.map(lambda each: ask(reference, *each), asked))
    for (prompt, name), answer, its in zip(asked, answers, expected, strict=True):
        assert_same(answer, its, reference, prompt, adapter=name)
    fallbacks = counted(adapted)
    assert not fallbacks["fallbacks_total", "adapters"] + fallbacks["fallbacks_total", "no_graph"]
    adapted.check_idle()


def test_times(adapted: Server, prompts: list[str]) -> None:
    """Printed, with an adapter and without one; drafts are accepted in both."""
    for name in (None, "layers"):
        ask(adapted, prompts[20], name)
        begin = time.perf_counter()
        answers = [ask(adapted, prompt, name) for prompt in prompts[21:29]]
        took = time.perf_counter() - begin
        rounds = sum(each["meta_info"]["spec_verify_ct"] for each in answers)
        assert accept_length(answers) > 1
        print(f"adapter {name}: {1e3 * took / rounds:.2f} ms a round")
