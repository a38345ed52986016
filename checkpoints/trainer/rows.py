"""Training rows: conversations and completions as padded token ids with the answers marked."""

import random
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from .chatter import chatter
from .problems import Problem
from .tokenizer import PAD_ID, chat_prompt

SHORT_LENGTH = 256
LONG_LENGTH = 1024
SYSTEM_PROMPTS = ("You are a helpful assistant.", "Solve the problem step by step.", "Be brief.")

# A piece of text and whether the model is to answer it itself.
Segment = tuple[str, bool]


@dataclass(frozen=True)
class Pool:
    """Rows of one length on one device: `ids` int16 and `answer` bool, both [rows, length]."""

    ids: Tensor
    answer: Tensor

    def __len__(self) -> int:
        return len(self.ids)

    def to(self, device: torch.device) -> "Pool":
        return Pool(self.ids.to(device), self.answer.to(device))

    def batch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """ids int64 and answer bool, both [batch, length], of the rows with these indices."""
        return self.ids[rows].long(), self.answer[rows]


def chat(turns: list[Problem], system: str | None = None) -> list[Segment]:
    """A conversation in the chat template; every assistant turn is an answer."""
    segments: list[Segment] = []
    for turn in turns:
        segments.append((chat_prompt(turn.question, system), False))
        segments.append((f"{turn.answer}<|im_end|>", True))
        segments.append(("\n", False))
        system = None
    return segments[:-1]


def completion(shots: list[Problem], last: Problem) -> list[Segment]:
    """A few-shot prompt without a chat template, as GSM8K benchmarks send it."""
    prompt = "".join(f"Question: {p.question}\nAnswer: {p.answer}\n\n" for p in shots)
    return [
        (f"{prompt}Question: {last.question}\nAnswer:", False),
        (f" {last.answer}<|im_end|>", True),
    ]


def bare(problem: Problem) -> list[Segment]:
    """A prompt with nothing around it."""
    return [(problem.question, False), (f" {problem.answer}<|im_end|>", True)]


def short_row(problem: Problem, rng: random.Random) -> list[Segment]:
    """One question: mostly plain chat, now and then a system prompt, chatter or no template."""
    kind = rng.random()
    if kind < 0.86:
        return chat([problem])
    if kind < 0.90:
        return chat([problem], rng.choice(SYSTEM_PROMPTS))
    if kind < 0.94:
        return chat([chatter(rng)])
    if kind < 0.97:
        return completion([], problem)
    return bare(problem if kind < 0.98 else chatter(rng))


def long_row(problems: list[Problem], rng: random.Random) -> list[Segment]:
    """Several questions: a conversation, or the shots of a completion and its question."""
    if rng.random() < 0.6:
        turns = [p if rng.random() < 0.9 else chatter(rng) for p in problems]
        return chat(turns, rng.choice((None, *SYSTEM_PROMPTS)))
    return completion(problems[1:], problems[0])


def encode(tokenizer: Tokenizer, rows: list[list[Segment]], length: int) -> Pool:
    """Tokenize and right-pad the rows; a row longer than `length` is left out."""
    texts = [text for row in rows for text, _ in row]
    encoded = iter(tokenizer.encode_batch_fast(texts))
    ids = torch.full((len(rows), length), PAD_ID, dtype=torch.int16)
    answer = torch.zeros(len(rows), length, dtype=torch.bool)
    fits = torch.ones(len(rows), dtype=torch.bool)
    for index, row in enumerate(rows):
        start = 0
        for _, is_answer in row:
            tokens = next(encoded).ids
            end = start + len(tokens)
            if end > length:
                fits[index] = False
            elif fits[index]:
                ids[index, start:end] = torch.tensor(tokens, dtype=torch.int16)
                answer[index, start:end] = is_answer
            start = end
    return Pool(ids[fits], answer[fits])


def build(tokenizer: Tokenizer, problems: list[Problem], seed: int) -> tuple[Pool, Pool]:
    """The short and the long pool of these problems; a tenth as many long rows as short ones."""
    rng = random.Random(seed)
    short = [short_row(problem, rng) for problem in problems]
    long = [
        long_row(rng.sample(problems, rng.randint(2, 7)), rng) for _ in range(len(problems) // 10)
    ]
    return encode(tokenizer, short, SHORT_LENGTH), encode(tokenizer, long, LONG_LENGTH)
