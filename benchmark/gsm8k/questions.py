"""GSM8K problems: a file, the data set itself, or the bundled ones."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from benchmark.gsm8k.answers import final_number
from benchmark.gsm8k.arguments import BUNDLED
from benchmark.gsm8k.errors import CannotSweep

BUNDLED_PROBLEMS = BUNDLED / "data" / "test.jsonl"
# What a general model is asked; the bundled target knows its problems as they stand.
INSTRUCTION = "\nPlease reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True)
class Question:
    """A problem.

    Attributes:
        prompt: in the target's chat format.
        answer: the right number.
    """

    prompt: str
    answer: Decimal


@dataclass(frozen=True)
class Problems:
    """A data set.

    Attributes:
        source: where it comes from, in words.
        sha256: of its questions and answers.
        rows: `question` and `answer` each.
    """

    source: str
    sha256: str
    rows: list[dict[str, str]]

    @classmethod
    def of(cls, source: str, rows: list[dict[str, str]]) -> Problems:
        text = json.dumps([[row["question"], row["answer"]] for row in rows])
        return cls(source, hashlib.sha256(text.encode()).hexdigest(), rows)

    @property
    def bundled(self) -> bool:
        return self.source == "bundled problems"


def load_problems(path: Path | None) -> Problems:
    """The problems of a file; without one, GSM8K's test split, or the bundled problems.

    Raises:
        CannotSweep: the file cannot be read, or a line is not a problem.
    """
    if path is not None:
        bundled = path.resolve() == BUNDLED_PROBLEMS.resolve()
        return Problems.of("bundled problems" if bundled else path.name, read_file(path))
    rows = _from_hub()
    if rows is None:
        return Problems.of("bundled problems", read_file(BUNDLED_PROBLEMS))
    return Problems.of("openai/gsm8k, test", rows)


def read_file(path: Path) -> list[dict[str, str]]:
    """Rows of a JSONL file; see `load_problems`."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CannotSweep(
            f"--dataset-path {path} cannot be read ({error}): give a GSM8K JSONL file."
        ) from None
    rows = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            rows.append(_checked(line, f"line {number} of {path}"))
    if not rows:
        raise CannotSweep(f"--dataset-path {path} holds no problems: give one a line.")
    return rows


def _checked(line: str, where: str) -> dict[str, str]:
    try:
        row = json.loads(line)
        question, answer = str(row["question"]), str(row["answer"])
    except (ValueError, KeyError, TypeError):
        raise CannotSweep(
            f'{where} is not {{"question": …, "answer": …}}: give a GSM8K JSONL file.'
        ) from None
    if final_number(answer) is None:
        raise CannotSweep(f"the answer in {where} has no number: end it with #### and the number.")
    return {"question": question, "answer": answer}


def _from_hub() -> list[dict[str, str]] | None:
    """GSM8K's test split, from the cache or from the hub; None where there is neither."""
    os.environ.setdefault("HF_HUB_DOWNLOAD_TIMEOUT", "10")
    try:
        from datasets import load_dataset

        return [dict(row) for row in load_dataset("openai/gsm8k", "main", split="test")]
    except Exception:  # whatever keeps the library from its data
        return None


def questions(problems: Problems, tokenizer: Any, count: int) -> list[Question]:
    """The first `count` problems, from the beginning again if there are fewer.

    Args:
        tokenizer: Hugging Face tokenizer of the target; without a chat template the question is asked
            as it stands.
    """
    suffix = "" if problems.bundled else INSTRUCTION
    chosen: Sequence[dict[str, str]] = [problems.rows[i % len(problems.rows)] for i in range(count)]
    asked = []
    for row in chosen:
        prompt = row["question"] + suffix
        if tokenizer.chat_template:
            message = [{"role": "user", "content": prompt}]
            prompt = tokenizer.apply_chat_template(
                message, add_generation_prompt=True, tokenize=False
            )
        asked.append(Question(prompt, final_number(row["answer"])))
    return asked


def dump(asked: Sequence[Question], path: Path) -> None:
    """Writes prompts as `sglang.bench_serving --dataset-name custom` reads them."""
    rows = [
        {"conversations": [{"content": q.prompt}, {"content": f"the number {q.answer}"}]}
        for q in asked
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
