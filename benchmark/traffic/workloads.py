"""What is asked: prompts of a workload, and how each is to be answered."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from benchmark.errors import CannotMeasure
from benchmark.prompts import chat_text

# Where the JSON lines of a workload, `question` and, as far as it is known, `answer`, may be in a
# folder of data: the first that is there.
FILES = {
    name: (f"{name}.jsonl", *(["test.jsonl"] * (name == "chat")), f"workloads/{name}.jsonl")
    for name in ("chat", "gsm8k", "json", "long-prompt", "reasoning")
}
# What greedy requests ask besides: each is work for the server, and leaves the answer as it is.
_ANY_TEXT = "(.|\\n)*"
ASKED = {
    "logprobs": {"logprobs": 5},
    "penalties": {"frequency_penalty": 1e-6},
    # As SGLang is asked for it, and as vLLM is; each ignores the other's field.
    "grammar": {"regex": _ANY_TEXT, "structured_outputs": {"regex": _ANY_TEXT}},
}
# Greedy requests of which each has the JSON schema of its prompt, which the known answer keeps to.
_SCHEMA = "schema"
# Greedy requests of which each has one of so many LoRA adapters, by the names that `benchmark/adapters.py` gives.
ADAPTERS, _ADAPTED = 8, "adapters"
# Every how many-th request is sampled.
_SAMPLED = {"sampled": 1, "mixed": 2, "ninth": 9}
KINDS = ("greedy", *_SAMPLED, *ASKED, _SCHEMA, _ADAPTED)
# Where no answer is known, and beyond what the longest known one has.
UNKNOWN_TOKENS = 1024
SLACK = 2
# A block of drafts, and a little; the context must hold them too.
RESERVE = 32


@dataclass(frozen=True)
class Sampling:
    """How requests that are not greedy are drawn."""

    temperature: float
    top_p: float
    top_k: int

    def fields(self) -> dict[str, float]:
        """Fields of a request."""
        found: dict[str, float] = {"temperature": self.temperature, "top_p": self.top_p}
        return found | ({"top_k": self.top_k} if self.top_k > 0 else {})


GREEDY = Sampling(0.0, 1.0, 0)


@dataclass(frozen=True)
class Workload:
    """A pool of prompts.

    Attributes:
        texts: prompts in the chat format.
        prompts: the same as token ids, which everybody is sent.
        answer_tokens: lengths of the known answers, the token that ends one included.
        schemas: JSON schemas of the answers, one for each prompt, or none at all.
        max_tokens: at which an answer that does not end is cut.
        sha256: of the file.
    """

    name: str
    texts: list[str]
    prompts: list[list[int]]
    answer_tokens: list[int]
    schemas: list[dict[str, Any]]
    max_tokens: int
    sha256: str

    @property
    def longest(self) -> int:
        """Tokens that a request may have in the end."""
        return max(map(len, self.prompts)) + self.max_tokens

    def describe(self) -> str:
        prompt = sum(map(len, self.prompts)) / len(self.prompts)
        text = f"{self.name}: {len(self.prompts)} prompts of {prompt:,.0f} tokens"
        if self.answer_tokens:
            answer = sum(self.answer_tokens) / len(self.answer_tokens)
            text += f", answers of {answer:,.0f}"
        return f"{text}, cut at {self.max_tokens}"

    def is_greedy(self, kind: str, index: int) -> bool:
        """Whether prompt `index` of the pool is answered greedily."""
        every = _SAMPLED.get(kind)
        return every is None or (index + 1) % every > 0

    def bodies(
        self,
        kind: str,
        sampling: Sampling,
        model: str,
        most: int | None = None,
        stream: bool = True,
    ) -> list[bytes]:
        """Bodies of requests to `/v1/completions`, as JSON, one for each prompt.

        Args:
            most: tokens of an answer, if fewer than `max_tokens`.

        Raises:
            CannotMeasure: the kind does not go with these prompts.
        """
        self.check_kind(kind)
        common = {
            "model": model,
            "max_tokens": min(most or self.max_tokens, self.max_tokens),
        }
        if stream:
            common |= {"stream": True, "stream_options": {"include_usage": True}}
        greedy = common | {"temperature": 0.0} | ASKED.get(kind, {})
        drawn = common | sampling.fields()
        return [
            orjson.dumps(
                (greedy if self.is_greedy(kind, i) else drawn)
                | self._fields_of(kind, i)
                | {"prompt": prompt}
            )
            for i, prompt in enumerate(self.prompts)
        ]

    def _fields_of(self, kind: str, index: int) -> dict[str, Any]:
        """What a request of the kind has that depends on its prompt."""
        if kind == _ADAPTED:
            return {"lora_path": f"adapter{index % ADAPTERS}"}
        if kind == _SCHEMA:
            schema = self.schemas[index]
            return {
                "json_schema": orjson.dumps(schema).decode(),
                "structured_outputs": {"json": schema},
            }
        return {}

    def check_kind(self, kind: str) -> None:
        """Raises CannotMeasure if requests of the kind cannot be made of these prompts."""
        if kind == _SCHEMA and not self.schemas:
            raise CannotMeasure(
                f"the kind {kind} needs a schema with every prompt, and those of {self.name} have "
                "none: ask json/schema, or give another --data."
            )


def load(name: str, folder: Path, tokenizer: Any, context: int) -> Workload:
    """The prompts of a workload's file, in the target's chat format.

    Args:
        tokenizer: Hugging Face tokenizer of the target.
        context: tokens that a request may have in all.

    Raises:
        CannotMeasure: the file is missing, or a line is no prompt, or too long for the target.
    """
    places = [folder / file for file in FILES[name]]
    path = next((place for place in places if place.is_file()), places[0])
    rows = _rows(path, name)
    texts = [chat_text(tokenizer, row["question"]) for row in rows]
    prompts = [tokenizer.encode(text) for text in texts]
    answers = [row["answer"] for row in rows if isinstance(row.get("answer"), str)]
    lengths = [len(ids) + 1 for ids in tokenizer(answers)["input_ids"]] if answers else []
    longest = max(map(len, prompts))
    room = context - longest - RESERVE
    wanted = SLACK * max(lengths) if lengths else UNKNOWN_TOKENS
    if room < max(lengths, default=1):
        raise CannotMeasure(
            f"{path} has prompts of {longest} tokens, which leave no room for the answers in the "
            f"{context} positions of the target: leave the workload {name} out, or give another "
            "--target-model."
        )
    schemas = [row["schema"] for row in rows if isinstance(row.get("schema"), dict)]
    if len(schemas) < len(rows):
        schemas = []
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    return Workload(name, texts, prompts, lengths, schemas, min(wanted, room), sha256)


def _rows(path: Path, name: str) -> list[dict[str, Any]]:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CannotMeasure(
            f"the workload {name} has no prompts, because {path} cannot be read "
            f"({type(error).__name__}): name the folder that has it with --data, or leave the "
            "workload out."
        ) from None
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if not row["question"].strip():
                raise ValueError
        except (ValueError, KeyError, TypeError, AttributeError):
            raise CannotMeasure(
                f'line {number} of {path} is not {{"question": …, "answer": …}}: write one a line.'
            ) from None
        rows.append(row)
    if not rows:
        raise CannotMeasure(f"{path} holds no prompts: write one a line.")
    return rows


def context_of(target: Path) -> int:
    """Positions that a target in a folder has."""
    config = json.loads((target / "config.json").read_text())
    return config.get("max_position_embeddings", 4096)
