"""`--enable-hierarchical-cache`: prefixes that come back from the host come back for both models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.server.checks import accept_length, assert_same, assert_speculated
from tests.server.harness import (
    CHOSEN_WORKERS,
    Server,
    generate_body,
    in_long,
    prompts_of,
    running,
)

POOL = 1200  # slots; all that is asked takes several times as many
COMMON = (
    "--enable-hierarchical-cache",
    *("--max-total-tokens", str(POOL), "--hicache-ratio", "16", "--max-running-requests", "8"),
    "--enable-metrics",
    *("--reasoning-parser", "qwen3"),
)
WAYS = {
    "pages": (
        *("--page-size", "16", "--hicache-write-policy", "write_back"),
        *("--hicache-mem-layout", "page_first", "--enable-streaming-session"),
    ),
    "tokens": ("--chunked-prefill-size", "64"),
    "window": ("--speculative-dflash-draft-window-size", "48"),
    "selective": (
        *("--page-size", "16", "--hicache-write-policy", "write_through_selective"),
        *("--hicache-mem-layout", "page_first_direct"),
    ),
}
USUAL = [("v1", "pages"), ("v2", "tokens")]
ASKED, BETWEEN = prompts_of(8, most=16), 30
LEAST_FREE = 12 << 30  # bytes; the release leaves 10 GiB to others


def servers(*ways: str) -> list[Any]:
    """Parameters: a server of each worker and way; all but the usual ones only in `make test-long`."""
    each = [(worker, way) for way in ways for worker in CHOSEN_WORKERS]
    marked = (in_long(one)[0] if one not in USUAL else pytest.param(one) for one in each)
    return [pytest.param(*one.values, marks=one.marks, id="-".join(*one.values)) for one in marked]


@pytest.fixture(scope="module", params=servers(*WAYS))
def started(request: pytest.FixtureRequest, logs: Path) -> Iterator[Server]:
    if psutil.virtual_memory().available < LEAST_FREE:
        pytest.skip("the release refuses a hierarchical cache where less than 10 GiB are left")
    worker, way = request.param
    log = logs / f"host-{worker}-{way}.log"
    with running(log, *COMMON, *WAYS[way], worker=worker) as server:
        yield server


@pytest.fixture
def server(started: Server) -> Iterator[Server]:
    """Nothing cached, of either place; afterwards every slot must be free."""
    started.check_idle()
    yield started
    started.check_idle()


def host_tokens(answer: dict) -> int:
    """Of the prompt, those whose K/V came from the host."""
    return (answer["meta_info"].get("cached_tokens_details") or {"host": 0})["host"]


def crowd_out(server: Server, prompts: Sequence[str]) -> None:
    """Asks so much else that the device keeps nothing of what was asked before."""
    server.generate_all(prompts[-BETWEEN:], 4, max_new_tokens=60, ignore_eos=True)


def test_acceptance(server: Server, plain: Server, prompts: list[str]) -> None:
    """Drafts after a hit on the host are those after a hit on the device, round by round."""
    asked, on_device = prompts[:ASKED], []
    for prompt in asked:
        server.generate(prompt)
        on_device.append(server.generate(prompt))
    crowd_out(server, prompts)
    on_host = [server.generate(prompt) for prompt in asked]
    for prompt, first, then in zip(asked, on_device, on_host, strict=True):
        assert host_tokens(first) == 0 and host_tokens(then) >= 16
        assert first["meta_info"]["cached_tokens"] == then["meta_info"]["cached_tokens"]
        assert_same(then, plain.reference(prompt), plain, prompt)
        assert_speculated(then)
        for of in ("spec_verify_ct", "spec_accept_histogram"):
            assert first["meta_info"][of] == then["meta_info"][of], of
    assert accept_length(on_host) > 4


def test_next_turn(server: Server, plain: Server, prompts: list[str], tokenizer) -> None:
    """What rounds wrote comes back, too: a prompt that goes on after an earlier answer."""
    turns, on_device = [], []
    for prompt, other in zip(prompts[:ASKED], prompts[ASKED:], strict=False):
        first = tokenizer.encode(prompt)
        turns.append(first + server.generate(first)["output_ids"] + tokenizer.encode(other))
        on_device.append(server.generate(turns[-1]))
    crowd_out(server, prompts)
    on_host = [server.generate(turn) for turn in turns]
    for turn, first, then in zip(turns, on_device, on_host, strict=True):
        assert host_tokens(first) == 0 and host_tokens(then) >= 64
        assert_same(then, plain.reference(turn), plain, turn)
        assert_speculated(then)
        assert first["meta_info"]["spec_verify_ct"] == then["meta_info"]["spec_verify_ct"]


def test_crowd(server: Server, plain: Server, prompts: list[str]) -> None:
    """Requests that evict and bring back each other's prefixes while they run."""
    asked = [*prompts[:24], *prompts[:24][::-1], *prompts[4:28]]
    answers = server.generate_all(asked, 8)
    expected = plain.references(asked)
    for prompt, answer, reference in zip(asked, answers, expected, strict=True):
        assert_same(answer, reference, plain, prompt)
    assert sum(map(host_tokens, answers)) > 100
    assert server.metric("hicache_host_used_tokens") > POOL
    assert accept_length(answers) > 4


def test_grammars(server: Server, plain: Server, prompts: list[str]) -> None:
    """Their rounds wait for the result before, which may end a request that others continue."""
    sampling = {"regex": r"([^#]|#{4}|\n){1,80}", "max_new_tokens": 60}
    server.generate_all(prompts[:ASKED], 2, **sampling)
    crowd_out(server, prompts)
    answers = server.generate_all(prompts[:ASKED], 2, **sampling)
    assert min(map(host_tokens, answers)) >= 16
    for prompt, answer in zip(prompts[:ASKED], answers, strict=True):
        assert_same(answer, plain.reference(prompt, **sampling), plain, prompt)


@pytest.mark.parametrize("started", servers("pages"), indirect=True)
def test_session(server: Server, plain: Server, prompts: list[str], tokenizer) -> None:
    """A streaming session begins with what the host has; later turns are its own."""
    turns = [tokenizer.encode(prompt) for prompt in prompts[:2]]
    server.generate(turns[0])
    crowd_out(server, prompts)
    opened = server.post("/open_session", {"capacity_of_str_len": 9999, "streaming": True}).json()
    context: list[int] = []
    for number, turn in enumerate(turns):
        body = generate_body(turn) | {"session_params": {"id": opened}}
        answer = server.post("/generate", body).json()
        context += turn
        assert_same(answer, plain.reference(context), plain, context)
        assert_speculated(answer)
        assert (host_tokens(answer) >= 16) == (number == 0)
        context += answer["output_ids"]
    server.post("/close_session", {"session_id": opened})
