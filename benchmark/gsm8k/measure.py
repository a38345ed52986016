"""A cell: warm up at the measured concurrency, flush, measure."""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from benchmark.gsm8k import servers
from benchmark.gsm8k.answers import final_number
from benchmark.gsm8k.cells import Cell
from benchmark.gsm8k.client import Answer, Load, accept_histogram, ask, percentiles
from benchmark.gsm8k.errors import CannotSweep
from benchmark.gsm8k.questions import Question

_WARM_UP_TOKENS = 64


def measure(
    args: argparse.Namespace, cell: Cell, url: str, asked: Sequence[Question]
) -> dict[str, Any]:
    """What a row says of its cell's measurements.

    Raises:
        CannotSweep: see `ask`; or no verify step happened though the server speculates.
    """
    sampling = {
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "max_new_tokens": args.max_new_tokens,
    }
    load = Load(url, sampling, cell.concurrency, args.batch_requests, args.timeout_s)
    prompts = [question.prompt for question in asked]
    warm_up = sampling | {"max_new_tokens": min(_WARM_UP_TOKENS, args.max_new_tokens)}
    warm = Load(url, warm_up, cell.concurrency, args.batch_requests, args.timeout_s)
    # From the end, where the prefixes are not those of the first questions.
    ask(warm, prompts[::-1][: 2 * cell.concurrency])
    repeats = []
    for repeat in range(args.repeats):
        servers.flush(url)
        title = f"{cell}" + (f", {repeat + 1} of {args.repeats}" if args.repeats > 1 else "")
        with tqdm(total=len(prompts), desc=title, disable=args.disable_tqdm) as bar:
            repeats.append(ask(load, prompts, bar.update))
    answers = [answer for answered, _ in repeats for answer in answered]
    if cell.arm.speculative and not any(answer.verify_steps for answer in answers):
        raise CannotSweep(f"no verify step happened in {cell}: it measured plain decoding.")
    return _rates(repeats) | _quality(answers, asked) | _latencies(answers)


def _rates(repeats: Sequence[tuple[list[Answer], float]]) -> dict[str, Any]:
    rates = [sum(answer.tokens for answer in answers) / seconds for answers, seconds in repeats]
    return {
        "output_tok_s": statistics.fmean(rates),
        "output_tok_s_spread": statistics.stdev(rates) if len(rates) > 1 else None,
        "output_tok_s_repeats": rates,
        "seconds": [seconds for _, seconds in repeats],
    }


def _quality(answers: Sequence[Answer], asked: Sequence[Question]) -> dict[str, Any]:
    right = [
        final_number(answer.text) == asked[i % len(asked)].answer
        for i, answer in enumerate(answers)
    ]
    drafted = [answer for answer in answers if answer.verify_steps]
    lengths = [answer.tokens / answer.verify_steps for answer in drafted]
    text = json.dumps([answer.text for answer in answers[: len(asked)]])
    return {
        "questions": len(asked),
        "accuracy": statistics.fmean(right),
        "completion_tokens": sum(answer.tokens for answer in answers),
        "verify_steps": sum(answer.verify_steps for answer in answers),
        "accept_length": statistics.fmean(lengths) if lengths else None,
        "accept_length_of_tokens": (
            sum(a.tokens for a in drafted) / sum(a.verify_steps for a in drafted)
            if drafted
            else None
        ),
        "accept_histogram": accept_histogram(answers),
        "answers_sha256": hashlib.sha256(text.encode()).hexdigest(),
    }


def _latencies(answers: Sequence[Answer]) -> dict[str, Any]:
    streamed = [answer for answer in answers if answer.arrivals]
    between = [time for answer in streamed for time in answer.inter_token_ms()]
    return {
        "ttft_ms": percentiles([answer.first_token_ms() for answer in streamed]),
        "inter_token_ms": percentiles(between),
    }
