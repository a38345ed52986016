"""From questions to prompts: the target's tokenizer and its chat format."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmark.errors import CannotMeasure


def load_tokenizer(path: str) -> Any:
    """The target's tokenizer.

    Raises:
        CannotMeasure: there is none at `path`.
    """
    from transformers import AutoTokenizer  # takes seconds, and a dry run goes without

    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise CannotMeasure(
            f"the tokenizer of {path} cannot be loaded ({str(error).splitlines()[0]}): name a "
            "folder or a model of the hub with --target-model."
        ) from None


def chat_text(tokenizer: Any, question: str, thinking: bool = False) -> str:
    """A question in the chat format, without the token that begins every text.

    Args:
        tokenizer: Hugging Face tokenizer of the target. Without a chat template the question stands
            between `Question:` and `Answer:`.
        thinking: what the template is told as `enable_thinking`; most know nothing of it.
    """
    if not tokenizer.chat_template:
        return f"Question: {question}\nAnswer:"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        tokenize=False,
        enable_thinking=thinking,
    )
    return text.removeprefix(tokenizer.bos_token or "")


def dump(asked: Iterable[tuple[str, str]], path: Path) -> None:
    """Writes prompts and answers as `sglang.bench_serving --dataset-name custom` reads them."""
    rows = [{"conversations": [{"content": text}, {"content": answer}]} for text, answer in asked]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
