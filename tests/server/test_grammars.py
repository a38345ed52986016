"""Requests with grammars answer as in plain decoding, whoever is served beside them."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.server.checks import accept_length, assert_same, assert_speculated, counted
from tests.server.features import SCHEMA, STRUCTURAL_TAG
from tests.server.harness import Server, events, generate_body
from tests.server.test_structured_answers import held_out

ANSWER = {"regex": r"[^#]{20,300}#### [0-9]{1,2}"}
KINDS: tuple[dict[str, Any], ...] = (
    {},
    ANSWER,
    {"json_schema": json.dumps(SCHEMA)},
    {"ebnf": 'root ::= [^#]+ "#### " [0-9] [0-9]', "max_new_tokens": 23},
    {"structural_tag": json.dumps(STRUCTURAL_TAG), "max_new_tokens": 60},
    {"frequency_penalty": 0.4},
    ANSWER | {"stop": ["makes", ".\n"]},
    ANSWER | {"max_new_tokens": 1},
)


def json_of(tokenizer: Any) -> list[tuple[str, dict]]:
    """Prompts that ask for JSON, which the target then writes by itself."""
    asked = []
    for problem in held_out("json"):
        messages = [{"role": "user", "content": problem["question"]}]
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
        asked.append((text, {"json_schema": json.dumps(problem["schema"])}))
    return asked


def test_side_by_side(dflash: Server, plain: Server, tokenizer, prompts: list[str]) -> None:
    """Of all kinds, and with prompts that arrive while others decode."""
    asked = json_of(tokenizer) * 2
    asked += [(prompt, kind) for prompt in prompts[20:23] for kind in KINDS]
    before = counted(dflash)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda each: dflash.generate(each[0], **each[1]), asked))
    moved = counted(dflash) - before
    assert moved["rounds_total", ""] > 100
    for answer, (prompt, kind) in zip(answers, asked, strict=True):
        assert_same(answer, plain.reference(prompt, **kind), plain, prompt, **kind)
    written = answers[: 2 * len(held_out("json"))]
    assert accept_length(written) > 3 and all(json.loads(each["text"]) for each in written)


def test_what_the_target_writes_anyway(dflash: Server, plain: Server, tokenizer) -> None:
    """Nobody waits for masks, and nobody strays."""
    before = counted(dflash)
    for prompt, schema in json_of(tokenizer):
        answer = dflash.generate(prompt, **schema)
        assert_same(answer, plain.reference(prompt, **schema), plain, prompt, **schema)
    moved = counted(dflash) - before
    assert moved["rounds_total", ""] > 10
    assert not moved["fallbacks_total", "history"] and not moved["fallbacks_total", "strayed"]


def test_what_the_target_would_not_write(either: Server, plain: Server, prompts: list[str]) -> None:
    """Whoever strays goes on from its last token, beside others, in a stream, and up to its limit."""
    asked = [
        (prompt, {"regex": pattern, "max_new_tokens": limit})
        for prompt, limit in zip(prompts[20:26], (7, 23, 40, 41, 90, 120), strict=True)
        for pattern in (r"[^aeiou]{200,}", r"([a-z]+ [A-Z]+ ){20,}")
    ]
    counts = either.get("/server_info").json()["enable_metrics"]
    before = counted(either) if counts else None
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda each: either.generate(each[0], **each[1]), asked))
        streams = list(pool.map(lambda each: list(either.stream(each[0], **each[1])), asked))
    for (prompt, kind), answer, parts in zip(asked, answers, streams, strict=True):
        expected = plain.reference(prompt, **kind)
        assert_same(answer, expected, plain, prompt, **kind)
        assert_same(parts[-1], expected, plain, prompt, **kind)
        tokens = [part["meta_info"]["completion_tokens"] for part in parts]
        assert tokens == sorted(set(tokens)), "a part without a new token"
    if counts:
        strayed = (counted(either) - before)["fallbacks_total", "strayed"]
        assert (strayed > len(asked)) == (either.worker == "v2")


def test_end_inside_a_round(dflash: Server, plain: Server, prompts: list[str]) -> None:
    """A grammar's end that is a draft; with `ignore_eos` it shows a token later, wherever the round ends."""
    inside = 0
    for prompt in prompts[20:26]:
        answer = dflash.generate(prompt, **ANSWER)
        assert_same(answer, plain.reference(prompt, **ANSWER), plain, prompt, **ANSWER)
        assert_speculated(answer)
        assert answer["meta_info"]["finish_reason"]["type"] == "stop"
        tokens, own = len(answer["output_ids"]), answer["meta_info"]["spec_verify_ct"]
        shorter = dflash.generate(prompt, **ANSWER, max_new_tokens=tokens - 1)
        inside += own == shorter["meta_info"]["spec_verify_ct"]
        over = ANSWER | {"ignore_eos": True}
        expected = plain.reference(prompt, **over)
        assert_same(dflash.generate(prompt, **over), expected, plain, prompt, **over)
    assert inside


