"""GSM8K-style problems: question, worked answer with calculator annotations, `#### N`.

Train and held-out problems never share a (template, numbers) pair: a hash of the pair decides the
side, so a held-out problem cannot be recalled under another name or phrasing.
"""

import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .templates import NAMES, TEMPLATES, Step, Template

Split = Literal["train", "held-out"]

HELD_OUT_SHARE = 0.1
LARGEST_NUMBER = 999

OPERATIONS = {
    "+": lambda left, right: left + right,
    "-": lambda left, right: left - right,
    "*": lambda left, right: left * right,
    "/": lambda left, right: left // right if left % right == 0 else None,
}


@dataclass(frozen=True)
class Problem:
    """A question and its answer; `numbers` are the drawn values in the template's order."""

    question: str
    answer: str
    template: str = ""
    numbers: tuple[int, ...] = ()


def split_of(template: str, numbers: tuple[int, ...]) -> Split:
    """The side to which every problem with these numbers belongs, whatever the seed."""
    digest = hashlib.sha256(f"{template}:{numbers}".encode()).digest()
    fraction = int.from_bytes(digest[:8], "big") / 2**64
    return "held-out" if fraction < HELD_OUT_SHARE else "train"


def final_number(text: str) -> int | None:
    """The number after the last `####` of an answer; None when there is none."""
    tail = text.rpartition("####")[2].split() if "####" in text else []
    digits = tail[0].replace(",", "") if tail else ""
    return int(digits) if digits.lstrip("-").isdigit() else None


def final_numbers(text: str) -> list[int | None]:
    """The number after each `####` of an answer to several problems."""
    return [final_number(f"####{part}") for part in text.split("####")[1:]]


def work_out(step: Step, values: dict[str, int]) -> tuple[str, int, str] | None:
    """Compute a step: (variable, result, annotated text), or None if the result is unsuitable."""
    variable, expression = step.formula.split(" = ")
    left, operator, right = expression.split()
    left_value, right_value = (values.get(term) or int(term) for term in (left, right))
    result = OPERATIONS[operator](left_value, right_value)
    if result is None or not 0 < result <= LARGEST_NUMBER:
        return None
    shown = f"{left_value}{operator}{right_value}"
    return variable, result, f"{shown} = <<{shown}={result}>>{result}"


def instantiate(
    template: Template, phrasing: int, numbers: tuple[int, ...], name: str, friend: str
) -> Problem | None:
    """The problem that these choices make; None when the calculation does not work out."""
    values = dict(zip(template.numbers, numbers, strict=True))
    people = {"name": name, "friend": friend}
    lines = []
    for step in template.steps:
        worked = work_out(step, values)
        if worked is None:
            return None
        variable, values[variable], calculation = worked
        lines.append(step.text.format(calc=calculation, **people))
    lines.append(f"#### {values[variable]}")
    question = template.phrasings[phrasing].format(**values, **people)
    return Problem(question, "\n".join(lines), template.name, numbers)


def draw(split: Split, rng: random.Random) -> Problem:
    """One problem of a random template, drawn again until its numbers suit."""
    template = rng.choice(TEMPLATES)
    phrasing = rng.randrange(len(template.phrasings))
    name, friend = rng.sample(NAMES, 2)
    while True:
        numbers = tuple(rng.choice(choices) for choices in template.numbers.values())
        if split_of(template.name, numbers) != split:
            continue
        problem = instantiate(template, phrasing, numbers, name, friend)
        if problem is not None:
            return problem


def generate(split: Split, seed: int) -> Iterator[Problem]:
    """An endless, reproducible stream of distinct problems from one side of the split."""
    # A string seeds by its digest, so the two sides get unrelated streams of one seed.
    rng = random.Random(f"{split}:{seed}")
    seen: set[str] = set()
    while True:
        problem = draw(split, rng)
        if problem.question not in seen:
            seen.add(problem.question)
            yield problem


def write_jsonl(path: Path, problems: list[Problem]) -> None:
    """Write problems in GSM8K's file format."""
    lines = (json.dumps({"question": p.question, "answer": p.answer}) + "\n" for p in problems)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines), encoding="utf-8")


def read_jsonl(path: Path) -> list[Problem]:
    """Read problems in GSM8K's file format."""
    with path.open(encoding="utf-8") as lines:
        return [Problem(**json.loads(line)) for line in lines]
