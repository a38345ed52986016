"""The GSM8K sweep's problems: what is asked, and which number an answer gives."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from benchmark.gsm8k import questions
from benchmark.gsm8k.answers import final_number
from benchmark.shapes import ROOT

PROBLEM = {"question": "One and one?", "answer": "1+1 = <<1+1=2>>2\n#### 2"}


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The answer is 42.", 42),
        ("3 + 4 = 7\n#### 7", 7),
        ("#### $1,234", 1234),
        ("#### 7 eggs a day, not 8", 7),
        ("first #### 3 then #### -4", -4),
        ("he owes -$5", -5),
        ("so it is 12-5", 5),
        (r"so \boxed{18} dollars in 3 days", 18),
        (r"\boxed{1{,}500} it is", 1500),
        (r"\boxed{\$ 1\,200}", 1200),
        (r"\boxed{\text{about } 3} then \boxed{12.50}", 12.5),
        (r"#### 3 but \boxed{4}", 4),
        (r"\boxed{none} of the 9", 9),
        (r"\boxed{\frac{1}{\sqrt{9}} = 77", 77),
        ("<think>maybe \\boxed{3}</think>It is 8.", 8),
        ("1,000,000", 1_000_000),
        ("1,2,3", 3),
        ("nothing", None),
    ],
)
def test_final_number(text: str, number: float | None) -> None:
    assert final_number(text) == (None if number is None else Decimal(str(number)))


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


class Tokenizer:
    """One token a character, and a begin of text that the template writes too."""

    chat_template: str | None = "yes"
    bos_token = "^"

    @staticmethod
    def apply_chat_template(messages: list[dict], enable_thinking: bool, **_: Any) -> str:
        return f"^<user>{messages[0]['content']}<assistant>{'<think>' * enable_thinking}"

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in self.bos_token + text]


def test_questions(tmp_path: Path) -> None:
    """Asked in the chat format, with an instruction where the model does not know the problems."""
    problems = questions.load_problems(write(tmp_path / "p.jsonl", PROBLEM))
    [asked] = questions.questions(problems, Tokenizer(), thinking=False)
    assert asked.text.startswith("<user>One and one?\nPlease reason") and asked.answer == 2
    assert "".join(map(chr, asked.ids)) == "^" + asked.text  # one begin of text, not two
    [thinking] = questions.questions(problems, Tokenizer(), thinking=True)
    assert thinking.text.endswith("<think>")
    bundled = questions.load_problems(ROOT / "checkpoints/tiny/data/test.jsonl")
    assert bundled.source == "bundled problems" and len(bundled.rows) == 1000
    assert "Please" not in questions.questions(bundled, Tokenizer(), False)[0].text
    assert problems.sha256 != bundled.sha256


def test_without_a_hub_the_bundled_problems_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_data() -> None:
        raise ConnectionError

    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(questions, "_from_hub", no_data)
    problems = questions.load_problems(None)
    assert problems.source.startswith("bundled problems, as http://127.0.0.1:9 cannot be reached")
    assert len(problems.rows) == 1000 and not problems.instruction
    monkeypatch.setattr(questions, "_from_hub", lambda: [PROBLEM])
    assert questions.load_problems(None).source == "openai/gsm8k, test split"
