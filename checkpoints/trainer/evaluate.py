"""Measures a pair on held-out prompts: accuracy, losslessness and accept length of each kind.

python -m checkpoints.trainer.evaluate --pair checkpoints/tiny --kinds chat tools --count 200
"""

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import fmean

import torch
from tokenizers import Tokenizer

from . import checkpoint, structured
from .decode import Decoded, greedy, speculative
from .drafter import Drafter
from .target import Target
from .workloads import MAKERS, Prompt, prompts

# Answers may be longer than the longest reference by this many tokens.
SPARE_TOKENS = 40
# The schema that a grammar dictates to prompts that ask for no JSON.
DICTATED = structured.object_schema(
    {"name": {"type": "string"}, "age": {"type": "integer"}, "old": {"type": "boolean"}}
)


@dataclass(frozen=True)
class Accuracy:
    """How the target answers one kind of prompts.

    prompt_tokens, answer_tokens: means; the answers are the target's, their end token included.
    accuracy: share that is right; for JSON and tool calls, parsed and equal to the reference.
    exact_text: share that is the reference to the letter; ended: share that ends by itself.
    """

    prompts: int
    prompt_tokens: float
    answer_tokens: float
    accuracy: float
    exact_text: float
    ended: float


@dataclass(frozen=True)
class Speculation:
    """How a drafter speeds one kind of prompts up.

    accept_length: completion tokens per verify step; the prefill's token counts as a completion
    token, as servers count. histogram[n]: verify steps that committed n tokens.
    """

    prompts: int
    same_as_plain: int
    accept_length: float
    histogram: dict[int, int]


@dataclass(frozen=True)
class Answered:
    """Prompts of one kind and what the target answers by itself."""

    prompts: list[Prompt]
    ids: list[list[int]]
    plain: list[Decoded]
    limit: int


def accept_length(results: Sequence[Decoded]) -> float:
    """Completion tokens per verify step over all rows."""
    return sum(len(r.tokens) for r in results) / sum(len(r.committed) for r in results)


def answer(target: Target, text: Tokenizer, kind: str, count: int, seed: int = 0) -> Answered:
    """Ask the target the first held-out prompts of a kind; its dtype and device are used."""
    asked = list(islice(prompts(kind, seed), count))
    ids = [text.encode(prompt.text()).ids for prompt in asked]
    limit = max(len(text.encode(prompt.answer).ids) for prompt in asked) + SPARE_TOKENS
    return Answered(asked, ids, greedy(target, ids, limit), limit)


def measure_target(text: Tokenizer, answered: Answered) -> Accuracy:
    """How right, whole and long the answers are."""
    # Tool marks are text like any other; the end token alone is left out.
    said = [text.decode(result.tokens) for result in answered.plain]
    pairs = list(zip(answered.prompts, said, strict=True))
    return Accuracy(
        prompts=len(pairs),
        prompt_tokens=round(fmean(map(len, answered.ids)), 1),
        answer_tokens=round(fmean(len(result.tokens) for result in answered.plain), 1),
        accuracy=round(fmean(prompt.right(text) for prompt, text in pairs), 4),
        exact_text=round(fmean(prompt.answer == text for prompt, text in pairs), 4),
        ended=round(fmean(r.finished(answered.limit + 1) for r in answered.plain), 4),
    )


def measure_drafter(target: Target, drafter: Drafter, answered: Answered) -> Speculation:
    """Answer again with the drafter and compare."""
    drafted = speculative(target, drafter, answered.ids, answered.limit)
    histogram = Counter(count for result in drafted for count in result.committed)
    pairs = zip(answered.plain, drafted, strict=True)
    return Speculation(
        prompts=len(drafted),
        same_as_plain=sum(plain.tokens == other.tokens for plain, other in pairs),
        accept_length=round(accept_length(drafted), 3),
        histogram=dict(sorted(histogram.items())),
    )


def measure_grammar(target: Target, text: Tokenizer, count: int) -> dict[str, float]:
    """Shares of whole answers under a JSON schema, asked for and not, and of right ones."""
    from .grammar import constrained

    asked = list(islice(prompts("json"), count))
    unasked = [replace(p, schema=DICTATED) for p in islice(prompts("chat"), count)]
    measured = {}
    for name, some in (("asked", asked), ("unasked", unasked)):
        ids = [text.encode(prompt.text()).ids for prompt in some]
        results = constrained(target, text, ids, [prompt.schema for prompt in some], limit=160)
        said = [text.decode(result.tokens) for result in results]
        measured[f"{name}_whole"] = fmean(map(_parses, said))
        if name == "asked":
            measured["asked_right"] = fmean(p.right(t) for p, t in zip(some, said, strict=True))
    return {name: round(share, 4) for name, share in measured.items()}


def _parses(text: str) -> bool:
    try:
        json.loads(text)
    except json.JSONDecodeError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pair", type=Path, default=Path("checkpoints/tiny"))
    parser.add_argument("--drafter", default="drafter", help="its folder in the pair's")
    parser.add_argument("--kinds", nargs="+", choices=tuple(MAKERS), default=["chat"])
    parser.add_argument("--count", type=int, default=200, help="held-out prompts of each kind")
    parser.add_argument("--grammar", action="store_true", help="also answers under JSON schemas")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    target, text = checkpoint.load_target(args.pair / "target")
    drafter = checkpoint.load_drafter(args.pair / args.drafter)
    for model in (target, drafter):
        model.to(args.device, getattr(torch, args.dtype))
    for kind in args.kinds:
        answered = answer(target, text, kind, args.count)
        measured = asdict(measure_target(text, answered))
        measured |= asdict(measure_drafter(target, drafter, answered))
        print(json.dumps({"kind": kind} | measured), flush=True)
    if args.grammar:
        print(json.dumps({"grammar": measure_grammar(target, text, args.count)}))


if __name__ == "__main__":
    main()
