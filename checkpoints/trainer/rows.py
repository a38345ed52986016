"""Training rows: conversations and completions as pieces of text with the answers marked."""

import random
from collections.abc import Sequence
from typing import Any

from . import chains, structured, tables, tools
from .chatter import chatter
from .problems import Problem
from .structured import Segment
from .tokenizer import chat_prompt, system_prompt

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful AI assistant",
    "Solve the problem step by step.",
    "Be brief.",
)
# Longest lists: of problems to choose from, and of problems that are all to be solved.
MOST_LISTED = 50
MOST_SOLVED = {"plain": 20, "check": 13, "repeat": 13}


def chat(
    turns: Sequence[Problem], system: str | None = None, offered: Sequence[dict[str, Any]] = ()
) -> list[Segment]:
    """A conversation in the chat template; every assistant turn is an answer."""
    segments: list[Segment] = []
    before = system_prompt(system, offered)
    for turn in turns:
        segments.append((before + chat_prompt(turn.question), False))
        segments.append((f"{turn.answer}<|im_end|>", True))
        segments.append(("\n", False))
        before = ""
    return segments[:-1]


def completion(shots: Sequence[Problem], last: Problem) -> list[Segment]:
    """A few-shot prompt without a chat template, as GSM8K benchmarks send it."""
    prompt = "".join(f"Question: {p.question}\nAnswer: {p.answer}\n\n" for p in shots)
    return [
        (f"{prompt}Question: {last.question}\nAnswer:", False),
        (f" {last.answer}<|im_end|>", True),
    ]


def bare(problem: Problem) -> list[Segment]:
    """A prompt with nothing around it."""
    return [(problem.question, False), (f" {problem.answer}<|im_end|>", True)]


def calling(rng: random.Random, problem: Problem) -> list[Segment]:
    """Tools and a request that needs one; or a problem or chatter, which need none."""
    offered, call = tools.draw("train", rng)
    system = rng.choice((None, None, *SYSTEM_PROMPTS))
    if rng.random() < 0.75:
        return chat(tools.turns(call, rng), system, offered)
    return chat([problem if rng.random() < 0.7 else chatter(rng)], system, offered)


def dictated(rng: random.Random, problem: Problem) -> list[Segment]:
    """An answer that a grammar dictates although the prompt asks for another, or for none."""
    kind = rng.random()
    if kind < 0.3:
        offered, call = tools.draw("train", rng)
        # What the server's grammar for a required call asks for.
        calls = [{"name": name, "parameters": given} for name, given in call.calls]
        question = call.question if rng.random() < 0.6 else problem.question
        prompt, answer = chat_prompt(question, None, offered), structured.dictated(calls)
    else:
        asked = structured.question(problem, "train", rng).problem
        other = rng.choice((problem, problem, chatter(rng), asked))
        prompt = other.question if kind < 0.45 else chat_prompt(other.question)
        answer = structured.unasked(rng)
    return [(prompt, False), *answer, ("<|im_end|>", True)]


def one_problem(problem: Problem, rng: random.Random) -> list[Segment]:
    """One question: mostly plain chat, now and then a system prompt, chatter or no template."""
    kind = rng.random()
    if kind < 0.80:
        return chat([problem])
    if kind < 0.85:
        return chat([problem], rng.choice(SYSTEM_PROMPTS))
    if kind < 0.90:
        return chat([chatter(rng)])
    if kind < 0.94:
        return completion([], problem)
    if kind < 0.96:
        return bare(problem if rng.random() < 0.4 else chatter(rng))
    return chat([chains.elaborate(problem, rng)])


def several_problems(problems: Sequence[Problem], rng: random.Random) -> list[Segment]:
    """A list, a conversation, or the shots of a completion and its question."""
    # Short lists are most frequent, and every length has about as many tokens.
    count = round(2 * (MOST_LISTED / 2) ** rng.random())
    kind = rng.random()
    some = rng.sample(problems, count)
    if kind < 0.40:
        style = rng.choices(tuple(MOST_SOLVED), (6, 2, 2))[0]
        return chat([chains.all_of(some[: MOST_SOLVED[style]], rng, style)])
    if kind < 0.75:
        asked = rng.randint(1, min(count, 6))
        return chat([chains.some_of(some, asked, rng)])
    if kind < 0.85:
        asked = rng.randint(1, chains.PRICE_QUESTIONS)
        return chat([chains.prices(count * 4, asked, "train", rng)])
    if kind < 0.93:
        turns = [p if rng.random() < 0.9 else chatter(rng) for p in some[:8]]
        return chat(turns, rng.choice((None, *SYSTEM_PROMPTS)))
    return completion(some[1:9], some[0])


def row(problem: Problem, problems: Sequence[Problem], rng: random.Random) -> list[Segment]:
    """One training row of any kind; `problems` are those from which lists are made."""
    kind = rng.random()
    if kind < 0.56:
        return one_problem(problem, rng)
    if kind < 0.65:
        system = rng.choice((None, None, None, *SYSTEM_PROMPTS))
        return chat([structured.question(problem, "train", rng).problem], system)
    if kind < 0.75:
        return calling(rng, problem)
    if kind < 0.79:
        return dictated(rng, problem)
    if kind < 0.88:
        size = rng.random() ** 2
        return chat([tables.draw(rng.choice(tables.KINDS), size, "train", rng)])
    return several_problems(problems, rng)
