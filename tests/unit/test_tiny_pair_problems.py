"""The tiny pair's problems, tokenizer and chat template."""

import json
import random
import re
from itertools import islice
from pathlib import Path

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from checkpoints.trainer import tokenizer as tokens
from checkpoints.trainer.chatter import chatter
from checkpoints.trainer.problems import (
    Problem,
    final_number,
    generate,
    instantiate,
    read_jsonl,
    split_of,
    write_jsonl,
)
from checkpoints.trainer.rows import chat, encode
from checkpoints.trainer.templates import NAMES, TEMPLATES

ANNOTATION = re.compile(r"(\d+)([-+*/])(\d+) = <<(\d+)([-+*/])(\d+)=(\d+)>>(\d+)")
PAIR = Path(__file__).parents[2] / "checkpoints" / "tiny"


@pytest.fixture(scope="module")
def train() -> list[Problem]:
    return list(islice(generate("train", seed=1), 3000))


@pytest.fixture(scope="module")
def held_out() -> list[Problem]:
    return list(islice(generate("held-out", seed=1), 500))


@pytest.fixture(scope="module")
def tokenizer(train: list[Problem]) -> Tokenizer:
    return tokens.train(text for p in train for text in (p.question, p.answer))


def test_same_seed_same_problems(train: list[Problem]) -> None:
    assert list(islice(generate("train", seed=1), 100)) == train[:100]
    assert list(islice(generate("train", seed=2), 100)) != train[:100]


def test_split_is_by_numbers(train: list[Problem], held_out: list[Problem]) -> None:
    seen = {(p.template, p.numbers) for p in train}
    assert not seen & {(p.template, p.numbers) for p in held_out}
    assert all(split_of(p.template, p.numbers) == "held-out" for p in held_out)


def test_no_problem_twice(train: list[Problem]) -> None:
    assert len({p.question for p in train}) == len(train)


def test_variety(train: list[Problem]) -> None:
    assert len(TEMPLATES) == len({t.name for t in TEMPLATES}) == 20
    assert len(set(NAMES)) == 40
    assert {p.template for p in train} == {t.name for t in TEMPLATES}


def test_annotations_are_right(train: list[Problem], held_out: list[Problem]) -> None:
    for problem in train + held_out:
        *steps, last = problem.answer.split("\n")
        assert 2 <= len(steps) <= 4
        for line in steps:
            (found,) = ANNOTATION.findall(line)
            left, operator, right, *again, result, shown = found
            assert [left, operator, right] == again and result == shown
            assert eval(f"{left}{operator}{right}") == int(result) > 0
        assert last == f"#### {result}"


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda t: t.name)
def test_phrasings_share_numbers_and_answer(template) -> None:
    drawn = next(p for p in generate("train", seed=3) if p.template == template.name)
    first, second = (
        instantiate(template, phrasing, drawn.numbers, "Ada", "Ben") for phrasing in (0, 1)
    )
    assert first.answer == second.answer and first.question != second.question
    for problem in (first, second):
        asked = sorted(re.findall(r"\d+", problem.question), key=int)
        assert asked == sorted(map(str, drawn.numbers), key=int)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 4.\n#### 72", 72),
        ("#### 1,234", 1234),
        ("#### -5 apples", -5),
        ("#### 3\n#### 4", 4),
        ("no mark 7", None),
        ("####", None),
        ("#### many", None),
    ],
)
def test_final_number(text: str, number: int | None) -> None:
    assert final_number(text) == number


def test_jsonl_round_trip(tmp_path: Path, held_out: list[Problem]) -> None:
    write_jsonl(tmp_path / "test.jsonl", held_out)
    read = read_jsonl(tmp_path / "test.jsonl")
    assert [(p.question, p.answer) for p in read] == [(p.question, p.answer) for p in held_out]


def test_tokenizer_specials_and_digits(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == tokens.VOCAB_SIZE
    assert [tokenizer.token_to_id(special) for special in tokens.SPECIALS] == [0, 1, 2, 3]
    words = [tokenizer.id_to_token(i) for i in range(4, tokens.VOCAB_SIZE)]
    assert all(len(word) == 1 for word in words if any(map(str.isdigit, word)))


@pytest.mark.parametrize("text", ["", "a  b\n\n c", "naïve €5 → 漢字 🙂", "12+34=46"])
def test_tokenizer_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_chat_rows_mark_the_answers(tokenizer: Tokenizer, train: list[Problem]) -> None:
    turns = train[:2]
    pool = encode(tokenizer, [chat(turns)], length=512)
    answered = tokenizer.decode(pool.ids[0][pool.answer[0]].tolist(), skip_special_tokens=False)
    assert answered == "".join(f"{turn.answer}<|im_end|>" for turn in turns)


def test_rows_too_long_are_left_out(tokenizer: Tokenizer, train: list[Problem]) -> None:
    pool = encode(tokenizer, [chat(train[:1]), chat(train[:9]), chat(train[1:2])], length=256)
    assert len(pool) == 2


def test_chatter_has_no_annotation_but_its_own() -> None:
    rng = random.Random(0)
    for _ in range(500):
        problem = chatter(rng)
        assert problem.answer
        for left, operator, right, *_, result in ANNOTATION.findall(problem.answer):
            assert eval(f"{left}{operator}{right}") == int(result)


def test_saved_tokenizer_and_chat_template(
    tmp_path: Path, tokenizer: Tokenizer, held_out: list[Problem]
) -> None:
    tokens.save(tokenizer, tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["eos_token"] == "<|im_end|>"
    question = held_out[0].question
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}]
    # Loading transformers takes longer than all other tests here; it renders the same way.
    template = ImmutableSandboxedEnvironment().from_string(config["chat_template"])
    text = template.render(messages=messages, add_generation_prompt=True)
    assert text == tokens.chat_prompt(question, "Be brief.")
    loaded = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert loaded.encode(text).ids == tokenizer.encode(text).ids


def test_shipped_data_is_what_the_generator_makes() -> None:
    for name, split, count in (("train", "train", 2000), ("test", "held-out", 1000)):
        shipped = read_jsonl(PAIR / "data" / f"{name}.jsonl")
        made = list(islice(generate(split, seed=0), count))
        assert [(p.question, p.answer) for p in shipped] == [(p.question, p.answer) for p in made]
