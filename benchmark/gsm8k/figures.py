"""From answers to figures: speed, accuracy, accept length, latencies."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from benchmark.gsm8k.answers import final_number
from benchmark.gsm8k.client import Answer
from benchmark.gsm8k.questions import Question
from benchmark.percentiles import percentiles

COUNTS = ("right", "without_number", "cut", "prompt_tokens", "completion_tokens", "verify_steps")
RATES = ("output_tok_s", "accuracy", "accept_length", "accept_length_of_tokens")
LATENCIES = ("ttft_ms", "inter_token_ms", "latency_ms")


def sample(asked: Sequence[Question], answers: Sequence[Answer], seconds: float) -> dict[str, Any]:
    """Figures of one measurement, which took `seconds` from the first question to the last answer.

    `without_number` counts answers without any number, `cut` those that ended at max_new_tokens.
    `accept_length` is the mean over requests of tokens over verify steps, as SGLang reports it (the
    prefill's token counts among the tokens); `accept_length_of_tokens` all tokens over all verify
    steps; `accept_histogram[k]` how many steps accepted k drafts.
    """
    numbers = [final_number(answer.text) for answer in answers]
    right = sum(n == question.answer for n, question in zip(numbers, asked, strict=True))
    tokens = sum(answer.tokens for answer in answers)
    drafted = [answer for answer in answers if answer.verify_steps]
    steps = sum(answer.verify_steps for answer in drafted)
    lengths = [answer.tokens / answer.verify_steps for answer in drafted]
    return {
        "seconds": seconds,
        "questions": len(answers),
        "right": right,
        "without_number": numbers.count(None),
        "cut": sum(a.meta["finish_reason"]["type"] == "length" for a in answers),
        "prompt_tokens": sum(answer.meta["prompt_tokens"] for answer in answers),
        "completion_tokens": tokens,
        "verify_steps": steps,
        "answers_sha256": digest(answers),
        "output_tok_s": tokens / seconds,
        "accuracy": right / len(answers),
        "accept_length": statistics.fmean(lengths) if steps else None,
        "accept_length_of_tokens": sum(a.tokens for a in drafted) / steps if steps else None,
        "accept_histogram": added([a.meta.get("spec_accept_histogram") or [] for a in drafted]),
        "ttft_ms": percentiles([answer.first_token_ms() for answer in answers]),
        "inter_token_ms": percentiles([ms for answer in answers for ms in answer.inter_token_ms()]),
        "latency_ms": percentiles([answer.seconds * 1e3 for answer in answers]),
    }


def digest(answers: Sequence[Answer]) -> str:
    """Equal if and only if all texts and lengths are."""
    text = json.dumps([[answer.text, answer.tokens] for answer in answers])
    return hashlib.sha256(text.encode()).hexdigest()


def added(histograms: Sequence[Sequence[int]]) -> list[int]:
    return [sum(counts) for counts in zip_longest(*histograms, fillvalue=0)]


def over_repeats(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Figures of a cell: counts added up, rates and latencies as their means.

    The spread of a rate is half the way from its least value to its greatest; None of one.
    """
    first = samples[0]
    found: dict[str, Any] = {name: first[name] for name in ("questions", "answers_sha256")}
    found["seconds"] = [each["seconds"] for each in samples]
    for name in COUNTS:
        found[name] = sum(each[name] for each in samples)
    for name in RATES:
        values = [each[name] for each in samples if each[name] is not None]
        found[name] = statistics.fmean(values) if values else None
        found[f"{name}_spread"] = (max(values) - min(values)) / 2 if len(values) > 1 else None
    for name in LATENCIES:
        there = [each[name] for each in samples if each[name]]
        found[name] = (
            {p: statistics.fmean(e[p] for e in there) for p in there[0]} if there else None
        )
    found["accept_histogram"] = added([each["accept_histogram"] for each in samples])
    return found
