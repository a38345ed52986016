"""Prompt files: JSON lines, or a prompt a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sglang_dflash.losslessness.errors import CannotCompare

FIELDS = ("input_ids", "messages", "question", "prompt", "text")


def read_prompts(path: Path, limit: int | None = None) -> list[Any]:
    """The prompts of a file: text, a list of token ids, or a list of chat messages.

    A line that is a JSON object gives `input_ids`, `messages`, `question` (one chat message of the
    user), `prompt` or `text`, the first of these that it has; a JSON string is a prompt; any other
    line is a prompt as it stands. Empty lines are skipped.

    Raises:
        CannotCompare: no such file, no prompts in it, or an object without a prompt.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CannotCompare(
            f"the prompt file {path} cannot be read ({error}): give a text file."
        ) from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()][:limit]
    if not numbered:
        raise CannotCompare(f"the prompt file {path} holds no prompts: give one a line.")
    return [_prompt(line, f"line {number} of {path}") for number, line in numbered]


def _prompt(line: str, where: str) -> Any:
    try:
        value = json.loads(line)
    except ValueError:
        if line.lstrip().startswith("{"):
            raise CannotCompare(
                f"{where} begins like a JSON object and is none: mend it, or quote it as a string."
            ) from None
        return line
    if isinstance(value, str):
        return _checked(value, value, where)
    if not isinstance(value, dict):
        return line
    field = next((name for name in FIELDS if name in value), None)
    if field is None:
        raise CannotCompare(f"{where} has none of the fields {', '.join(FIELDS)}: name one so.")
    prompt = value[field]
    if field == "question":
        prompt = [{"role": "user", "content": _checked(prompt, prompt, where)}]
    return _checked(prompt, prompt, where, field)


def _checked(prompt: Any, kind: Any, where: str, field: str = "prompt") -> Any:
    kinds = {"input_ids": int, "messages": dict, "question": dict}
    if field in kinds:
        good = isinstance(kind, list) and kind and all(type(x) is kinds[field] for x in kind)
        expected = f"a list of {kinds[field].__name__}"
    else:
        good, expected = isinstance(kind, str) and kind, "a text"
    if not good:
        raise CannotCompare(f"{where}: {field} must be {expected}, but is {str(prompt)[:60]!r}.")
    return prompt


def token_ids(prompts: list[Any], tokenizer_path: str) -> list[list[int]]:
    """The prompts as token ids, so that an answer's prefix can follow them exactly.

    Raises:
        CannotCompare: a prompt is text and the tokenizer cannot be loaded here, or is empty.
    """
    if all(isinstance(prompt[0], int) for prompt in prompts):
        return prompts
    tokenizer = _tokenizer(tokenizer_path)
    return [_ids(prompt, tokenizer) for prompt in prompts]


def _tokenizer(path: str) -> Any:
    from transformers import AutoTokenizer  # takes seconds, and prompts may be ids already

    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise CannotCompare(
            f"the servers' tokenizer {path} cannot be loaded here "
            f"({str(error).splitlines()[0]}): give --tokenizer, or prompts as input_ids."
        ) from None


def _ids(prompt: Any, tokenizer: Any) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    if isinstance(prompt[0], int):
        return prompt
    if not tokenizer.chat_template:
        raise CannotCompare(
            "a prompt is a chat, but the tokenizer has no chat template: give prompts as text."
        )
    text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)
