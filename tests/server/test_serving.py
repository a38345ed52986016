"""How requests arrive and leave: streams, copies, shared and long prompts, aborts."""

from __future__ import annotations

import re

import pytest

from tests.server.checks import accept_length, assert_same, assert_speculated, check
from tests.server.conftest import CONTEXT
from tests.server.harness import Server, decodes, events, generate_body


def long_prompt(tokenizer, prompts: list[str], problems: list[dict], tokens: int) -> list[int]:
    """`tokens` ids: solved problems, then the question of prompts[0]."""
    question = tokenizer.encode(prompts[0])
    solved: list[int] = []
    for prompt, problem in zip(prompts[1:], problems[1:], strict=True):
        if len(solved) >= tokens:
            break
        solved += tokenizer.encode(f"{prompt}{problem['answer']}<|im_end|>\n")
    return solved[: tokens - len(question)] + question


def test_stream(either: Server, plain: Server, prompts: list[str]) -> None:
    chunks = list(either.stream(prompts[0]))
    counts = [chunk["meta_info"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(set(counts))
    assert len(chunks) > 2
    for earlier, later in zip(chunks, chunks[1:], strict=False):
        assert later["text"].startswith(earlier["text"])
        assert later["output_ids"][: len(earlier["output_ids"])] == earlier["output_ids"]
    for chunk, count in zip(chunks, counts, strict=True):
        assert len(chunk["output_ids"]) == count
    assert_same(chunks[-1], plain.reference(prompts[0]))
    assert_speculated(chunks[-1])
    assert len(chunks) < counts[-1] / 2  # a chunk holds a whole round


def test_copies(either: Server, plain: Server, prompts: list[str]) -> None:
    answers = either.generate(prompts[1], n=3)
    assert len(answers) == 3
    for answer in answers:
        assert_same(answer, plain.reference(prompts[1]))
        assert_speculated(answer, at_least=3)


def test_prompt_in_the_cache(either: Server, plain: Server, prompts: list[str]) -> None:
    """Draft KV of a cached prompt is that of the request that computed it: as many rounds."""
    cold = check(either, plain, prompts[2])
    warm = check(either, plain, prompts[2])
    assert cold["meta_info"]["cached_tokens"] == 0
    assert warm["meta_info"]["cached_tokens"] >= warm["meta_info"]["prompt_tokens"] - 17
    assert accept_length([warm]) == pytest.approx(accept_length([cold]), rel=0.15)


@pytest.mark.parametrize("ends", ["stop", "length"])
def test_next_turn(either: Server, plain: Server, tokenizer, prompts: list[str], ends: str) -> None:
    """It finds an answer's K/V to the last token, where that was run: a draft, or by a round in vain."""
    page, found = either.get("/server_info").json()["page_size"], []
    for prompt in prompts[60:66]:
        first, question = tokenizer.encode(prompt), tokenizer.encode(prompts[70])
        # A whole page at the end, which one token less is not.
        limits = {"max_new_tokens": 24 + -(len(first) + 24) % 16, "ignore_eos": True}
        either.post("/flush_cache")
        answer = either.generate(first, **(limits if ends == "length" else {}))
        assert answer["meta_info"]["finish_reason"]["type"] == ends
        turn = [*first, *answer["output_ids"]]
        cached = check(either, plain, turn + question, max_new_tokens=40)["meta_info"][
            "cached_tokens"
        ]
        assert cached in (len(turn) // page * page, (len(turn) - 1) // page * page)
        found.append(cached == len(turn) // page * page)
    assert all(found) if either.worker == "v2" else any(found)


def test_shared_prompt(
    either: Server, plain: Server, tokenizer, prompts: list[str], problems: list[dict]
) -> None:
    """Eight requests at once that share a prefix with an earlier one."""
    shared = long_prompt(tokenizer, prompts, problems, 150)
    either.generate(shared, max_new_tokens=4)
    asked = [shared[:70] + tokenizer.encode(prompt) for prompt in prompts[20:28]]
    answers = either.generate_all(asked, concurrency=8)
    for prompt, answer in zip(asked, answers, strict=True):
        assert_same(answer, plain.reference(prompt))
        assert answer["meta_info"]["cached_tokens"] >= 64
    assert accept_length(answers) > 4


def test_answer_in_the_cache(either: Server, plain: Server, tokenizer, prompts: list[str]) -> None:
    """A second turn reads context K/V that rounds wrote for the first answer."""
    first = either.generate(prompts[3])
    turn = tokenizer.encode(prompts[3]) + first["output_ids"] + tokenizer.encode("\n" + prompts[4])
    answer = check(either, plain, turn)
    assert answer["meta_info"]["cached_tokens"] > first["meta_info"]["prompt_tokens"] + 16
    either.post("/flush_cache")
    assert answer["meta_info"]["spec_verify_ct"] == pytest.approx(
        check(either, plain, turn)["meta_info"]["spec_verify_ct"], rel=0.15
    )


def test_flush(either: Server, plain: Server, prompts: list[str]) -> None:
    check(either, plain, prompts[5])
    either.check_idle()  # flushes, when a round that ran for nothing has ended
    again = check(either, plain, prompts[5])
    assert again["meta_info"]["cached_tokens"] == 0


@pytest.mark.parametrize("tokens", [63, 64, 65, 129, 700])
def test_prompt_longer_than_a_chunk(
    either: Server, plain: Server, tokenizer, prompts: list[str], problems: list[dict], tokens: int
) -> None:
    """One of the variants prefills 64 tokens at a time."""
    prompt = long_prompt(tokenizer, prompts, problems, tokens)
    answer = check(either, plain, prompt)
    assert answer["meta_info"]["prompt_tokens"] == tokens
    assert accept_length([answer]) > 3


def test_up_to_the_context_limit(
    either: Server, plain: Server, tokenizer, prompts: list[str], problems: list[dict]
) -> None:
    """Blocks at the end of the context reach beyond it; the first prompt is computed, the others are cached."""
    prompt = long_prompt(tokenizer, prompts, problems, CONTEXT - 60)
    for spare in (0, 1, 15, 16, 17):
        limit = CONTEXT - 2 - len(prompt) - spare  # the release keeps two positions free
        answer = either.generate(prompt, max_new_tokens=limit, ignore_eos=True)
        assert_same(answer, plain.reference(prompt, max_new_tokens=limit, ignore_eos=True))
        assert answer["meta_info"]["completion_tokens"] == limit
        assert_speculated(answer)


def test_more_than_the_context(either: Server, plain: Server, tokenizer) -> None:
    """What does not fit is answered as plain decoding answers it: refused, or cut."""
    prompt = tokenizer.encode("how many " * 600)[:1000]
    for body in (
        generate_body(prompt, max_new_tokens=CONTEXT),
        generate_body(prompt * 3, max_new_tokens=8),
    ):
        answers = [server.post("/generate", body) for server in (either, plain)]
        assert answers[0].status_code == answers[1].status_code == 400
        assert answers[0].json()["error"]["message"] == answers[1].json()["error"]["message"]


def test_abort(either: Server, plain: Server, prompts: list[str]) -> None:
    """An aborted request ends soon, and what it gave until then is right."""
    body = generate_body(prompts[7], max_new_tokens=1500, ignore_eos=True)
    with either.post("/generate", body | {"stream": True, "rid": "gone"}, stream=True) as response:
        chunks = []
        for chunk in events(response):
            chunks.append(chunk)
            if len(chunks) == 3:
                assert either.post("/abort_request", {"rid": "gone"}).status_code == 200
    assert chunks[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    expected = plain.reference(prompts[7], max_new_tokens=150, ignore_eos=True)["output_ids"]
    ids = chunks[-1]["output_ids"]
    assert 0 < len(ids) < 1500
    assert ids[:150] == expected[: len(ids)]


def test_client_goes_away(either: Server, prompts: list[str]) -> None:
    """The server notices it and drops the request beside one that stays."""
    body = generate_body(prompts[8], max_new_tokens=1900, ignore_eos=True) | {"stream": True}
    with either.post("/generate", body, stream=True) as response:
        decodes(events(response))
    either.wait_until_idle(seconds=30)


def test_abort_beside_others(either: Server, plain: Server, prompts: list[str]) -> None:
    """Requests that run beside an aborted one go on as if nothing were."""
    body = generate_body(prompts[9], max_new_tokens=1500, ignore_eos=True)
    with either.post("/generate", body | {"stream": True, "rid": "gone"}, stream=True) as response:
        stream = events(response)
        next(stream)
        either.post("/abort_request", {"rid": "gone"})
        answers = either.generate_all(prompts[10:14], concurrency=4)
        last = list(stream)[-1]
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    for prompt, answer in zip(prompts[10:14], answers, strict=True):
        assert_same(answer, plain.reference(prompt))


def test_memory_is_as_planned(dflash: Server) -> None:
    """The log's plan, by which the pool is sized, against what was allocated."""
    log = dflash.log.read_text(errors="replace")
    planned = re.search(
        r"planned: (\d+) bytes of target KV and (\d+) of draft KV a slot, (\d+) bytes of draft", log
    )
    allocated = re.search(
        r"allocated: (\d+) bytes of target KV and (\d+) of draft KV in (\d+) slots, (\d+) bytes",
        log,
    )
    target_kv, draft_kv, weights = map(int, planned.groups())
    target_pool, draft_pool, slots, model = map(int, allocated.groups())
    assert target_pool == pytest.approx(target_kv * slots, rel=0.01)
    assert draft_pool == pytest.approx(draft_kv * slots, rel=0.01)
    assert model == pytest.approx(weights, rel=0.01)
