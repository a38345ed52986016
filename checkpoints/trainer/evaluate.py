"""Measures a pair on held-out problems: accuracy, losslessness and accept length.

python -m checkpoints.trainer.evaluate --pair checkpoints/tiny --problems 200 --dtype float32
"""

import argparse
import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from . import checkpoint
from .decode import Decoded, greedy, speculative
from .drafter import Drafter
from .problems import Problem, final_number, read_jsonl
from .target import Target
from .tokenizer import chat_prompt


@dataclass(frozen=True)
class Report:
    """What was measured, on how many problems.

    accept_length: completion tokens per verify step; the prefill's token counts as a completion
    token, as servers count. histogram[n]: verify steps that committed n tokens.
    per_position[k]: share of verify steps that committed draft k + 1.
    """

    problems: int
    dtype: str
    device: str
    accuracy: float
    exact_text: float
    same_as_plain: int
    accept_length: float
    histogram: dict[int, int]
    per_position: list[float]


def prompts_of(tokenizer: Tokenizer, problems: list[Problem]) -> list[list[int]]:
    return [tokenizer.encode(chat_prompt(problem.question)).ids for problem in problems]


def accept_length(results: list[Decoded]) -> float:
    """Completion tokens per verify step over all rows."""
    return sum(len(r.tokens) for r in results) / sum(len(r.committed) for r in results)


def accuracy(tokenizer: Tokenizer, problems: list[Problem], results: list[Decoded]) -> float:
    """Share of problems whose final number is right."""
    texts = (tokenizer.decode(result.tokens) for result in results)
    pairs = zip(problems, texts, strict=True)
    return sum(final_number(p.answer) == final_number(text) for p, text in pairs) / len(problems)


def evaluate(
    target: Target, drafter: Drafter, tokenizer: Tokenizer, problems: list[Problem]
) -> Report:
    """Decode the problems both ways and compare; the models' dtype and device are used."""
    prompts = prompts_of(tokenizer, problems)
    plain, drafted = greedy(target, prompts), speculative(target, drafter, prompts)
    texts = [tokenizer.decode(result.tokens) for result in plain]
    histogram = Counter(count for result in drafted for count in result.committed)
    steps, slots = histogram.total(), range(1, drafter.shape.block_size)
    weight = target.embed_tokens.weight
    on_gpu = weight.device.type == "cuda"
    return Report(
        problems=len(problems),
        dtype=str(weight.dtype).removeprefix("torch."),
        device=torch.cuda.get_device_name(weight.device) if on_gpu else "CPU",
        accuracy=accuracy(tokenizer, problems, plain),
        exact_text=sum(p.answer == t for p, t in zip(problems, texts, strict=True)) / len(problems),
        same_as_plain=sum(p.tokens == d.tokens for p, d in zip(plain, drafted, strict=True)),
        accept_length=round(accept_length(drafted), 3),
        histogram=dict(sorted(histogram.items())),
        per_position=[
            round(sum(n for size, n in histogram.items() if size > slot) / steps, 4)
            for slot in slots
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pair", type=Path, default=Path("checkpoints/tiny"))
    parser.add_argument("--problems", type=int, default=200, help="first problems of test.jsonl")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    target, drafter, tokenizer = checkpoint.load(args.pair)
    for model in (target, drafter):
        model.to(args.device, getattr(torch, args.dtype))
    problems = read_jsonl(args.pair / "data" / "test.jsonl")[: args.problems]
    print(json.dumps(asdict(evaluate(target, drafter, tokenizer, problems))))


if __name__ == "__main__":
    main()
