"""Requests with grammars: whoever is served beside them, they answer as in plain decoding."""

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
        assert_same(answer, plain.reference(prompt, **kind), plain, prompt)
    written = answers[: 2 * len(held_out("json"))]
    assert accept_length(written) > 3 and all(json.loads(each["text"]) for each in written)


def test_end_inside_a_round(dflash: Server, plain: Server, prompts: list[str]) -> None:
    """A grammar's end that is a draft."""
    inside = 0
    for prompt in prompts[20:26]:
        answer = dflash.generate(prompt, **ANSWER)
        assert_same(answer, plain.reference(prompt, **ANSWER), plain, prompt)
        assert_speculated(answer)
        assert answer["meta_info"]["finish_reason"]["type"] == "stop"
        tokens, own = len(answer["output_ids"]), answer["meta_info"]["spec_verify_ct"]
        shorter = dflash.generate(prompt, **ANSWER, max_new_tokens=tokens - 1)
        inside += own == shorter["meta_info"]["spec_verify_ct"]
    assert inside


def test_stream(dflash: Server, plain: Server, tokenizer) -> None:
    """Parts of an answer are its beginnings."""
    for prompt, schema in json_of(tokenizer):
        expected = plain.reference(prompt, **schema)
        parts = list(dflash.stream(prompt, **schema))
        assert len(parts) > 2
        assert all(expected["text"].startswith(part["text"]) for part in parts)
        assert_same(parts[-1], expected, plain, prompt)


def test_several_answers(dflash: Server, plain: Server, prompts: list[str]) -> None:
    """Of one prompt, each with a grammar of its own."""
    answers, expected = (server.generate(prompts[26], n=3, **ANSWER) for server in (dflash, plain))
    assert len(answers) == 3
    for answer, reference in zip(answers, expected, strict=True):
        assert_same(answer, reference, plain, prompts[26])


def test_after_reasoning(dflash: Server, plain: Server, problems: list[dict]) -> None:
    """The grammar begins when the target stops to reason, in the middle of a round."""
    schema = {"name": "person", "schema": SCHEMA}
    asked = [
        {
            "model": "default",
            "temperature": 0,
            "max_tokens": 400,
            "messages": [{"role": "user", "content": problem["question"]}],
            "response_format": {"type": "json_schema", "json_schema": schema},
        }
        for problem in problems[20:24]
    ]

    def ask(server: Server) -> list[tuple]:
        with ThreadPoolExecutor(4) as pool:
            answers = list(
                pool.map(lambda body: server.post("/v1/chat/completions", body).json(), asked)
            )
        return [
            (choice["message"]["reasoning_content"], choice["message"]["content"], usage)
            for answer in answers
            for choice, usage in [(answer["choices"][0], answer["usage"]["completion_tokens"])]
        ]

    answers, expected = ask(dflash), ask(plain)
    assert answers == expected
    assert all(reasons and json.loads(content) for reasons, content, _ in answers)


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
        assert_same(answer, plain.reference(prompt, **ANSWER), plain, prompt)
