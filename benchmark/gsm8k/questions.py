"""GSM8K problems: a file, the data set itself, or the bundled ones."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import requests

from benchmark.errors import CannotMeasure
from benchmark.gsm8k.answers import final_number
from benchmark.prompts import chat_text
from benchmark.shapes import ROOT

BUNDLED = ROOT / "checkpoints" / "tiny" / "data" / "test.jsonl"
HUB_SECONDS = 10
# What a general model is asked; the bundled target knows its problems as they stand.
INSTRUCTION = "\nPlease reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True)
class Question:
    """A problem as it is asked.

    Attributes:
        ids: the prompt's token ids, which are sent.
        text: the same as text, without the token that begins every text.
        answer: the right number.
    """

    ids: list[int]
    text: str
    answer: Decimal


@dataclass(frozen=True)
class Problems:
    """A data set.

    Attributes:
        source: where it comes from, in words.
        sha256: of its questions and answers.
        instruction: what is put after every question.
        rows: `question` and `answer` each.
    """

    source: str
    sha256: str
    instruction: str
    rows: list[dict[str, str]]

    @classmethod
    def of(cls, source: str, instruction: str, rows: list[dict[str, str]]) -> Problems:
        text = json.dumps([[row["question"], row["answer"]] for row in rows])
        return cls(source, hashlib.sha256(text.encode()).hexdigest(), instruction, rows)


def load_problems(path: Path | None) -> Problems:
    """The problems of a file; without one, GSM8K's test split, or else the bundled problems.

    Raises:
        CannotMeasure: the file cannot be read, or a line is not a problem.
    """
    if path is not None and path.resolve() != BUNDLED:
        return Problems.of(path.name, INSTRUCTION, read_file(path))
    why = "" if path is not None else _why_no_hub()
    if path is None and not why:
        return Problems.of("openai/gsm8k, test split", INSTRUCTION, _from_hub())
    return Problems.of("bundled problems" + why, "", read_file(BUNDLED))


def read_file(path: Path) -> list[dict[str, str]]:
    """Rows of a JSONL file; see `load_problems`."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CannotMeasure(
            f"--dataset-path {path} cannot be read ({error}): give a GSM8K JSONL file."
        ) from None
    rows = [
        _checked(line, f"line {number} of {path}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not rows:
        raise CannotMeasure(f"--dataset-path {path} holds no problems: give one a line.")
    return rows


def _checked(line: str, where: str) -> dict[str, str]:
    try:
        row = json.loads(line)
        question, answer = row["question"], str(row["answer"])
    except (ValueError, KeyError, TypeError):
        raise CannotMeasure(
            f'{where} is not {{"question": …, "answer": …}}: give a GSM8K JSONL file.'
        ) from None
    if not isinstance(question, str) or not question.strip():
        raise CannotMeasure(f"the question in {where} is not a text: write one.")
    if final_number(answer) is None:
        raise CannotMeasure(
            f"the answer in {where} has no number: end it with #### and the number."
        )
    return {"question": question, "answer": answer}


def _why_no_hub() -> str:
    """Empty if GSM8K can be had; else why not, as it is said of the problems that take its place."""
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    why = f", as openai/gsm8k cannot be loaded from {endpoint}"
    try:
        requests.head(endpoint, timeout=HUB_SECONDS)
    except requests.RequestException as error:
        # What an earlier run has left in the cache will do; without this the library tries for long.
        os.environ["HF_HUB_OFFLINE"] = "1"
        why = f", as {endpoint} cannot be reached ({type(error).__name__})"
    try:
        _from_hub()
    except Exception:  # whatever keeps the library from its data
        return why
    return ""


def _from_hub() -> list[dict[str, str]]:
    from datasets import load_dataset  # takes a second, and is rarely needed

    return [dict(row) for row in load_dataset("openai/gsm8k", "main", split="test")]


def questions(problems: Problems, tokenizer: Any, thinking: bool) -> list[Question]:
    """All problems in their order, in the target's chat format.

    Args:
        tokenizer, thinking: see `benchmark.prompts.chat_text`.
    """
    asked = []
    for row in problems.rows:
        text = chat_text(tokenizer, row["question"] + problems.instruction, thinking)
        asked.append(Question(tokenizer.encode(text), text, final_number(row["answer"])))
    return asked
