"""Seeds under deterministic inference: the same draws as plain decoding, token by token.

The servers use llguidance, so that grammars are seen with more than one backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from sglang.test.test_deterministic import BenchArgs, test_deterministic

from tests.server.checks import accept_length, assert_same, assert_speculated
from tests.server.harness import CHOSEN_WORKERS, DEVICE, Server, in_long, running

ARGUMENTS = ("--enable-deterministic-inference", "--grammar-backend", "llguidance")
SETTINGS = (
    {"temperature": 0.7},
    {"temperature": 2.0},
    {"temperature": 2.5, "top_p": 0.9},
    {"temperature": 2.5, "top_k": 20},
    {"temperature": 2.0, "frequency_penalty": 0.3, "min_new_tokens": 60},
    {"temperature": 3.0, "top_p": 0.95, "top_k": 50},
)
test_deterministic.__test__ = False  # a function of the kit, not a test of this file


@pytest.fixture(scope="module")
def servers(logs: Path) -> Iterator[Callable[[str | None], Server]]:
    """Plain decoding and each worker, started when first asked for."""
    started: dict[str | None, Server] = {}
    with ExitStack() as stack:

        def server(worker: str | None) -> Server:
            if worker not in started:
                more = ("--disable-overlap-schedule",) if worker is None else ()
                log = logs / f"seeds-{worker}.log"
                compiled = {"TORCHINDUCTOR_CACHE_DIR": str(log.with_suffix(".compiled"))}
                started[worker] = stack.enter_context(
                    running(log, *ARGUMENTS, *more, worker=worker, **compiled)
                )
            return started[worker]

        yield server


def draw(server: Server, prompts: list[str], **sampling: object) -> list[dict]:
    """Answers with the prompt's number as the seed, eight at a time."""
    with ThreadPoolExecutor(8) as pool:
        return list(
            pool.map(
                lambda numbered: server.generate(
                    numbered[1], sampling_seed=numbered[0], max_new_tokens=80, **sampling
                ),
                enumerate(prompts),
            )
        )


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
@pytest.mark.parametrize("worker", [CHOSEN_WORKERS[-1], *in_long(*CHOSEN_WORKERS[:-1])])
def test_seeded_draws(worker: str, sampling: dict, servers: Callable, prompts: list[str]) -> None:
    expected = draw(servers(None), prompts[:24], **sampling)
    answers = draw(servers(worker), prompts[:24], **sampling)
    for answer, reference in zip(answers, expected, strict=True):
        assert_same(answer, reference)
    assert accept_length(answers) > 1.5
    if sampling == {"temperature": 2.0}:  # the others leave the first answer little choice
        other = servers(worker).generate(prompts[0], sampling_seed=7, max_new_tokens=80, **sampling)
        assert other["output_ids"] != answers[0]["output_ids"], "the seed changes nothing"


def test_compiled_on_a_gpu_alone(servers: Callable, prompts: list[str]) -> None:
    """The release compiles its seeded draws when a request is first drawn for."""
    server = servers(CHOSEN_WORKERS[-1])
    server.generate(prompts[0], sampling_seed=1, temperature=1.0, max_new_tokens=8)
    compiled = any(path.is_file() for path in server.log.with_suffix(".compiled").rglob("*"))
    assert compiled == (DEVICE != "cpu")


@pytest.mark.parametrize(
    "grammar",
    [{"regex": "[^#]{20,300}#### [0-9]{1,2}"}, {"ebnf": 'root ::= [^#]+ "#### " [0-9] [0-9]'}],
    ids=str,
)
@pytest.mark.parametrize("worker", CHOSEN_WORKERS)
def test_llguidance(worker: str, grammar: dict, servers: Callable, prompts: list[str]) -> None:
    expected = draw(servers(None), prompts[24:32], temperature=1.5, **grammar)
    answers = draw(servers(worker), prompts[24:32], temperature=1.5, **grammar)
    for answer, reference in zip(answers, expected, strict=True):
        assert_same(answer, reference)
    assert_speculated(answers[0])


@pytest.mark.parametrize("worker", CHOSEN_WORKERS)
def test_kit(worker: str, servers: Callable) -> None:
    """SGLang's own: one prompt in batches of different sizes, drawn with a seed."""
    args = BenchArgs()
    args.host, args.port = "localhost", int(servers(worker).url.rpartition(":")[2])
    args.test_mode, args.temperature = "single", 0.5
    args.n_start, args.n_trials = 1, 6
    assert set(test_deterministic(args)) == {1}
