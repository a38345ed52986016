"""Streaming sessions: conversations whose turns go on from the K/V of those before."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.server.checks import assert_same, assert_speculated
from tests.server.harness import (
    CHOSEN_WORKERS,
    Server,
    decodes,
    events,
    generate_body,
    in_long,
    running,
)

SESSIONS = 4  # as many requests run at once
BLOCKING = {"max_new_tokens": 1500, "ignore_eos": True}
ARGUMENTS = (
    "--enable-streaming-session",
    *("--max-running-requests", str(SESSIONS)),
    *("--reasoning-parser", "qwen3"),
)
PAGES = {"v1": ("--page-size", "16", "--chunked-prefill-size", "64")}


@pytest.fixture(scope="module", params=[*CHOSEN_WORKERS, *in_long("plain")])
def started(request: pytest.FixtureRequest, logs: Path) -> Iterator[Server]:
    """Plain decoding too, whose sessions the release ends in the same places."""
    name = request.param
    worker = None if name == "plain" else name
    arguments = (*ARGUMENTS, *PAGES.get(name, ()))
    with running(logs / f"sessions-{name}.log", *arguments, worker=worker) as server:
        yield server


class Conversation:
    """A session on a server and all tokens of it so far."""

    def __init__(self, server: Server, **options: Any):
        body = {"capacity_of_str_len": 10000, "streaming": True} | options
        response = server.post("/open_session", body)
        assert response.status_code == 200, response.text
        self.server, self.id, self.tokens = server, response.json(), []

    def body(self, prompt: list[int], **sampling: Any) -> dict:
        return generate_body(prompt, **sampling) | {"session_params": {"id": self.id}}

    def ask(self, prompt: list[int], **sampling: Any) -> dict:
        response = self.server.post("/generate", self.body(prompt, **sampling))
        assert response.status_code == 200, response.text
        answer = response.json()
        self.tokens += prompt + answer["output_ids"]
        return answer

    def check(self, plain: Server, prompt: list[int], **sampling: Any) -> dict:
        """A turn that answers what plain decoding does, on what was there before."""
        context = [*self.tokens, *prompt]
        answer = self.ask(prompt, **sampling)
        assert_same(answer, plain.reference(context, **sampling), plain, context)
        if self.server.worker and sampling.get("max_new_tokens", 2) > 1:
            assert_speculated(answer)
        return answer

    def close(self) -> None:
        assert self.server.post("/close_session", {"session_id": self.id}).status_code == 200


@pytest.fixture
def server(started: Server) -> Iterator[Server]:
    """After each test all sessions are closed, and every slot and row must be free."""
    yield started
    started.check_idle()


@pytest.fixture(scope="module")
def turns(prompts: list[str], tokenizer) -> list[list[int]]:
    return [tokenizer.encode(prompt) for prompt in prompts]


@pytest.fixture
def conversation(server: Server) -> Iterator[Conversation]:
    opened = Conversation(server)
    yield opened
    opened.close()


def test_turns(conversation: Conversation, plain: Server, turns: list[list[int]]) -> None:
    """Turns of any length, with any end, run only what is new."""
    ends = (
        {"max_new_tokens": 30},
        {},
        {"max_new_tokens": 1},
        {"max_new_tokens": 0},
        {"stop": ["="]},
    )
    for prompt, sampling in zip([*turns[:4], turns[5][:1]], ends, strict=True):
        before = len(conversation.tokens)
        meta = conversation.check(plain, prompt, **sampling)["meta_info"]
        assert meta["prompt_tokens"] == before + len(prompt)
        assert before - 1 <= meta["cached_tokens"] <= before


def test_conversations(server: Server, plain: Server, turns: list[list[int]]) -> None:
    """Beside each other and beside requests of no session."""

    def talk(number: int) -> None:
        conversation = Conversation(server)
        for prompt in turns[3 * number : 3 * number + 3]:
            conversation.check(plain, prompt, max_new_tokens=60)
            alone = server.generate(prompt, max_new_tokens=40)
            assert_same(alone, plain.reference(prompt, max_new_tokens=40), plain, prompt)
        conversation.close()

    with ThreadPoolExecutor(SESSIONS) as pool:
        list(pool.map(talk, range(SESSIONS)))


def stays(conversation: Conversation, plain: Server, prompt: list[int], turn: list[int]) -> None:
    """After a turn that was aborted, the next has all of it before itself, and answers right."""
    context = [*conversation.tokens, *prompt]
    answer = conversation.ask(turn, max_new_tokens=40)
    said = answer["meta_info"]["prompt_tokens"] - len(turn) - len(context)
    if said:
        sampling = {"max_new_tokens": said, "ignore_eos": True}
        context += plain.reference(context, **sampling)["output_ids"]
    context += turn
    assert_same(answer, plain.reference(context, max_new_tokens=40), plain, context)
    conversation.tokens = context + answer["output_ids"]


@pytest.mark.parametrize("chunks", [0, 1, 5])
@pytest.mark.parametrize("first", [True, False])
def test_abort(
    conversation: Conversation, plain: Server, turns: list[list[int]], chunks: int, first: bool
) -> None:
    """In the prefill or after some rounds, in the first turn or a later one."""
    server = conversation.server
    if not first:
        conversation.check(plain, turns[10], max_new_tokens=20)
    body = conversation.body(turns[11], **BLOCKING) | {
        "stream": True,
        "rid": f"abort-{chunks}-{first}",
    }
    with ThreadPoolExecutor(1) as pool:
        streamed = pool.submit(lambda: server.post("/generate", body, stream=True))
        if chunks == 0:
            server.wait_for_requests(1)
            assert server.post("/abort_request", {"rid": body["rid"]}).status_code == 200
        seen = []
        for number, event in enumerate(events(streamed.result()), start=1):
            seen.append(event)
            if number == chunks:
                assert server.post("/abort_request", {"rid": body["rid"]}).status_code == 200
    assert seen[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    stays(conversation, plain, turns[11], turns[12])
    conversation.check(plain, turns[13], max_new_tokens=20)


def test_the_client_goes_away(
    conversation: Conversation, plain: Server, turns: list[list[int]]
) -> None:
    conversation.check(plain, turns[14], max_new_tokens=20)
    body = conversation.body(turns[15], **BLOCKING) | {"stream": True}
    with conversation.server.post("/generate", body, stream=True) as response:
        decodes(events(response))
    idle(conversation.server)
    stays(conversation, plain, turns[15], turns[16])


def idle(server: Server) -> None:
    deadline = time.monotonic() + 20
    while server.load()["num_reqs"] and time.monotonic() < deadline:
        time.sleep(0.02)


def test_abort_in_the_queue(
    conversation: Conversation, plain: Server, turns: list[list[int]]
) -> None:
    """Nothing of the turn was run; its prompt stays in the conversation, as in plain decoding."""
    server = conversation.server
    conversation.check(plain, turns[17], max_new_tokens=20)
    with ThreadPoolExecutor(SESSIONS + 1) as pool:
        bodies = [generate_body(prompt, **BLOCKING) for prompt in turns[20 : 20 + SESSIONS]]
        others = [pool.submit(server.post, "/generate", body) for body in bodies]
        server.wait_for_requests(SESSIONS)
        own = pool.submit(server.post, "/generate", conversation.body(turns[18]) | {"rid": "waits"})
        server.wait_for_requests(SESSIONS + 1)
        assert server.post("/abort_request", {"rid": "waits"}).status_code == 200
        assert own.result().json()["meta_info"]["finish_reason"]["type"] == "abort"
        assert not any(other.done() for other in others), "nothing had to wait"
        assert server.post("/abort_request", {"abort_all": True}).status_code == 200
    stays(conversation, plain, turns[18], turns[19])


REFUSED = {
    "offset": ({"offset": 1}, {}, "offset 1 is not supported in a streaming session"),
    "replace": ({"replace": True}, {}, "replace True is not supported in a streaming session"),
    "drop": ({"drop_previous_output": True}, {}, "drop_previous_output True is not supported"),
    "copies": ({}, {"n": 2}, "n 2 is not supported in a streaming session"),
    "grammar": ({}, {"regex": "(("}, "Failed to compile regex grammar"),
    "long": ({}, {}, "exceeds the maximum allowed length"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_turns(
    conversation: Conversation, plain: Server, turns: list[list[int]], name: str
) -> None:
    """Status 400 and a sentence, in any turn, streamed or not; none of them is part of the session."""
    parameters, sampling, sentence = REFUSED[name]
    prompt = [5] * 4050 if name == "long" else turns[32]
    for turn in range(3):
        body = conversation.body(prompt, max_new_tokens=20, **sampling)
        body["session_params"] |= parameters
        body["stream"] = turn == 1 and name != "copies"  # each copy would have an event instead
        if not (turn == 0 and name == "long"):
            response = conversation.server.post("/generate", body)
            assert response.status_code == 400 and sentence in response.text, response.text
        conversation.check(plain, turns[29 + turn], max_new_tokens=20)


def test_a_turn_before_the_last_one_ended(
    conversation: Conversation, plain: Server, turns: list[list[int]]
) -> None:
    server = conversation.server
    conversation.check(plain, turns[34], max_new_tokens=20)
    with ThreadPoolExecutor(1) as pool:
        body = conversation.body(turns[35], **BLOCKING) | {"rid": "first"}
        running = pool.submit(server.post, "/generate", body)
        server.wait_for_requests(1)
        response = server.post("/generate", conversation.body(turns[36]))
        assert response.status_code == 400
        assert "is still answering request first" in response.text
        assert server.post("/abort_request", {"rid": "first"}).status_code == 200
        assert running.result().json()["meta_info"]["finish_reason"]["type"] == "abort"
    stays(conversation, plain, turns[35], turns[37])


@pytest.mark.parametrize("before", [0, 1])
def test_closed_while_a_turn_runs(
    server: Server, plain: Server, turns: list[list[int]], before: int
) -> None:
    """The turn goes on to its end, and leaves nothing."""
    for _ in range(5):  # it may end before the session does
        conversation = Conversation(server)
        for prompt in turns[38 : 38 + before]:
            conversation.check(plain, prompt, max_new_tokens=20)
        with ThreadPoolExecutor(2) as pool:
            running = pool.submit(
                conversation.check, plain, turns[40], max_new_tokens=250, ignore_eos=True
            )
            while not server.load()["num_reqs"] and not running.done():
                time.sleep(0.01)
            conversation.close()
            other = pool.submit(server.generate, turns[41])
            shown = not running.done()
            running.result()
            assert_same(other.result(), plain.reference(turns[41]), plain, turns[41])
        if shown:
            return
    pytest.fail("each turn ended before its session did")


def test_all_sessions_are_open(server: Server, plain: Server, turns: list[list[int]]) -> None:
    """Each keeps a row of the table of requests, and as many requests as ever run find others."""
    opened = [Conversation(server) for _ in range(SESSIONS)]
    response = server.post("/open_session", {"capacity_of_str_len": 10000, "streaming": True})
    assert response.status_code == 400, response.text
    assert f"{SESSIONS} streaming sessions are open" in response.text
    for conversation, prompt in zip(opened, turns[42:], strict=False):
        conversation.check(plain, prompt, max_new_tokens=20)
    answers = server.generate_all(turns[:6], concurrency=6, max_new_tokens=30)
    for prompt, answer in zip(turns[:6], answers, strict=True):
        assert_same(answer, plain.reference(prompt, max_new_tokens=30), plain, prompt)
    opened.pop().close()
    opened.append(Conversation(server))
    for conversation in opened:
        conversation.close()


def test_flush(conversation: Conversation, plain: Server, turns: list[list[int]]) -> None:
    """What sessions keep is forgotten, not what was said."""
    conversation.check(plain, turns[26], max_new_tokens=20)
    assert conversation.server.post("/flush_cache?timeout=20").status_code == 200
    assert (
        conversation.check(plain, turns[27], max_new_tokens=20)["meta_info"]["cached_tokens"] == 0
    )


@pytest.mark.long
def test_random_turns(server: Server, plain: Server, turns: list[list[int]]) -> None:
    """Turns that end, are aborted at any time or are refused, in sessions that are closed at any time."""
    deadline = time.monotonic() + 60
    talked = []

    def talk(seed: int) -> None:
        dice, answers = random.Random(seed), 0
        while time.monotonic() < deadline:
            conversation = Conversation(server)
            for prompt in dice.sample(turns, dice.randint(1, 6)):
                answers += step(conversation, plain, prompt, dice)
            conversation.close()
        talked.append(answers)

    with ThreadPoolExecutor(SESSIONS) as pool:
        list(pool.map(talk, range(SESSIONS)))
    print(f"{sum(talked)} turns")
    assert sum(talked) > 20


def step(conversation: Conversation, plain: Server, prompt: list[int], dice: random.Random) -> int:
    """One turn, or two if the first is aborted; how many answers were compared."""
    server = conversation.server
    if dice.random() < 0.5:
        conversation.check(plain, prompt, max_new_tokens=dice.choice([0, 1, 7, 30, 80]))
        return 1
    if dice.random() < 0.3:
        body = conversation.body(prompt)
        body["session_params"]["offset"] = 1
        assert server.post("/generate", body).status_code == 400
        return 0
    body = conversation.body(prompt, **BLOCKING) | {"rid": f"{conversation.id}-{dice.random()}"}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.post, "/generate", body)
        time.sleep(dice.uniform(0, 0.2))
        while not running.done():  # an abort that comes before its request aborts nothing
            assert server.post("/abort_request", {"rid": body["rid"]}).status_code == 200
            time.sleep(0.05)
        assert running.result().json()["meta_info"]["finish_reason"]["type"] == "abort"
    stays(conversation, plain, prompt, prompt[-9:])
    return 1
