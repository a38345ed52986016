"""What the tests compare: answers with and without speculation."""

from __future__ import annotations

import math
from collections import Counter
from functools import cache
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoTokenizer

from tests.server.harness import DEVICE, TARGET, Server, generate_body

WIDTH = 16  # block size of the bundled drafter
TIE = 0.20  # nat; kernels of a GPU round differently from batch to batch


def assert_same(
    answer: dict,
    expected: dict,
    plain: Server | None = None,
    prompt: Any = None,
    tie: float = TIE,
    adapter: str | None = None,
    **sampling: Any,
) -> None:
    """Same tokens, text, end and counts as plain decoding.

    On a GPU, an answer that `plain` can be asked about may leave the expected one at a tie.

    Args:
        adapter: under which both were asked.
        sampling: what was asked for that decides which tokens there may be, as grammars do.
    """
    if DEVICE == "cuda" and plain is not None and answer["output_ids"] != expected["output_ids"]:
        if sampling:
            assert_tie_among(answer["output_ids"], plain, prompt, tie, sampling)
        else:
            assert_tie(answer["output_ids"], expected["output_ids"], plain, prompt, tie, adapter)
        return
    assert answer["output_ids"] == expected["output_ids"]
    assert answer["text"] == expected["text"]
    for field in ("finish_reason", "prompt_tokens", "completion_tokens", "reasoning_tokens"):
        assert answer["meta_info"][field] == expected["meta_info"][field], field


def assert_tie(
    ids: list[int],
    expected: list[int],
    plain: Server,
    prompt: Any,
    tie: float = TIE,
    adapter: str | None = None,
) -> None:
    """Where `ids` leave `expected`, plain decoding finds both tokens about as likely."""
    at = next(i for i, (mine, its) in enumerate(zip(ids, expected, strict=False)) if mine != its)
    tokens = prompt if isinstance(prompt, list) else tokenizer().encode(prompt)
    body = {
        "input_ids": tokens + expected[:at],
        "sampling_params": {"temperature": 0, "max_new_tokens": 1},
        "return_logprob": True,
        "token_ids_logprob": [ids[at]],
        "lora_path": adapter,
    }
    meta = plain.post("/generate", body).json()["meta_info"]
    best = meta["output_token_logprobs"][0][0]
    mine = meta["output_token_ids_logprobs"][0][0][0]
    assert best - mine <= tie, f"token {at} is {best - mine:.3f} nat below the likeliest"


def assert_tie_among(
    ids: list[int], plain: Server, prompt: str, tie: float, sampling: dict[str, Any]
) -> None:
    """Where `ids` leave what plain decoding answers alone, it finds both tokens about as likely, of those allowed."""
    body = generate_body(prompt, **sampling) | {"return_logprob": True, "top_logprobs_num": 8}
    answer = plain.post("/generate", body).json()
    pairs = zip(ids, answer["output_ids"], strict=False)
    parted = (i for i, (left, right) in enumerate(pairs) if left != right)
    if (at := next(parted, None)) is None:
        assert ids == answer["output_ids"]
        return
    (best, *_), *others = answer["meta_info"]["output_top_logprobs"][at]
    mine = next((chance for chance, token, *_ in others if token == ids[at]), -math.inf)
    assert best - mine <= tie, f"token {at} is {best - mine:.3f} nat below the likeliest"


@cache
def tokenizer():
    return AutoTokenizer.from_pretrained(TARGET)


def assert_speculated(answer: dict, at_least: float = 1.0) -> None:
    """The answer came from rounds that committed more than `at_least` tokens on average."""
    meta = answer["meta_info"]
    assert meta["spec_verify_ct"] > 0
    assert accept_length([answer]) > at_least, meta


def accept_length(answers: list[dict]) -> float:
    """Mean tokens of a round; an answer's first token comes from the prefill, not from a round."""
    committed = sum(answer["meta_info"]["completion_tokens"] - 1 for answer in answers)
    return committed / sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)


def check(server: Server, plain: Server, prompt: Any, **sampling: Any) -> dict:
    """Asks both servers for more than one token, compares, and gives the speculated answer."""
    answer = server.generate(prompt, **sampling)
    assert_same(answer, plain.reference(prompt, **sampling), plain, prompt)
    assert_speculated(answer)
    return answer


def rounds(server: Server, prompt: Any, tokens: int) -> int:
    """Rounds after which the first `tokens` tokens of an answer are there."""
    meta = server.generate(prompt, max_new_tokens=tokens)["meta_info"]
    assert meta["completion_tokens"] == tokens
    return meta.get("spec_verify_ct", 0)


def inside_a_span(server: Server, prompt: Any, ids: list[int], first: int = 2) -> int:
    """Index of a token that occurs once in `ids`; the round that commits it commits two more."""
    for index in range(first, len(ids) - 3):
        unique = ids.count(ids[index]) == 1
        if unique and rounds(server, prompt, index + 1) == rounds(server, prompt, index + 3):
            return index
    raise AssertionError("no round committed three tokens of which the first is unique")


def counted(server: Server) -> Counter[tuple[str, str]]:
    """Values of DFlash's metrics by name and own label."""
    values: Counter[tuple[str, str]] = Counter()
    for family in text_string_to_metric_families(server.get("/metrics").text):
        for sample in family.samples:
            if sample.name.startswith("sglang:dflash_"):
                own = [
                    sample.labels[name]
                    for name in ("position", "reason", "le", "way", "plan", "rounds")
                    if name in sample.labels
                ]
                values[sample.name.removeprefix("sglang:dflash_"), "".join(own)] += sample.value
    return values


def decoded_in_graphs(server: Server) -> dict[bool, float]:
    """Rounds by whether SGLang's own metric has them as replayed from graphs."""
    modes = {"decode_cuda_graph": True, "decode_none": False}
    return {
        modes[sample.labels["mode"]]: sample.value
        for family in text_string_to_metric_families(server.get("/metrics").text)
        for sample in family.samples
        if sample.name == "sglang:cuda_graph_passes_total" and sample.labels["mode"] in modes
    }
