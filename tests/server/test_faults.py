"""What clients do to a server, and that it survives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests

from tests.server.checks import assert_same, check
from tests.server.harness import CHOSEN_WORKERS, Server, decodes, events, generate_body

LONG = {"max_new_tokens": 1500, "ignore_eos": True}


def test_client_goes_away_in_a_stream(dflash: Server, plain: Server, prompts: list[str]) -> None:
    """Its slots come back at once, not when the answer would have ended."""
    body = generate_body(prompts[70], **LONG) | {"stream": True}
    with dflash.post("/generate", body, stream=True) as response:
        decodes(events(response))
    dflash.wait_until_idle(seconds=10)
    check(dflash, plain, prompts[70], max_new_tokens=30)


def test_abort_in_the_queue(dflash: Server, plain: Server, prompts: list[str]) -> None:
    """The server runs 16 at once; the one that waits behind them goes before it began."""
    with ThreadPoolExecutor(17) as pool:
        running = [
            pool.submit(dflash.post, "/generate", generate_body(prompt, **LONG) | {"rid": f"r{i}"})
            for i, prompt in enumerate(prompts[71:87])
        ]
        dflash.wait_for_requests(16)
        body = generate_body(prompts[87], **LONG) | {"rid": "waits", "stream": True}
        # A stream is answered when its first part is there.
        waiting = pool.submit(dflash.post, "/generate", body, stream=True)
        dflash.wait_for_requests(17)
        assert dflash.post("/abort_request", {"rid": "waits"}).status_code == 200
        with waiting.result() as response:
            *_, last = events(response)
        assert last["meta_info"]["finish_reason"]["type"] == "abort"
        assert last["meta_info"].get("completion_tokens", 0) == 0
        assert dflash.load()["num_reqs"] >= 1 and not all(each.done() for each in running)
        dflash.post("/abort_request", {"rid": "", "abort_all": True})
    # Its id is free again.
    sampling = {"max_new_tokens": 30}
    again = dflash.post("/generate", generate_body(prompts[87], **sampling) | {"rid": "waits"})
    assert again.status_code == 200, again.text
    assert_same(again.json(), plain.reference(prompts[87], **sampling))


def test_duplicate_ids(dflash: Server, plain: Server, prompts: list[str]) -> None:
    """The second is refused with a sentence; the first goes on."""
    body = generate_body(prompts[89], **LONG) | {"rid": "twin"}
    with dflash.post("/generate", body | {"stream": True}, stream=True) as response:
        stream = events(response)
        next(stream)
        second = dflash.post("/generate", body)
        *_, last = stream
    assert second.status_code == 400 and "twin" in second.text
    expected = plain.reference(prompts[89], max_new_tokens=300, ignore_eos=True)["output_ids"]
    assert last["output_ids"][:300] == expected
    assert len(last["output_ids"]) == LONG["max_new_tokens"]
    both = {"text": prompts[89:91], "rid": ["same", "same"], "sampling_params": {}}
    answer = dflash.post("/generate", both)
    assert answer.status_code == 400 and "same" in answer.text
    check(dflash, plain, prompts[90], max_new_tokens=30)


def test_ids_are_free_again(dflash: Server, plain: Server, prompts: list[str]) -> None:
    """Also where SGLang refuses after it has noted the id, and where each copy gets another."""
    too_long = generate_body([5] * 3000, max_new_tokens=4) | {"rid": "mine"}
    assert dflash.post("/generate", too_long).status_code == 400
    body = generate_body(prompts[89], max_new_tokens=30, n=3) | {"rid": "mine"}
    for _ in range(2):
        copies = dflash.post("/generate", body)
        assert copies.status_code == 200, copies.text
        for copy in copies.json():
            assert_same(copy, plain.reference(prompts[89], max_new_tokens=30))
    alone = generate_body(prompts[89], max_new_tokens=30) | {"rid": "mine"}
    assert_same(
        dflash.post("/generate", alone).json(), plain.reference(prompts[89], max_new_tokens=30)
    )


@pytest.fixture(params=CHOSEN_WORKERS)
def chunked(request: pytest.FixtureRequest, _servers: Callable) -> Iterator[Server]:
    """Prefills 64 tokens at a time, so that long prompts are in prefill for a while."""
    server = _servers(request.param, "page16")
    yield server
    server.check_idle()


def test_abort_in_prefill(chunked: Server, plain: Server, tokenizer, prompts: list[str]) -> None:
    """A prompt of many chunks, aborted when some of them are there: it ends with its first token."""
    prompt = tokenizer.encode("".join(prompts[88:128]))[:1900]
    for attempt in range(2):
        ids = [*prompt[attempt:], *prompt[:attempt]]  # not in the cache
        body = generate_body(ids, max_new_tokens=100, ignore_eos=True) | {"rid": f"p{attempt}"}
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(chunked.post, "/generate", body)
            while not 64 <= (load := chunked.load())["num_tokens"] or load["num_waiting_reqs"]:
                assert not asked.done()
            assert chunked.post("/abort_request", {"rid": body["rid"]}).status_code == 200
            ended = asked.result().json()["meta_info"]
        assert load["num_tokens"] < len(prompt)
        assert ended["finish_reason"]["type"] == "abort"
        assert ended["completion_tokens"] <= 1
    check(chunked, plain, prompts[88], max_new_tokens=30)


def test_clients_leave(chunked: Server, plain: Server, tokenizer, prompts: list[str]) -> None:
    """In the queue, in prefill and in decode, with a stream and without; who stays is served right."""
    text = tokenizer.encode("".join(prompts[110:140]))
    bodies = [
        generate_body(text[30 * i :][:1200], max_new_tokens=600, ignore_eos=True) for i in range(10)
    ]
    with ThreadPoolExecutor(12) as pool:
        stays = pool.submit(chunked.generate, prompts[109], max_new_tokens=60)
        left = [
            pool.submit(leave, chunked, body | {"stream": number % 2 == 0})
            for number, body in enumerate(bodies)
        ]
        chunked.wait_for_requests(3)
        assert_same(stays.result(), plain.reference(prompts[109], max_new_tokens=60))
        assert not all([each.result() for each in left])
    chunked.wait_until_idle()
    check(chunked, plain, prompts[109], max_new_tokens=60)


def leave(server: Server, body: dict) -> bool:
    """Asks, and goes half a second later; whether it had an answer or the beginning of one by then."""
    try:
        requests.post(f"{server.url}/generate", json=body, timeout=0.5, stream=True).close()
    except requests.Timeout:
        return False
    return True
