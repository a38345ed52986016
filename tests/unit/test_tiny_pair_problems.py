"""The tiny pair's problems, tokenizer and chat template."""

import json
import random
import re
from itertools import islice
from pathlib import Path
from statistics import fmean

import jsonschema
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from checkpoints.trainer import chains, structured, tables, tools, workloads
from checkpoints.trainer import tokenizer as tokens
from checkpoints.trainer.chatter import chatter
from checkpoints.trainer.corpus import encode, pooled
from checkpoints.trainer.problems import (
    Problem,
    final_number,
    final_numbers,
    generate,
    instantiate,
    read_jsonl,
    split_of,
    write_jsonl,
)
from checkpoints.trainer.rows import chat, dictated, row
from checkpoints.trainer.templates import NAMES, TEMPLATES

ANNOTATION = re.compile(r"(\d+)([-+*/])(\d+) = <<(\d+)([-+*/])(\d+)=(\d+)>>(\d+)")
BUNDLED = ("chat", "gsm8k", "long-prompt", "reasoning", "json", "tools")
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


def test_final_numbers() -> None:
    assert final_numbers("a\n#### 7\nb\n#### -8") == [7, -8]
    assert final_numbers("no mark") == [] and final_numbers("#### x") == [None]


def test_jsonl_round_trip(tmp_path: Path, held_out: list[Problem]) -> None:
    write_jsonl(tmp_path / "test.jsonl", held_out)
    read = read_jsonl(tmp_path / "test.jsonl")
    assert [(p.question, p.answer) for p in read] == [(p.question, p.answer) for p in held_out]


