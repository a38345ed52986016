"""Held-out prompts of every kind: what the pair is measured on, and what benchmarks may ask.

python -m checkpoints.trainer.workloads --kind long-prompt --count 1024 --out prompts.jsonl
"""

import argparse
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Any

from . import chains, structured, tables, tools
from .problems import Problem, final_numbers, generate
from .tokenizer import chat_prompt

# What benchmarks ask; the other kinds are for measuring alone.
WORKLOADS = ("chat", "gsm8k", "long-prompt", "reasoning")


@dataclass(frozen=True)
class Prompt:
    """A held-out question with its answer, and what else a request for it has."""

    question: str
    answer: str
    tools: Sequence[dict[str, Any]] = field(default=())
    schema: dict[str, Any] | None = None

    def text(self) -> str:
        """What the chat template makes of it."""
        return chat_prompt(self.question, tools=self.tools)

    def right(self, text: str) -> bool:
        """Whether `text`, without its end token, answers it."""
        if self.schema is not None:
            return _loaded(text) == json.loads(self.answer)
        if self.tools:
            return text == self.answer
        return final_numbers(text) == final_numbers(self.answer)

    def line(self) -> str:
        """As JSON, without what it does not have."""
        values = {"question": self.question, "answer": self.answer}
        values |= {"tools": list(self.tools)} if self.tools else {}
        return json.dumps(values | ({"schema": self.schema} if self.schema else {})) + "\n"


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None


def _plain(problem: Problem) -> Prompt:
    return Prompt(problem.question, problem.answer)


def _gsm8k(rng: random.Random, problems: Iterator[Problem]) -> Prompt:
    """Two problems with checks, or seven to nine people compared."""
    if rng.random() < 0.5:
        return _plain(chains.all_of(list(islice(problems, 2)), rng, "check"))
    return _plain(tables.draw(tables.relay, rng.uniform(0.4, 0.55), "held-out", rng))


def _long_prompt(rng: random.Random, problems: Iterator[Problem]) -> Prompt:
    """Four of 43 problems, or seven pairs of 165 prices."""
    if rng.random() < 0.75:
        return _plain(chains.some_of(list(islice(problems, 43)), 4, rng))
    return _plain(chains.prices(165, 7, "held-out", rng))


def _reasoning(rng: random.Random, problems: Iterator[Problem]) -> Prompt:
    """A ledger of six or seven weeks."""
    return _plain(tables.draw(tables.ledger, rng.choice((0.8, 0.8, 0.95)), "held-out", rng))


def _table(rng: random.Random, problems: Iterator[Problem]) -> Prompt:
    """A long answer of any kind."""
    return _plain(tables.draw(rng.choice(tables.KINDS), rng.random(), "held-out", rng))


def _chain(rng: random.Random, problems: Iterator[Problem]) -> Prompt:
    """Two to twenty problems, all of which are to be solved."""
    return _plain(chains.all_of(list(islice(problems, rng.randint(2, 20))), rng))


def _json(rng: random.Random, problems: Iterator[Problem]) -> Prompt:
    asked = structured.question(next(problems), "held-out", rng)
    return Prompt(asked.problem.question, asked.problem.answer, schema=asked.schema)


def _tools(rng: random.Random, problems: Iterator[Problem]) -> Prompt:
    offered, call = tools.draw("held-out", rng)
    return Prompt(call.question, call.text(), offered)


MAKERS: dict[str, Callable[[random.Random, Iterator[Problem]], Prompt]] = {
    "chat": lambda rng, problems: _plain(next(problems)),
    "gsm8k": _gsm8k,
    "long-prompt": _long_prompt,
    "reasoning": _reasoning,
    "table": _table,
    "chain": _chain,
    "json": _json,
    "tools": _tools,
}


def prompts(kind: str, seed: int = 0) -> Iterator[Prompt]:
    """An endless, reproducible stream of one kind of held-out prompts."""
    problems = generate("held-out", seed)
    for number in count():
        # Each has numbers of its own, so that a longer file begins like a shorter one.
        yield MAKERS[kind](random.Random(f"{kind}:{seed}:{number}"), problems)


def write(path: Path, kind: str, number: int, seed: int = 0) -> None:
    """Write prompts with their answers, one JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (prompt.line() for prompt in islice(prompts(kind, seed), number))
    path.write_text("".join(lines), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=tuple(MAKERS), required=True)
    parser.add_argument("--count", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    write(args.out, args.kind, args.count, args.seed)


if __name__ == "__main__":
    main()
