"""Targets with linear attention: the answers of plain decoding, whatever was rejected, cached or cut short."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest

from tests.server.checks import accept_length, counted
from tests.server.harness import (
    CHOSEN_WORKERS,
    DEVICE,
    Server,
    events,
    generate_body,
    in_long,
    running,
)
from tests.unit.decoders import write_drafter, write_target

pytestmark = pytest.mark.skipif(
    DEVICE != "cpu", reason="its tiny heads are made for linear attention on a CPU"
)

# What the prefix cache has of states: a finished request's own, or of every 16th token and the 64th of a prompt.
STRATEGIES = {
    "v1": ("--mamba-scheduler-strategy", "no_buffer"),
    "v2": (
        *("--mamba-scheduler-strategy", "extra_buffer", "--mamba-track-interval", "16"),
        *("--page-size", "16"),
    ),
}
UNCACHED = ("--disable-radix-cache", "--max-mamba-cache-size", "8")
STATES = ("--max-mamba-cache-size", "96")
# As precise as all else; a state of convolutions in bfloat16 would round what a block need not read from it.
EXACT = {"SGLANG_MAMBA_CONV_DTYPE": "float32"}
# The release's check of slots while requests run knows no such cache; its check of an idle server counts states, too.
ONCE_IDLE = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "0"}
# The pool holds about two requests.
TIGHT = ("--max-total-tokens", "512", "--max-running-requests", "8")
CARELESS = {
    "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "8",
    "SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR": "0",
    "SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS": "1",
}
TOKENS = {"max_new_tokens": 60, "ignore_eos": True}
SHARED = [(11 * i) % 300 + 5 for i in range(66)]
PROMPTS = [
    SHARED[: 22 * (n % 4)] + [(7 * n + 31 * i) % 300 + 5 for i in range(n)]
    for n in (1, 2, 8, 21, 34, 55, 89, 131)
]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory, logs: Path) -> partial[AbstractContextManager]:
    """Starts a server of the target, and with a worker of a drafter that repeats what it sees."""
    target, drafter = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("drafter")
    write_target(target, "Qwen3-Next", embedding=0.5, max_position_embeddings=512)
    write_drafter(drafter)
    pair = ("--model-path", str(target), "--skip-tokenizer-init", *STATES)

    def started(name: str, *arguments: str, worker: str | None = None, **more):
        given = pair + (("--speculative-draft-model-path", str(drafter)) if worker else ())
        log = logs / f"hybrid-{name}-{worker}.log"
        return running(log, *given, *arguments, worker=worker, **more | EXACT | ONCE_IDLE)

    return started


@pytest.fixture(scope="module")
def longer(start) -> list[tuple[list[int], list[int]]]:
    """Prompts and what plain decoding answers; the later ones begin with an earlier one and some of its answer."""
    with start("plain", "--disable-radix-cache") as plain:

        def answered(prompts: list[list[int]]) -> list[tuple[list[int], list[int]]]:
            answers = plain.generate_all(prompts, 8, **TOKENS)
            return [(ids, each["output_ids"]) for ids, each in zip(prompts, answers, strict=True)]

        asked = answered(PROMPTS)
        asked += answered([ids + answer[:n] for ids, answer in asked for n in (60, 57, 23)])
    assert sum(len(set(answer)) > 3 for _, answer in asked) > len(asked) / 2
    return asked


@pytest.fixture(scope="module", params=CHOSEN_WORKERS)
def server(request: pytest.FixtureRequest, start) -> Iterator[Server]:
    arguments = (*STRATEGIES[request.param], "--chunked-prefill-size", "80")
    with start("roomy", *arguments, worker=request.param) as started:
        yield started


def check(server: Server, asked: list[tuple[list[int], list[int]]], concurrency: int) -> list[dict]:
    return checked(server.generate_all([ids for ids, _ in asked], concurrency, **TOKENS), asked)


def checked(answers: list[dict], asked: list[tuple[list[int], list[int]]]) -> list[dict]:
    assert [answer["output_ids"] for answer in answers] == [expected for _, expected in asked]
    assert 1.2 < accept_length(answers) < 6, "some drafts are to be accepted, and some are not"
    return answers


def test_equal(server: Server, longer) -> None:
    """Prompts in chunks, alone and all at once, then with what the prefix cache has of them."""
    first = longer[: len(PROMPTS)]
    check(server, first, 1)
    server.check_idle()
    for concurrency in (len(PROMPTS), 3):
        answers = check(server, first, concurrency)
    assert sum(answer["meta_info"]["cached_tokens"] > 0 for answer in answers) >= 2
    server.check_idle()


def test_prefixes_behind_rejections(server: Server, longer) -> None:
    """Prompts that go on where answers were, whose states rounds have left in the prefix cache."""
    first, later = longer[: len(PROMPTS)], longer[len(PROMPTS) :]
    for concurrency in (1, 8):
        check(server, first, concurrency)
        answers = check(server, later, concurrency)
        cached = [answer["meta_info"]["cached_tokens"] for answer in answers]
        asked = [len(ids) for ids, _ in first for _ in range(3)]
        assert sum(map(int.__gt__, cached, asked)) >= len(later) / 4, cached
        server.check_idle()


def test_ends_inside_blocks(server: Server, longer) -> None:
    """An end leaves the prefix cache the request's own states, not those behind drafts that were accepted beyond it."""
    whole = 0
    for ids, answer in longer[: len(PROMPTS)]:
        # Where a token repeats, rounds accept drafts.
        ends = [n for n in range(4, 50) if len(set(answer[n - 2 : n + 2])) == 1][:4]
        for n in ends:
            ended = server.generate(ids, **TOKENS | {"max_new_tokens": n})
            assert ended["output_ids"] == answer[:n]
            later = server.generate(ids + answer[: n + 1], **TOKENS | {"max_new_tokens": 9 - n % 3})
            assert later["output_ids"] == answer[n + 1 :][: 9 - n % 3]
            # Its last token, too, as a draft that was accepted.
            whole += later["meta_info"]["cached_tokens"] == len(ids) + n
    assert whole > 0 or server.worker == "v2"  # which has states of some positions only
    server.check_idle()