def test_tokenizer_specials_and_digits(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == tokens.VOCAB_SIZE
    first = [*tokens.SPECIALS, *tokens.MARKS]
    assert [tokenizer.token_to_id(token) for token in first] == list(range(8))
    words = [tokenizer.id_to_token(i) for i in range(8, tokens.VOCAB_SIZE)]
    assert all(len(word) == 1 for word in words if any(map(str.isdigit, word)))
    # The marks of a tool call are text that the server's parser must see.
    ids = tokenizer.encode("<tool_call>\n{}\n</tool_call><|im_end|>").ids
    assert ids[0] == 4 and tokenizer.decode(ids) == "<tool_call>\n{}\n</tool_call>"


@pytest.mark.parametrize("text", ["", "a  b\n\n c", "naïve €5 → 漢字 🙂", "12+34=46"])
def test_tokenizer_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_chat_rows_mark_the_answers(tokenizer: Tokenizer, train: list[Problem]) -> None:
    turns = train[:2]
    [(ids, answer)] = encode(tokenizer, [chat(turns)])
    answered = tokenizer.decode(ids[answer].tolist(), skip_special_tokens=False)
    assert answered == "".join(f"{turn.answer}<|im_end|>" for turn in turns)


def test_rows_go_into_the_smallest_pool(tokenizer: Tokenizer, train: list[Problem]) -> None:
    """And those that none holds are left out."""
    made = encode(tokenizer, [chat(train[:1]), chat(train[:9]), chat(train[1:3])])
    small, large = pooled(made, lengths=(256, 512))
    assert (small.length, len(small), large.length, len(large)) == (256, 1, 512, 1)
    assert small.ids[0].tolist() == made[0][0].tolist() + [tokens.PAD_ID] * (256 - len(made[0][0]))
    assert int(small.answer.sum()) == made[0][1].sum()


def test_chatter_has_no_annotation_but_its_own() -> None:
    rng = random.Random(0)
    for _ in range(500):
        problem = chatter(rng)
        assert problem.answer
        for left, operator, right, *_, result in ANNOTATION.findall(problem.answer):
            assert eval(f"{left}{operator}{right}") == int(result)


def test_checks_invert_the_steps(train: list[Problem]) -> None:
    for problem in train[:300]:
        steps = ANNOTATION.findall(problem.answer)
        inverse = ANNOTATION.findall(chains.checks(problem.answer))
        assert [(s[6], s[2], s[0]) for s in steps] == [(i[0], i[2], i[6]) for i in inverse]
        for left, operator, right, *_, result in inverse:
            assert eval(f"{left}{operator}{right}") == int(result)


@pytest.mark.parametrize("style", ["plain", "check", "repeat"])
def test_all_of_a_list(train: list[Problem], style: str) -> None:
    some = train[:5]
    made = chains.all_of(some, random.Random(0), style)
    for number, problem in enumerate(some, start=1):
        assert f"\n{number}. {problem.question}" in made.question
        assert f"Problem {number}:\n" in made.answer
    assert final_numbers(made.answer) == [final_number(p.answer) for p in some]
    repeated = sum(problem.question in made.answer for problem in some)
    assert repeated == (5 if style == "repeat" else 0)
    assert made.answer.count("Check:") == (5 if style == "check" else 0)


def test_some_of_a_list(train: list[Problem]) -> None:
    rng = random.Random(0)
    for count in (1, 2, 5):
        made = chains.some_of(train[:30], count, rng)
        listed, _, wish = made.question.rpartition("\n")
        chosen = [int(number) for number in re.findall(r"\d+", wish)]
        assert listed == chains.listed(train[:30]) and len(chosen) == count
        expected = [final_number(train[number - 1].answer) for number in chosen]
        assert final_numbers(made.answer) == expected


def test_prices_are_looked_up() -> None:
    made = chains.prices(60, 4, "train", random.Random(0))
    listed = dict(re.findall(r"(\w+'s \w+) costs \$(\d+)", made.question))
    asked = re.findall(r"do (\w+'s \w+) and (\w+'s \w+) cost", made.question)
    assert len(listed) == 60 and len(asked) == 4
    assert final_numbers(made.answer) == [int(listed[a]) + int(listed[b]) for a, b in asked]


@pytest.mark.parametrize("kind", tables.KINDS, ids=lambda kind: kind.__name__)
def test_tables_are_right(kind: tables.Kind) -> None:
    rng = random.Random(0)
    for size in (0.0, 0.3, 1.0):
        made = tables.draw(kind, size, "held-out", rng)
        assert split_of(made.template, made.numbers) == "held-out"
        found = ANNOTATION.findall(made.answer)
        for left, operator, right, *again, result, shown in found:
            assert [left, operator, right] == again and result == shown
            assert eval(f"{left}{operator}{right}") == int(result) > -1
        assert final_number(made.answer) == int(result)


def test_a_ledger_follows_its_rules() -> None:
    made = tables.draw(tables.ledger, 0.6, "train", random.Random(2))
    value, *changes = made.numbers
    for number, step in enumerate(ANNOTATION.findall(made.answer)):
        change = changes[number % len(changes)]
        assert step[:3] == (str(value), "-" if change < 0 else "+", str(abs(change)))
        value += change


def test_json_answers_keep_to_their_schemas(train: list[Problem]) -> None:
    rng = random.Random(0)
    for problem in train[:300]:
        asked = structured.question(problem, "train", rng)
        value = json.loads(asked.problem.answer)
        jsonschema.validate(value, asked.schema)
        assert all(key in asked.problem.question for key in value)


def test_what_a_grammar_dictates_is_json(train: list[Problem]) -> None:
    rng = random.Random(0)
    for _ in range(300):
        pieces = structured.unasked(rng)
        value = json.loads("".join(text for text, _ in pieces))
        # Keys are given; the last brace is the model's own.
        assert json.dumps(value) == "".join(text for text, _ in pieces)
        said = "".join(text for text, is_said in pieces if is_said)
        assert pieces[-1][1] and not re.search(r'"[a-z_]+": ', said)
    [(prompt, _), *answer, (end, _)] = dictated(rng, train[0])
    assert end == "<|im_end|>" and json.loads("".join(text for text, _ in answer))


def test_tool_calls_are_what_the_parser_reads(train: list[Problem]) -> None:
    """The release's own parser; the arguments keep to the tool's schema."""
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.qwen25_detector import Qwen25Detector

    rng = random.Random(0)
    for _ in range(200):
        offered, call = tools.draw("train", rng)
        schemas = {one["function"]["name"]: one["function"]["parameters"] for one in offered}
        parsed = Qwen25Detector().detect_and_parse(call.text(), [Tool(**one) for one in offered])
        found = [(one.name, json.loads(one.parameters)) for one in parsed.calls]
        assert found == [(name, given) for name, given in call.calls]
        for name, given in found:
            jsonschema.validate(given, schemas[name])


def template(text: str):
    """A chat template as transformers compiles it; loading that takes longer than all tests here."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(text)


def test_saved_tokenizer_and_chat_template(
    tmp_path: Path, tokenizer: Tokenizer, held_out: list[Problem]
) -> None:
    tokens.save(tokenizer, tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["eos_token"] == "<|im_end|>"
    question = held_out[0].question
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}]
    made = template(config["chat_template"])
    text = made.render(messages=messages, add_generation_prompt=True)
    assert text == tokens.chat_prompt(question, "Be brief.")
    loaded = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert loaded.encode(text).ids == tokenizer.encode(text).ids


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_chat_template_with_tools(system: str | None) -> None:
    """A call and the tool's result as the server renders them are what the target was trained on."""
    rng = random.Random(1)
    for _ in range(50):
        offered, call = tools.draw("train", rng)
        if len(call.calls) > 1:
            continue
        (name, given) = call.calls[0]
        function = {"name": name, "arguments": given}
        messages = [
            {"role": "user", "content": call.question},
            {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]},
            {"role": "tool", "content": call.result},
        ]
        if system:
            messages.insert(0, {"role": "system", "content": system})
        # The server fills in what a request leaves out.
        full = [
            one | {"function": {"description": None, "strict": False} | one["function"]}
            for one in offered
        ]
        text = template(tokens.CHAT_TEMPLATE).render(
            messages=messages, tools=full, add_generation_prompt=True
        )
        result = f"<tool_response>\n{call.result}\n</tool_response>"
        turns = [Problem(call.question, call.text()), Problem(result, "")]
        trained = "".join(piece for piece, _ in chat(turns, system, offered))
        assert text == trained.removesuffix("<|im_end|>")


