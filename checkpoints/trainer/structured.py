"""Questions that are to be answered in JSON, and JSON answers that only a grammar asks for."""

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .chains import GOODS
from .problems import Problem, Split, final_number, split_of
from .templates import NAMES

Schema = dict[str, Any]
# A piece of text and whether the model is to say it by itself.
Segment = tuple[str, bool]

# fmt: off
CITIES = (
    "Paris", "Rome", "Oslo", "Lima", "Cairo", "Tokyo", "Berlin", "Madrid", "Vienna", "Dublin",
    "Boston", "Delhi", "Athens", "Lisbon", "Prague", "New York",
)
JOBS = (
    "teacher", "doctor", "baker", "pilot", "farmer", "painter", "nurse", "driver", "cook", "judge",
)
PETS = ("dog", "cat", "horse", "bird", "rabbit", "goat", "parrot", "turtle")
HOBBIES = (
    "chess", "tennis", "music", "football", "reading", "dancing", "cooking", "swimming", "hiking",
)
# What a key may be called, with the sentence that says the value.
FACTS = (
    (("age", "years"), "{name} is {value} years old.", range(5, 100)),
    (("city", "town", "home"), "{name} lives in {value}.", CITIES),
    (("job", "work"), "{name} works as a {value}.", JOBS),
    (("pet", "animal"), "{name} has a {value}.", PETS),
    (("hobby", "likes"), "{name} likes {value}.", HOBBIES),
    (("height",), "{name} is {value} cm tall.", range(90, 210)),
    (("married",), "{name} is {not_}married.", (True, False)),
    (("member", "old"), "{name} is {not_}a member.", (True, False)),
)
# Names of keys that only a grammar gives.
KEYS = (
    "name", "title", "capital", "country", "population", "answer", "result", "value", "count", "id",
    "text", "steps", "final_answer", "explanation", "reason", "unit", "date", "email", "items",
    "tags", "status", "score", "color", "size", "type", "price", "total", "number", "first_name",
    "last_name", "address", "description", "ok", "error", "language", "author", "year", "list",
)
WORDS = (*NAMES, *CITIES, *JOBS, *PETS, *HOBBIES, *GOODS)
# fmt: on


@dataclass(frozen=True)
class Question:
    """A question that asks for JSON, its answer, and the schema that the answer keeps to."""

    problem: Problem
    schema: Schema


def object_schema(properties: dict[str, Schema]) -> Schema:
    """An object with these properties, all required and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def schema_of(value: Any) -> Schema:
    """The schema of a value: types alone."""
    if isinstance(value, dict):
        return object_schema({key: schema_of(inner) for key, inner in value.items()})
    if isinstance(value, list):
        return {"type": "array", "items": schema_of(value[0])}
    names = {bool: "boolean", int: "integer", str: "string"}
    return {"type": names[type(value)]}


def _person(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Sentences about somebody, and some of what they say under keys in any order."""
    name = rng.choice(NAMES)
    told = rng.sample(FACTS, rng.randint(2, 5))
    sentences, values = [], {rng.choice(("name", "person", "first_name")): name}
    for keys, sentence, choices in told:
        value = rng.choice(choices)
        not_ = "" if value else "not "
        sentences.append(sentence.format(name=name, value=value, not_=not_))
        values[rng.choice(keys)] = value
    chosen = rng.sample(sorted(values), rng.randint(min(2, len(values)), len(values)))
    return " ".join(sentences), {key: values[key] for key in chosen}