def test_stream(dflash: Server, plain: Server, tokenizer) -> None:
    """Parts of an answer are its beginnings."""
    for prompt, schema in json_of(tokenizer):
        expected = plain.reference(prompt, **schema)
        parts = list(dflash.stream(prompt, **schema))
        assert len(parts) > 2
        assert all(expected["text"].startswith(part["text"]) for part in parts)
        assert_same(parts[-1], expected, plain, prompt, **schema)


def test_several_answers(dflash: Server, plain: Server, prompts: list[str]) -> None:
    """Of one prompt, each with a grammar of its own."""
    answers, expected = (server.generate(prompts[26], n=3, **ANSWER) for server in (dflash, plain))
    assert len(answers) == 3
    for answer, reference in zip(answers, expected, strict=True):
        assert_same(answer, reference, plain, prompts[26])


def test_after_reasoning(dflash: Server, plain: Server, tokenizer, prompts: list[str]) -> None:
    """The grammar begins where the target stops to reason, in the middle of an answer."""
    # What the release takes for the end of reasoning, which the target would write as a part of a longer token.
    end, *_ = tokenizer.encode("</think>", add_special_tokens=False)
    sampling = {"json_schema": json.dumps(SCHEMA), "logit_bias": {str(end): 20.0}}
    bodies = [
        generate_body(prompt, **sampling) | {"require_reasoning": True} for prompt in prompts[20:26]
    ]

    def ask(server: Server) -> list[dict]:
        with ThreadPoolExecutor(6) as pool:
            return list(pool.map(lambda body: server.post("/generate", body).json(), bodies))

    answers, expected = ask(dflash), ask(plain)
    for answer, reference in zip(answers, expected, strict=True):
        assert_same(answer, reference)
    constrained = [ids for ids in (each["output_ids"] for each in answers) if end in ids[16:]]
    assert len(constrained) >= 2
    for ids in constrained:
        text = tokenizer.decode(ids[ids.index(end) + 1 :], skip_special_tokens=True)
        assert json.loads(text).keys() == SCHEMA["properties"].keys()


def test_abort(dflash: Server, plain: Server, prompts: list[str]) -> None:
    """In the middle of an answer; who is served beside it does not notice."""
    endless = generate_body(prompts[27], max_new_tokens=1500, regex=r"(.|\n){4000,}")
    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(dflash.generate, each, **ANSWER) for each in prompts[20:24]]
        body = endless | {"stream": True, "rid": "gone"}
        with dflash.post("/generate", body, stream=True) as response:
            stream = events(response)
            for _ in range(3):
                part = next(stream)
            dflash.post("/abort_request", {"rid": "gone"})
            last = list(stream)[-1]
        answers = [each.result() for each in others]
    assert part["meta_info"]["finish_reason"] is None
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert last["meta_info"]["completion_tokens"] < 1500
    for prompt, answer in zip(prompts[20:24], answers, strict=True):
        assert_same(answer, plain.reference(prompt, **ANSWER), plain, prompt, **ANSWER)