def test_two_calls_and_two_results() -> None:
    calls = [{"function": {"name": n, "arguments": '{"x": 1}'}} for n in ("a", "b")]
    messages = [
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
    ]
    assert template(tokens.CHAT_TEMPLATE).render(messages=messages) == (
        '<|im_start|>assistant\n<tool_call>\n{"name": "a", "arguments": {"x": 1}}\n</tool_call>'
        '\n<tool_call>\n{"name": "b", "arguments": {"x": 1}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>"
        "\n<tool_response>\n2\n</tool_response><|im_end|>\n"
    )


def test_rows_of_every_kind(tokenizer: Tokenizer, train: list[Problem]) -> None:
    """They end, and reach the lengths that the target is to serve."""
    rng = random.Random(0)
    made = encode(tokenizer, [row(problem, train, rng) for problem in train[:1500]])
    lengths = [len(ids) for ids, _ in made]
    assert all(ids[-1] == tokens.END_ID and answer[-1] for ids, answer in made)
    assert min(lengths) < 100 and 2048 < max(lengths)
    assert sum(length > 3072 for length in lengths) < 0.01 * len(lengths)


@pytest.mark.parametrize("kind", workloads.MAKERS)
def test_held_out_prompts(kind: str, tmp_path: Path) -> None:
    """The same ones every time, and right."""
    made = list(islice(workloads.prompts(kind), 4))
    assert made == list(islice(workloads.prompts(kind), 4))
    assert all(prompt.right(prompt.answer) and not prompt.right("") for prompt in made)
    workloads.write(tmp_path / "made.jsonl", kind, 4)
    lines = [json.loads(line) for line in (tmp_path / "made.jsonl").open()]
    assert [(p.question, p.answer) for p in made] == [(x["question"], x["answer"]) for x in lines]
    assert all(("tools" in line) == (kind == "tools") for line in lines)


def test_shipped_data_is_what_the_generator_makes(tmp_path: Path) -> None:
    for name, split, count in (("train", "train", 500), ("test", "held-out", 1000)):
        shipped = read_jsonl(PAIR / "data" / f"{name}.jsonl")
        made = list(islice(generate(split, seed=0), count))
        assert [(p.question, p.answer) for p in shipped] == [(p.question, p.answer) for p in made]
    for kind in BUNDLED:
        shipped = (PAIR / "data" / "workloads" / f"{kind}.jsonl").read_text()
        workloads.write(tmp_path / "made.jsonl", kind, shipped.count("\n"))
        assert (tmp_path / "made.jsonl").read_text() == shipped


def test_lengths_of_the_workloads() -> None:
    """In tokens of the bundled tokenizer, about what they are named for."""
    text = Tokenizer.from_file(str(PAIR / "target" / "tokenizer.json"))
    expected = {"chat": (50, 75), "gsm8k": (110, 300), "long-prompt": (2000, 375)}
    for kind, lengths in (expected | {"reasoning": (125, 1190)}).items():
        made = list(islice(workloads.prompts(kind), 64))
        asked = [len(text.encode(prompt.text()).ids) for prompt in made]
        answered = [len(text.encode(prompt.answer).ids) for prompt in made]
        assert (fmean(asked), fmean(answered)) == pytest.approx(lengths, rel=0.05)
