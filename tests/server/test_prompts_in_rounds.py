"""Prompts that arrive while others decode, in the passes of the target that a GPU runs: `eager_passes.py`."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.server import harness
from tests.server.checks import (
    accept_length,
    assert_same,
    assert_speculated,
    counted,
    decoded_in_graphs,
)
from tests.server.harness import CHOSEN_WORKERS, DEVICE, Server, generate_body, in_long, running
from tests.server.riders import LENGTHS, RIDERS, SHORT, decoding, ran

LAUNCHER = ("tests.server.eager_passes",)
# A few sizes of passes: each is run once when the server starts.
ARGUMENTS = (
    "--enable-metrics",
    *("--context-length", "2048", "--reasoning-parser", "qwen3"),
    *("--piecewise-cuda-graph-max-tokens", "320", "--speculative-dflash-verify", "all"),
)
LAST, *OTHERS = reversed([(worker, page) for worker in CHOSEN_WORKERS for page in ("1", "16")])
pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="tests/gpu/test_prompts.py does this")


@pytest.fixture(scope="module", params=[LAST, *in_long(*OTHERS)], ids="-".join)
def server(request: pytest.FixtureRequest, logs: Path) -> Iterator[Server]:
    worker, page_size = request.param
    log = logs / f"passes-{worker}-{page_size}.log"
    arguments = (*ARGUMENTS, "--page-size", page_size)
    with running(log, *arguments, worker=worker, launcher=LAUNCHER) as server:
        yield server


@pytest.fixture
def ids(tokenizer, prompts: list[str]) -> list[int]:
    return tokenizer.encode("".join(prompts[100:140]))


@pytest.fixture
def pool(server: Server, plain: Server, prompts: list[str]) -> Iterator[ThreadPoolExecutor]:
    """Asks while four requests decode, into whose rounds all other prompts go."""
    asked, before = prompts[90:94], counted(server)
    with ThreadPoolExecutor(16) as pool, decoding(server, pool, asked, **RIDERS) as answers:
        yield pool
    for answer, expected in zip(answers, plain.references(asked, **RIDERS), strict=True):
        assert_same(answer, expected)
    assert accept_length(answers) > 1
    moved = counted(server) - before
    assert moved["prompt_rows_total", "in_rounds"] > 0 and not moved["fallbacks_total", "no_graph"]
    server.check_idle()


def test_lengths(server: Server, plain: Server, ids: list[int], pool: ThreadPoolExecutor) -> None:
    """All at once, the longest in chunks."""
    asked = [ids[20 * i :][:length] for i, length in enumerate(LENGTHS)]
    before = ran(server)
    answers = list(pool.map(lambda prompt: server.generate(prompt, **SHORT), asked))
    cached = sum(answer["meta_info"]["cached_tokens"] for answer in answers)
    assert cached < 20 and ran(server) - before == {"in_rounds": sum(LENGTHS) - cached}
    expected = plain.references(asked, **SHORT)
    for answer, reference in zip(answers, expected, strict=True):
        assert_same(answer, reference)
        assert_speculated(answer)
    assert decoded_in_graphs(server).keys() == {True}


def test_prefixes(server: Server, plain: Server, ids: list[int], pool: ThreadPoolExecutor) -> None:
    """What the radix cache has is not run again, neither by the target nor by the drafter."""
    begin = ids[300:1000]
    asked = [[*begin, *ids[30 * i :][:n]] for i, n in enumerate((1, 20, 80, 200))]
    server.generate(begin, max_new_tokens=2)
    answers = list(pool.map(lambda prompt: server.generate(prompt, **SHORT), asked))
    expected = plain.references(asked, **SHORT)
    for answer, reference in zip(answers, expected, strict=True):
        assert answer["meta_info"]["cached_tokens"] >= len(begin) // 16 * 16
        assert_same(answer, reference)
        assert_speculated(answer, at_least=1.2)


def test_log_probabilities_of_prompts(
    server: Server, plain: Server, ids: list[int], pool: ThreadPoolExecutor
) -> None:
    """Those of all rows of a prompt, though its passes have rows of others, and it several passes."""
    asked = [
        generate_body(ids[50 * i :][:length], **SHORT)
        | {"return_logprob": True, "logprob_start_len": start, "top_logprobs_num": 2}
        for i, (length, start) in enumerate([(17, 0), (100, 40), (333, 0)])
    ]
    answers = list(pool.map(lambda body: server.post("/generate", body).json(), asked))
    expected = [plain.post("/generate", body).json() for body in asked]
    for answer, reference in zip(answers, expected, strict=True):
        assert_same(answer, reference)
        for field in ("input_token_logprobs", "output_token_logprobs", "input_top_logprobs"):
            mine, its = flat(answer["meta_info"][field]), flat(reference["meta_info"][field])
            assert len(its) > 10 and mine == pytest.approx(its, abs=1e-3), field


def test_beside_grammars(server: Server, plain: Server, prompts: list[str]) -> None:
    """Prompts, of requests with grammars too, are in the rounds of requests whose grammars have a result in flight."""
    long, short = (
        {"regex": rf"(.|\n){{{least},}}", "max_new_tokens": tokens}
        for least, tokens in ((4000, 400), (400, 40))
    )
    asked, riders = prompts[:12], prompts[90:94]
    server.generate(
        prompts[95], **short
    )  # compiled meanwhile, which may take longer than riders decode
    with ThreadPoolExecutor(16) as pool:
        with decoding(server, pool, riders, **long) as answers:
            began = ran(server)
            others = list(pool.map(lambda prompt: server.generate(prompt, **short), asked))
            rode = ran(server) - began
    assert rode.keys() == {"in_rounds"}
    for each, sampling, found in ((asked, short, others), (riders, long, answers)):
        for answer, expected in zip(found, plain.references(each, **sampling), strict=True):
            assert_same(answer, expected)
    assert accept_length(answers) > 1


def flat(values: Any) -> list[float]:
    """Numbers of nested lists, where there are any."""
    if isinstance(values, list):
        return [number for value in values for number in flat(value)]
    return [values] if isinstance(values, float | int) else []


@pytest.mark.parametrize("worker", in_long(*CHOSEN_WORKERS))
def test_seeds(worker: str, logs: Path, prompts: list[str]) -> None:
    """Drawn as plain decoding draws, whoever rides beside."""
    seeded = ("--enable-deterministic-inference", *ARGUMENTS)
    kinds = (("passes", worker, LAUNCHER), ("plain", None, harness.LAUNCHER))
    drawn, found = {"temperature": 2.0, "sampling_seed": 5}, []
    for name, kind, launcher in kinds:
        log = logs / f"seeds-{name}-{worker}.log"
        with (
            running(log, *seeded, worker=kind, launcher=launcher) as server,
            ThreadPoolExecutor(16) as pool,
        ):
            with decoding(server, pool, prompts[90:94], **drawn, **RIDERS) as riders:
                asked = [
                    pool.submit(server.generate, each, **drawn, **SHORT) for each in prompts[:12]
                ]
                others = [each.result() for each in asked]
            found.append([*others, *riders])
            assert kind is None or ran(server)["in_rounds"] > 500
    for answer, reference in zip(*found, strict=True):
        assert_same(answer, reference)
    assert accept_length(found[0]) > 1.2
