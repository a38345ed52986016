"""Several problems in one prompt: solved one after the other, checked, repeated, or picked out.

They make prompts of up to 2,700 tokens and answers of up to 1,500.
"""

import random
import re
from collections.abc import Sequence

from .problems import OPERATIONS, Problem, Split, split_of
from .templates import NAMES

SOLVE_ALL = (
    "Solve these problems.",
    "Solve the problems one after the other.",
    "Answer all of these questions.",
)
CHECK = ("Check every step.", "Then check your steps.")
REPEAT = ("Repeat each question before you answer it.", "Copy each question first.")
PICK = (
    "Solve only {which}.",
    "Of these problems, solve {which}.",
    "What are the answers of {which}?",
)
# fmt: off
GOODS = (
    "lamp", "chair", "table", "book", "bag", "hat", "coat", "clock", "phone", "guitar", "kite",
    "drum", "ring", "cup", "bed", "rug", "mirror", "tent", "radio", "scarf", "boat", "desk",
)
# fmt: on
# At most as many questions are asked about a list of prices.
PRICE_QUESTIONS = 8

_ANNOTATION = re.compile(r"<<(\d+)([-+*/])(\d+)=(\d+)>>")
_INVERSE = {"+": "-", "-": "+", "*": "/", "/": "*"}


def calculation(left: int, operator: str, right: int) -> tuple[str, int]:
    """An annotated calculation and its result; a division must leave no rest."""
    result = OPERATIONS[operator](left, right)
    shown = f"{left}{operator}{right}"
    return f"{shown} = <<{shown}={result}>>{result}", result


def checks(answer: str) -> str:
    """One line for each calculation of an answer: the inverse one, which gives its first number."""
    found = _ANNOTATION.findall(answer)
    return "".join(
        calculation(int(result), _INVERSE[operator], int(right))[0] + "\n"
        for _, operator, right, result in found
    )


def listed(problems: Sequence[Problem]) -> str:
    """The questions, numbered from 1."""
    return "\n".join(f"{number}. {p.question}" for number, p in enumerate(problems, start=1))


def solved(problem: Problem, check: bool, repeat: bool) -> str:
    """A worked answer with the question before it or checks in it."""
    body, mark, final = problem.answer.rpartition("####")
    shown = f"{problem.question}\n" if repeat else ""
    return shown + body + (f"Check:\n{checks(body)}" if check else "") + mark + final


def elaborate(problem: Problem, rng: random.Random) -> Problem:
    """One problem whose answer is checked, or begins with the question."""
    check = rng.random() < 0.5
    wish = rng.choice(CHECK if check else REPEAT).replace("each question", "the question")
    return Problem(f"{problem.question} {wish}", solved(problem, check, not check))


def all_of(problems: Sequence[Problem], rng: random.Random, style: str = "plain") -> Problem:
    """Every problem of a numbered list is solved; `style` is plain, check or repeat."""
    wish = rng.choice(SOLVE_ALL)
    if style != "plain":
        wish += " " + rng.choice(CHECK if style == "check" else REPEAT)
    numbers = range(len(problems))
    answer = _answer(problems, numbers, style == "check", style == "repeat")
    return Problem(f"{wish}\n{listed(problems)}", answer)


def some_of(problems: Sequence[Problem], count: int, rng: random.Random) -> Problem:
    """`count` problems of a numbered list are solved, in the order in which they are asked for."""
    chosen = rng.sample(range(len(problems)), count)
    if rng.random() < 0.7:
        chosen.sort()
    names = [str(number + 1) for number in chosen]
    which = " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
    which = ("problem " if count == 1 else "problems ") + which
    wish = rng.choice(PICK).format(which=which)
    repeat = rng.random() < 0.15
    if repeat:
        wish += " " + rng.choice(REPEAT)
    return Problem(f"{listed(problems)}\n{wish}", _answer(problems, chosen, False, repeat))


def _answer(problems: Sequence[Problem], chosen: Sequence[int], check: bool, repeat: bool) -> str:
    parts = (f"Problem {n + 1}:\n{solved(problems[n], check, repeat)}" for n in chosen)
    return "\n".join(parts)


def prices(entries: int, questions: int, split: Split, rng: random.Random) -> Problem:
    """A list of what people's goods cost, and what pairs of them cost together.

    Args:
        entries: lines of the list, at most len(NAMES) * len(GOODS).
        questions: pairs that are asked about.
    """
    owned = rng.sample([(name, good) for name in NAMES for good in GOODS], entries)
    costs = {thing: rng.randint(3, 400) for thing in owned}
    text = " ".join(f"{name}'s {good} costs ${costs[name, good]}." for name, good in owned)
    asked, lines = [], []
    while len(asked) < questions:
        first, second = rng.sample(owned, 2)
        if split_of("prices", (costs[first], costs[second])) != split:
            continue
        (one, this), (other, that) = first, second
        asked.append(f"{one}'s {this} and {other}'s {that}")
        shown, result = calculation(costs[first], "+", costs[second])
        lines.append(f"{one}'s {this} costs ${costs[first]}.")
        lines.append(f"{other}'s {that} costs ${costs[second]}.")
        lines.append(f"Together they cost ${shown}.\n#### {result}")
    wish = " ".join(f"How much do {pair} cost together?" for pair in asked)
    return Problem(f"{text}\n{wish}", "\n".join(lines))