def _order(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """What somebody bought."""
    name, goods = rng.choice(NAMES), rng.sample(GOODS, rng.randint(1, 4))
    bought = [{"item": good, "count": rng.randint(2, 40)} for good in goods]
    text = ", ".join(f"{one['count']} {one['item']}s" for one in bought)
    return f"{name} buys {text}.", {rng.choice(("buyer", "name")): name, "items": bought}


def _guests(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Who came, in order."""
    names, place = rng.sample(NAMES, rng.randint(2, 6)), rng.choice(CITIES)
    text = f"{', '.join(names[:-1])} and {names[-1]} meet in {place}."
    values = {"city": place, "names": names, "count": len(names)}
    return text, {key: values[key] for key in rng.sample(sorted(values), rng.randint(2, 3))}


def _worked(problem: Problem, rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A word problem; its steps and its answer."""
    steps = re.findall(r"<<(.*?)>>", problem.answer)
    answer = rng.choice(("answer", "final_answer", "result"))
    return problem.question, {"steps": steps, answer: final_number(problem.answer)}


def _ask(value: dict[str, Any], rng: random.Random) -> str:
    """The request for JSON with these keys."""
    keys = list(value)
    named = " and ".join(filter(None, (", ".join(keys[:-1]), keys[-1])))
    kind = rng.randrange(4)
    if kind == 0:
        return f"Reply in JSON with the keys {named}."
    if kind == 1:
        return f"Return a JSON object: {', '.join(keys)}."
    if kind == 2:
        return f"Answer in JSON. The schema is {json.dumps(schema_of(value))}"
    shown = {key: schema_of(inner)["type"] for key, inner in value.items()}
    return f"Give me {json.dumps(shown)} as JSON."


def question(problem: Problem, split: Split, rng: random.Random) -> Question:
    """A question that asks for JSON, from one side of the split; `problem` is used now and then."""
    while True:
        kind = rng.random()
        if kind < 0.4:
            text, value = _worked(problem, rng)
            side = split  # the problem's own
        else:
            text, value = (_person if kind < 0.75 else _order if kind < 0.9 else _guests)(rng)
            side = split_of("json", tuple(map(str, value.values())))
        if side == split:
            asked = Problem(f"{text} {_ask(value, rng)}", json.dumps(value))
            return Question(asked, schema_of(value))


def _scalar(rng: random.Random) -> Any:
    kind = rng.random()
    if kind < 0.5:
        return " ".join(rng.choices(WORDS, k=rng.choice((1, 1, 1, 2, 3))))
    if kind < 0.85:
        return rng.randrange(10 ** rng.randint(1, 6))
    return rng.random() < 0.5


def _nested(rng: random.Random, depth: int) -> Any:
    kind = rng.random()
    if kind < 0.7 or depth == 0:
        return _scalar(rng)
    if kind < 0.85:
        of = type(_scalar(rng))
        values = (value for value in iter(lambda: _scalar(rng), None) if type(value) is of)
        return [next(values) for _ in range(rng.randint(1, 4))]
    return _object(rng, depth - 1)


def _key(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.7:
        return rng.choice(KEYS)
    if kind < 0.85:
        return rng.choice(WORDS).lower().replace(" ", "_")
    return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz_", k=rng.randint(1, 9)))


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    return {_key(rng): _nested(rng, depth) for _ in range(rng.randint(1, 4))}


def unasked(rng: random.Random) -> list[Segment]:
    """A JSON object of any shape: what a grammar dictates is given, the values are to be said.

    A model that has seen none begins a string under a grammar and never closes it.
    """
    return dictated(_object(rng, depth=2))


def dictated(value: Any) -> list[Segment]:
    """The JSON text of a value in pieces: braces and keys are given, values and ends are not."""
    pieces: list[Segment] = []
    for text, said in _pieces(value):
        if pieces and pieces[-1][1] == said:
            text = pieces.pop()[0] + text
        pieces.append((text, said))
    return pieces


def _pieces(value: Any) -> Iterator[Segment]:
    if isinstance(value, dict):
        opening = "{"
        for key, inner in value.items():
            yield f"{opening}{json.dumps(key)}: ", False
            yield from _pieces(inner)
            # Whether an object ends is the schema's business, whether a value does the model's.
            opening = " "
            yield "," if key != list(value)[-1] else "}", True
    elif isinstance(value, list):
        yield "[", False
        yield from _pieces(value[0])
        yield "".join(f", {json.dumps(inner)}" for inner in value[1:]) + "]", True
    else:
        text = json.dumps(value)
        if isinstance(value, str):
            yield '"', False
            text = text[1:]
        yield text, True
