"""`--enable-hierarchical-cache`: prefixes that come back from the host come back for both models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.checks import accept_length, assert_same, assert_speculated
from tests.server.harness import (
    CHOSEN_WORKERS,
    DEVICE,
    LAUNCHER,
    Server,
    generate_body,
    in_long,
    prompts_of,
    running,
)
from tests.server.host_hits import (
    ARGUMENTS,
    HOST,
    POOL,
    assert_hits,
    crowd_out,
    host_tokens,
    skip_without_memory,
)
from tests.unit.decoders import write_drafter, write_target

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
    # Prompts in rounds, in the passes that a GPU captures.
    "passes": (
        *("--piecewise-cuda-graph-max-tokens", "128", "--speculative-dflash-verify", "all"),
    ),
}
USUAL = [("v1", "pages"), ("v2", "tokens")]
ASKED = prompts_of(8, most=16)


def servers(*ways: str) -> list[Any]:
    """Parameters: a server of each worker and way; all but the usual ones only in `make test-long`."""
    each = [(worker, way) for way in ways for worker in CHOSEN_WORKERS]
    marked = (in_long(one)[0] if one not in USUAL else pytest.param(one) for one in each)
    return [pytest.param(*one.values, marks=one.marks, id="-".join(*one.values)) for one in marked]


@pytest.fixture(scope="module", params=servers(*WAYS))
def started(request: pytest.FixtureRequest, logs: Path) -> Iterator[Server]:
    skip_without_memory()
    worker, way = request.param
    log, eager = logs / f"host-{worker}-{way}.log", way == "passes" and DEVICE == "cpu"
    launcher = ("tests.server.eager_passes",) if eager else LAUNCHER
    with running(log, *ARGUMENTS, *WAYS[way], worker=worker, launcher=launcher) as server:
        yield server


@pytest.fixture
def server(started: Server) -> Iterator[Server]:
    """Nothing cached, of either place; afterwards every slot must be free."""
    started.check_idle()
    yield started
    started.check_idle()


def test_acceptance(server: Server, plain: Server, prompts: list[str]) -> None:
    """Drafts after a hit on the host are those after a hit on the device, round by round."""
    asked, on_device = prompts[:ASKED], []
    for prompt in asked:
        server.generate(prompt)
        on_device.append(server.generate(prompt))
    crowd_out(server, prompts)
    assert_hits(server, plain, asked, on_device)


def test_next_turn(server: Server, plain: Server, prompts: list[str], tokenizer) -> None:
    """What rounds wrote comes back, too: a prompt that goes on after an earlier answer."""
    turns, on_device = [], []
    for prompt, other in zip(prompts[:ASKED], prompts[ASKED : 2 * ASKED], strict=True):
        first = tokenizer.encode(prompt)
        turns.append(first + server.generate(first)["output_ids"] + tokenizer.encode(other))
        on_device.append(server.generate(turns[-1]))
    crowd_out(server, prompts)
    assert_hits(server, plain, turns, on_device, least=64)


def test_crowd(server: Server, plain: Server, prompts: list[str]) -> None:
    """Requests that evict and bring back each other's prefixes while they run."""
    asked = [*prompts[:24], *prompts[:24][::-1], *prompts[4:28]]
    answers = server.generate_all(asked, 8)
    expected = plain.references(asked)
    for prompt, answer, reference in zip(asked, answers, expected, strict=True):
        assert_same(answer, reference, plain, prompt)
    assert sum(map(host_tokens, answers)) > 100
    assert server.metric("hicache_host_used_tokens") > POOL
    assert accept_length(answers) > 3


def test_grammars(server: Server, plain: Server, prompts: list[str]) -> None:
    """Their rounds wait for the result before, which may end a request whose prefix is then copied."""
    sampling = {"regex": r"([^#]|#{4}|\n){1,80}", "max_new_tokens": 60}
    asked = prompts[: ASKED // 2]
    server.generate_all(asked, 2, **sampling)
    crowd_out(server, prompts)
    answers = server.generate_all(asked, 2, **sampling)
    assert min(map(host_tokens, answers)) >= 16
    for prompt, answer in zip(asked, answers, strict=True):
        expected = plain.reference(prompt, **sampling)
        assert_same(answer, expected, plain, prompt, **sampling)


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


@pytest.mark.long
@pytest.mark.skipif(DEVICE != "cpu", reason="its tiny heads are made for a CPU")
@pytest.mark.parametrize("worker", CHOSEN_WORKERS)
def test_latents(worker: str, tmp_path: Path, logs: Path) -> None:
    """A target with MLA, whose pool is of another kind than the draft model's."""
    skip_without_memory()
    target, drafter = tmp_path / "target", tmp_path / "drafter"
    drafter.mkdir()
    write_target(target, "DeepSeek-V3", embedding=0.4)
    pair = ("--model-path", str(target), "--skip-tokenizer-init")
    asked = [[(7 * n + 31 * i) % 300 + 5 for i in range(40 + n)] for n in range(38)]
    tokens = {"max_new_tokens": 40, "ignore_eos": True}
    with running(logs / f"host-latents-{worker}-plain.log", *pair) as plain:
        expected = [plain.generate(ids, **tokens)["output_ids"] for ids in asked[:6]]
    pair += ("--speculative-draft-model-path", str(write_drafter(drafter)), "--page-size", "16")
    with running(logs / f"host-latents-{worker}.log", *pair, *HOST, worker=worker) as server:
        for ids in asked[:6]:
            server.generate(ids, **tokens)
        on_device = [server.generate(ids, **tokens) for ids in asked[:6]]
        server.generate_all(asked[6:], 4, **tokens)
        on_host = [server.generate(ids, **tokens) for ids in asked[:6]]
        for ids, first, then in zip(expected, on_device, on_host, strict=True):
            assert host_tokens(first) == 0 and host_tokens(then) == 32
            assert then["output_ids"] == ids
            assert first["meta_info"]["spec_verify_ct"] == then["meta_info"]["spec_verify_ct"]
        server.check_idle()
