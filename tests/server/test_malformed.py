"""Requests of wrong types: each is answered 4xx with a sentence, and the server goes on."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests

from tests.server.bodies import Malformed, everything
from tests.server.checks import check
from tests.server.harness import REQUEST_SECONDS, Server, generate_body

HEADERS = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def derived() -> list[Malformed]:
    return everything()


def test_a_tenth(
    dflash: Server, plain: Server, prompts: list[str], derived: list[Malformed]
) -> None:
    """Half of them by each worker, in front of which bodies are read alike."""
    tenth = random.Random(0).sample(derived, len(derived) // 10)
    assert_all_refused(dflash, tenth[runs_v2(dflash) :: 2], at_least=500)
    check(dflash, plain, prompts[0], max_new_tokens=30)


@pytest.mark.long
def test_all(dflash: Server, plain: Server, prompts: list[str], derived: list[Malformed]) -> None:
    assert_all_refused(dflash, derived, at_least=5000)
    check(dflash, plain, prompts[0], max_new_tokens=30)


def runs_v2(server: Server) -> bool:
    return not server.get("/server_info").json()["disable_overlap_schedule"]


def assert_all_refused(server: Server, cases: Sequence[Malformed], at_least: int) -> None:
    assert len(cases) >= at_least
    with ThreadPoolExecutor(4) as pool:
        shares = pool.map(lambda share: list(refusals(server, share)), _shares(cases, 4))
        wrong = [each for share in shares for each in share]
    counts = Counter((case.method, case.path) for case in cases)
    for (method, path), count in sorted(counts.items()):
        fields = Counter(case.field for case in cases if (case.method, case.path) == (method, path))
        by_field = ", ".join(f"{field} {number}" for field, number in sorted(fields.items()))
        print(f"{count} to {method} {path}: {by_field}")
    assert not wrong, f"{len(wrong)} of {len(cases)}:\n" + "\n".join(wrong[:20])


def _shares(cases: Sequence[Malformed], number: int) -> list[Sequence[Malformed]]:
    return [cases[first::number] for first in range(number)]


def refusals(server: Server, cases: Sequence[Malformed]) -> Iterator[str]:
    """Sends each; what is not as it should be of an answer, or that there was none."""
    with requests.Session() as session:
        for case in cases:
            asked = f"{case.method} {case.path} {case.text[:300]}"
            try:
                answer = session.request(
                    case.method,
                    server.url + case.path,
                    data=case.text,
                    headers=HEADERS,
                    timeout=REQUEST_SECONDS,
                )
            except requests.RequestException as error:
                yield f"{asked}: no answer, {error}"
                continue
            if wrong := what_is_wrong(answer, case):
                yield f"{asked}: {wrong}"


def what_is_wrong(answer: requests.Response, case: Malformed) -> str | None:
    """Of the answer to a malformed body: a 4xx with a sentence that names the field, or the body."""
    if not 400 <= answer.status_code < 500:
        return f"status {answer.status_code}, {answer.text[:300]}"
    told = answer.json()
    sentence = told.get("error", told)["message"]
    if not sentence.endswith(".") or "\n" in sentence or "Traceback" in sentence:
        return f"no sentence: {sentence[:300]}"
    # Sampling parameters are named alone, which is what they are called on all routes.
    named = (*case.field.split("."), "The body")
    unknown = sentence.endswith(" is not known: leave it out.")  # names what is inside the field
    if case.field != "(body)" and not unknown and not sentence.startswith(named):
        return f"another field: {sentence[:300]}"
    return None


# What ended the server, or was answered 500, before bodies were read as declared.
GENERATE = {"text": "How many?", "sampling_params": {"max_new_tokens": 1}}
NAMED: dict[str, dict[str, Any]] = {
    "session_params.id {'a': 1}": {"session_params": {"id": {"a": 1}}},
    "session_params.id ['a']": {"session_params": {"id": ["a"]}},
    "session_params.rid {}": {"session_params": {"id": "open", "rid": {}}},
    "session_params.offset 'x'": {"session_params": {"id": "open", "offset": "x"}},
    "session_params.offset [1]": {"session_params": {"id": "open", "offset": [1]}},
    "session_params.unknown 1": {"session_params": {"id": "open", "unknown": 1}},
    "session_params has 2 entries": {"session_params": [{"id": "open"}, {"id": "open"}]},
    "rid has 2 entries": {"rid": ["a", "b"]},
    "top_logprobs_num has 2 entries": {"return_logprob": True, "top_logprobs_num": [1, 1]},
    "extra_key ['a', 'b'] is a list": {"text": ["a", "b"], "extra_key": ["a", "b"]},
    "n 1000000000": {"sampling_params": {"n": 10**9}},
    "logit_bias.5 1e+39": {"sampling_params": {"logit_bias": {"5": 1e39}}},
    "repetition_penalty 1e-308": {"sampling_params": {"repetition_penalty": 1e-308}},
    "structural_tag ''": {"sampling_params": {"structural_tag": ""}},
    "custom_labels has 'a'": {"custom_labels": {"a": "b"}},
    "text and input_ids are": {"input_ids": [[5]]},
    "top_k 2147483648": {"sampling_params": {"top_k": 1 << 31}},
}


def test_named(dflash: Server, plain: Server, prompts: list[str]) -> None:
    """One after the other: after each the same session and the same server serve on."""
    opened = dflash.post("/open_session", {"capacity_of_str_len": 1000, "session_id": "open"})
    assert opened.status_code == 200, opened.text
    for named, fields in NAMED.items():
        answer = dflash.post("/generate", GENERATE | fields)
        assert answer.status_code == 400, answer.text
        sentence = answer.json()["error"]["message"]
        assert sentence.startswith(named) and sentence.endswith("."), sentence
        whole = dflash.post("/generate", GENERATE | {"session_params": {"id": "open"}})
        assert whole.status_code == 200, (named, whole.text)
    assert dflash.post("/close_session", {"session_id": "open"}).status_code == 200
    check(dflash, plain, prompts[0], max_new_tokens=30)


OTHERS: dict[tuple[str, str], Any] = {
    ("/open_session", "rid ['a', 'b'] is a list"): {"capacity_of_str_len": 1, "rid": ["a", "b"]},
    ("/set_internal_state", "server_args.pp_max_micro_batch_size 'x'"): {
        "server_args": {"pp_max_micro_batch_size": "x"}
    },
    (
        "/start_expert_distribution_record",
        "/start_expert_distribution_record needs --expert-d",
    ): None,
    ("/resume_memory_occupation", "/resume_memory_occupation needs --enable-memory-saver"): {},
    ("/v1/completions", "cache_salt ['a'] is a list"): {"prompt": "a", "cache_salt": ["a"]},
    ("/v1/responses", "The body [] cannot be read"): [],
    ("/invocations", "The body cannot be read"): {"messages": [], "response_format": "x"},
    ("/v1/messages/count_tokens", "messages is empty"): {"model": "a", "messages": []},
    ("/v1/detokenize", "tokens has -1"): {"tokens": [-1]},
    ("/vertex_generate", "parameters.unknown 1 is not known"): {
        "instances": [{"text": "a"}],
        "parameters": {"unknown": 1},
    },
    ("/separate_reasoning", "Unsupported model type: x"): {"text": "a", "reasoning_parser": "x"},
    ("/flush_cache?timeout=x", "query.timeout 'x' cannot be read"): None,
}


@pytest.mark.parametrize(("path", "named"), OTHERS)
def test_other_routes(dflash: Server, path: str, named: str) -> None:
    answer = dflash.post(path, OTHERS[path, named])
    assert answer.status_code == 400, answer.text
    told = answer.json()
    assert told.get("error", told)["message"].startswith(named), answer.text


def test_refused_in_another_api(dflash: Server) -> None:
    """What the OpenAI-compatible route refuses is refused where its answer is translated, too."""
    messages = [{"role": "user", "content": "How many?"}]
    body = {"model": "a", "messages": messages, "max_tokens": 4, "top_p": -1.0}
    answer = dflash.post("/v1/messages", body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"] == "top_p must be in (0, 1], got -1.0."


@pytest.mark.parametrize("content_type", ["text/plain", None, "application/x-www-form-urlencoded"])
def test_what_is_no_json(dflash: Server, content_type: str | None) -> None:
    headers = {"Content-Type": content_type} if content_type else {}
    for path in ("/generate", "/invocations", "/v1/chat/completions"):
        answer = requests.post(dflash.url + path, b'{"text": "x"}', headers=headers)
        assert answer.status_code == 400, answer.text
        assert answer.json()["message"].startswith(f"Content-Type {content_type or ''!r} cannot be")
    for raw in (b"{", b"\xff\xfe", b'{"text": NaN}', b'{"text": "\\ud800"}', b"[" * 5000):
        answer = requests.post(f"{dflash.url}/generate", raw, headers=HEADERS)
        assert answer.status_code == 400, answer.text
        assert answer.json()["message"].startswith("The body is not JSON ("), answer.text


def test_served_as_before(dflash: Server, plain: Server, prompts: list[str]) -> None:
    """An integer is a number, a lone prompt's list of one is that one, unknown fields are left out."""
    body = generate_body(prompts[0], max_new_tokens=8, top_p=1, stop=["never said"])
    expected = plain.reference(prompts[0], max_new_tokens=8)
    for fields in (
        {"rid": ["a"], "return_logprob": [True], "top_logprobs_num": [1]},
        {"unknown": 1, "priority": None, "sampling_params": [body["sampling_params"]]},
    ):
        answer = dflash.post("/generate", body | fields)
        assert answer.status_code == 200, answer.text
        assert answer.json()["output_ids"] == expected["output_ids"]
    chat = {
        "model": "default",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "How many?"}]}],
        "temperature": 0,
        "max_tokens": 4,
        "store": False,
        "tools": None,
        "tool_choice": None,
        "response_format": {"type": "text"},
        "stream_options": None,
    }
    answer = dflash.post("/v1/chat/completions", chat)
    assert answer.status_code == 200, answer.text
