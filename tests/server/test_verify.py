"""Rounds that verify some rows of their blocks: what comes out may not change."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sglang_dflash.process.source import source_digest
from tests.server import harness
from tests.server.checks import accept_length, assert_same, check, counted
from tests.server.conftest import COMMON, VARIANTS
from tests.server.features import GREEDY, Prompt
from tests.server.harness import CHOSEN_WORKERS, DEVICE, Server, generate_body, in_long, running
from tests.server.riders import RIDERS, SHORT, decoding, ran
from tests.server.test_features import answers, assert_as_plain

LAUNCHER = ("tests.server.eager_passes",) if DEVICE == "cpu" else harness.LAUNCHER
ARGUMENTS = (
    *("--speculative-dflash-verify", "auto", "--enable-metrics"),
    *("--reasoning-parser", "qwen3", "--piecewise-cuda-graph-max-tokens", "320"),
)
RANDOM = {"SGLANG_DFLASH_RANDOM_ROWS": "1"}
CASES = [(worker, page) for worker in CHOSEN_WORKERS for page in ("1", "16")]
CASES.remove((CHOSEN_WORKERS[-1], "1"))
WORKERS = [CHOSEN_WORKERS[-1], *in_long(*CHOSEN_WORKERS[:-1])]


def of(moved, name: str) -> dict[str, float]:
    """A metric that was counted, by its label."""
    return {label: n for (each, label), n in moved.items() if each == name}


def at_once(server: Server, prompts: list[str]) -> list[dict]:
    """Answers to one request that has all prompts, so that batches do not depend on how fast clients are."""
    response = server.post("/generate", generate_body("") | {"text": prompts})
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("case", [(CHOSEN_WORKERS[-1], "1"), *in_long(*CASES)], ids="-".join)
def test_random_rows(case: tuple[str, str], logs: Path, plain: Server, prompts: list[str]) -> None:
    """Of whole blocks, of some rows, of bonus tokens alone; with prompts beside them and without.

    With pages the drafter also sees a part of the context alone. Sixteen requests are enough for narrower blocks.
    """
    (worker, page_size), asked = case, prompts[:40]
    log, arguments = logs / f"rows-{worker}-{page_size}.log", [*ARGUMENTS, "--page-size", page_size]
    if page_size != "1":
        arguments += ["--speculative-dflash-draft-window-size", "64"]
    with running(log, *arguments, worker=worker, launcher=LAUNCHER, **RANDOM) as server:
        before = counted(server)
        answered = server.generate_all(asked, concurrency=16)
        for answer, expected, prompt in zip(answered, plain.references(asked), asked, strict=True):
            assert_same(answer, expected, plain, prompt)
        moved = counted(server) - before
        plans = of(moved, "planned_rounds_total")
        assert plans.keys() == {"whole", "ragged", "narrow", "plain"} and min(plans.values()) > 5
        assert 1.5 < accept_length(answered) < 6.5
        assert ran(server)["in_rounds"] > 0
        server.check_idle()


@pytest.mark.parametrize("worker", in_long(*CHOSEN_WORKERS))
def test_seeds(worker: str, logs: Path, prompts: list[str]) -> None:
    """With deterministic inference what is drawn is what plain decoding draws, whatever rounds verify."""
    seeded, drawn, found = (
        ("--enable-deterministic-inference", *ARGUMENTS),
        {"temperature": 1.5, "sampling_seed": 5},
        [],
    )
    kinds = (("rows", worker, LAUNCHER), ("plain", None, harness.LAUNCHER))
    for name, kind, launcher in kinds:
        log = logs / f"rows-seeds-{name}-{worker}.log"
        variables = RANDOM if kind else {}
        with (
            running(log, *seeded, worker=kind, launcher=launcher, **variables) as server,
            ThreadPoolExecutor(16) as pool,
        ):
            with decoding(server, pool, prompts[90:92], **RIDERS) as greedy:
                asked = [
                    pool.submit(server.generate, each, **drawn, **SHORT) for each in prompts[:12]
                ]
                others = [each.result() for each in asked]
            alone = pool.map(lambda each: server.generate(each, **drawn, **SHORT), prompts[12:36])
            found.append([*others, *alone, *greedy])
    for answer, reference in zip(*found, strict=True):
        assert_same(answer, reference)
    assert accept_length(found[0]) > 1.2


@pytest.mark.parametrize("worker", WORKERS)
def test_what_pays(worker: str, logs: Path, plain: Server, prompts: list[str]) -> None:
    """Rows are left out where they cost something, and what is expected of drafts is what becomes of them."""
    log, asked = logs / f"auto-{worker}.log", prompts[:48]
    with running(log, *ARGUMENTS, worker=worker, launcher=LAUNCHER) as server:
        warm = at_once(server, prompts[50:80])
        before = counted(server)
        answered = at_once(server, asked)
        moved = counted(server) - before
        for answer, expected, prompt in zip(answered, plain.references(asked), asked, strict=True):
            assert_same(answer, expected, plain, prompt)
        info = server.info()
        costs = info["dflash_costs"]
        assert info["dflash_source"] == source_digest()
        assert costs["ragged"]["64"] > 0 and costs["plain"].keys() == costs["whole"].keys()
        if DEVICE == "cpu":  # whose rows cost as if they were many
            assert of(moved, "planned_rounds_total")["ragged"] > 10
            rows, drafted = (
                sum(of(moved, "verified_rows_total").values()),
                moved["drafted_tokens_total", ""],
            )
            assert rows < 0.8 * drafted
            tried, survived, expected = (
                sum(of(moved, f"{name}_at_position_total").values())
                for name in ("tried", "survived", "expected")
            )
            assert tried > 500 and survived / tried == pytest.approx(expected / tried, abs=0.08)
        assert accept_length(answered + warm) > 2.5
        measured = "DFLASH rounds take, in ms"
        told = log.read_text().count(measured)
        server.check_idle()
        if DEVICE == "cpu":  # where the first measurement passes for disturbed
            server.check_idle()
            assert (told, log.read_text().count(measured)) == (1, 2)
            check(server, plain, prompts[0])


@pytest.mark.parametrize("worker", in_long(*CHOSEN_WORKERS))
def test_every_feature(
    worker: str, logs: Path, plain: Server, problems: list[dict], prompts: list[str], tokenizer
) -> None:
    """Each kind of request that `docs/features.md` has, while rounds verify random numbers of rows."""
    asked = [
        Prompt(problem["question"], text, tokenizer.encode(text))
        for problem, text in zip(problems, prompts, strict=True)
    ][200:205]
    log, arguments = logs / f"rows-features-{worker}.log", (*COMMON, *VARIANTS["page1"], *ARGUMENTS)
    with running(log, *arguments, worker=worker, launcher=LAUNCHER, **RANDOM) as server:
        for feature in GREEDY:
            got, expected = answers(server, feature, asked), answers(plain, feature, asked)
            assert_as_plain(feature, got, expected, server, plain, asked)
        server.check_idle()


@pytest.mark.long
def test_without_passes_of_any_rows(logs: Path, plain: Server, prompts: list[str]) -> None:
    """All rows are verified, and the log says why."""
    log = logs / "rows-none.log"
    arguments = (*ARGUMENTS, "--piecewise-cuda-graph-max-tokens", "0")
    with running(log, *arguments, worker=CHOSEN_WORKERS[-1]) as server:
        (answer,) = server.generate_all(prompts[:1], concurrency=1)
        assert_same(answer, plain.references(prompts[:1])[0], plain, prompts[0])
        assert accept_length([answer]) > 1 and server.info()["dflash_costs"] is None
    assert "DFLASH verifies all rows, because no passes of the target" in log.read_text()