def test_aborts(server: Server, longer) -> None:
    """Requests whose clients go while rounds of theirs are in flight."""
    abort_all(server)
    server.check_idle()
    check(server, longer[: len(PROMPTS)], len(PROMPTS))


def abort_all(server: Server) -> None:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        assert all(pool.map(partial(first_of_stream, server), PROMPTS))


def first_of_stream(server: Server, prompt: list[int]) -> bool:
    """Reads a stream until some rounds are through, and hangs up."""
    body = generate_body(prompt, max_new_tokens=100, ignore_eos=True) | {"stream": True}
    with server.post("/generate", body, stream=True) as response:
        return any(event["meta_info"]["completion_tokens"] > 20 for event in events(response))


@pytest.mark.parametrize("worker", [CHOSEN_WORKERS[-1], *in_long(*CHOSEN_WORKERS[:-1])])
def test_retraction(start, longer, worker: str) -> None:
    """Of requests that come all at once, however busy their clients' machine is."""
    given, asked = (*STRATEGIES[worker], *TIGHT), longer[: len(PROMPTS)]
    with start("tight", *given, worker=worker, **CARELESS) as server:
        response = server.post("/generate", generate_body([ids for ids, _ in asked], **TOKENS))
        answers = checked(response.json(), asked)
        assert sum(answer["meta_info"]["total_retractions"] for answer in answers) > 0
        server.check_idle()


@pytest.mark.parametrize("worker", [CHOSEN_WORKERS[-1], *in_long(*CHOSEN_WORKERS[:-1])])
def test_without_prefix_cache(start, longer, worker: str) -> None:
    """With as many states as requests that run: one that is lost is missed soon."""
    with start("uncached", *UNCACHED, worker=worker) as server:
        for _ in range(2):
            check(server, longer[: len(PROMPTS)], len(PROMPTS))
            abort_all(server)
        check(server, longer[: len(PROMPTS)], len(PROMPTS))
        server.check_idle()


# Rows of the largest pass over requests that have different numbers of them; the plans of rounds with and without.
PASSES = {"160": ("whole", "narrow", "ragged", "plain"), "0": ("whole", "narrow", "plain")}


@pytest.mark.parametrize("most", PASSES)
@pytest.mark.parametrize("worker", [CHOSEN_WORKERS[-1], *in_long(*CHOSEN_WORKERS[:-1])])
def test_rows_that_pay(worker: str, most: str, start, longer) -> None:
    """As graphs run them; with passes for it prompts ride in rounds, too, and leave the prefix cache their states."""
    given = (*STRATEGIES[worker], "--enable-metrics", "--piecewise-cuda-graph-max-tokens", most)
    passes = {"launcher": ("tests.server.eager_passes",), "SGLANG_DFLASH_RANDOM_ROWS": "1"}
    with start(f"rows-{most}", *given, worker=worker, **passes) as server:
        check(server, longer[: len(PROMPTS)], 1)
        check(server, longer, 8)
        abort_all(server)
        check(server, longer, 8)
        seen = counted(server)
        server.check_idle()
    for plan in PASSES[most]:
        assert seen["planned_rounds_total", plan] > 20, plan
    assert not seen["fallbacks_total", "no_graph"]
    assert (seen["prompt_rows_total", "in_rounds"] > 200) == (most != "0")
