"""Tools, questions that need one, the call that answers them, and what follows the tool's result."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .chains import GOODS
from .problems import OPERATIONS, Problem, Split, split_of
from .structured import CITIES, HOBBIES, KEYS, Schema, object_schema
from .tables import DAYS
from .templates import NAMES

UNITS = ("celsius", "fahrenheit")
VERBS = ("set", "add", "sell", "move", "open", "start", "count", "send", "make", "change", "check")
THINGS = ("alarm", "eggs", "room", "order", "light", "boxes", "task", "door", "score", "ticket")
STRING, INTEGER = {"type": "string"}, {"type": "integer"}

Tool = dict[str, Any]


@dataclass(frozen=True)
class Call:
    """A request, the calls that it needs, what the tool says, and the answer from that."""

    question: str
    calls: tuple[tuple[str, dict[str, Any]], ...]
    result: str
    final: str

    def text(self) -> str:
        """The calls as the release's parser for Qwen reads them."""
        shown = (json.dumps({"name": name, "arguments": given}) for name, given in self.calls)
        return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in shown)


def tool(name: str, description: str, properties: dict[str, Schema]) -> Tool:
    """A tool as the OpenAI API takes it."""
    function = {"name": name, "parameters": object_schema(properties)}
    if description:
        function["description"] = description
    return {"type": "function", "function": function}


def _calculator(rng: random.Random) -> tuple[Tool, Call]:
    operator, word = rng.choice((("+", "plus"), ("-", "minus"), ("*", "times")))
    left, right = rng.randint(10, 999), rng.randint(2, 999)
    asked = rng.choice(("What is {} {} {}?", "Calculate {} {} {}.", "How much is {} {} {}?"))
    shown, result = f"{left}{operator}{right}", OPERATIONS[operator](left, right)
    name = rng.choice(("calculator", "calculate"))
    call = ((name, {"expression": shown}),)
    question = asked.format(left, rng.choice((operator, word)), right)
    return (
        tool(name, "Works out an expression.", {"expression": STRING}),
        Call(question, call, str(result), f"The result is {result}."),
    )


def _price(rng: random.Random) -> tuple[Tool, Call]:
    item, count, cost = rng.choice(GOODS), rng.randint(2, 40), rng.randint(5, 900)
    asked = rng.choice(
        (
            "What do {} {}s cost?",
            "How much do I pay for {} {}s?",
            "I want {} {}s. What is the price?",
        )
    )
    name = rng.choice(("get_price", "price_of"))
    call = ((name, {"item": item, "count": count}),)
    return (
        tool(name, "The price of some goods.", {"item": STRING, "count": INTEGER}),
        Call(asked.format(count, item), call, f"${cost}", f"{count} {item}s cost ${cost}."),
    )


def _weather(rng: random.Random) -> tuple[Tool, Call]:
    cities, unit, name = rng.sample(CITIES, 2), rng.choice(UNITS), "get_weather"
    count = 2 if rng.random() < 0.3 else 1
    where = " and in ".join(cities[:count])
    asked = rng.choice(("What is the weather in {} in {}?", "How warm is it in {} in {}?"))
    calls = tuple((name, {"city": city, "unit": unit}) for city in cities[:count])
    degrees = rng.randint(-9, 99)
    unit_schema = STRING | {"enum": list(UNITS)}
    return (
        tool(name, "The weather in a city.", {"city": STRING, "unit": unit_schema}),
        Call(asked.format(where, unit), calls, f"{degrees}", f"It is {degrees} degrees."),
    )


def _message(rng: random.Random) -> tuple[Tool, Call]:
    person, hobby, day = rng.choice(NAMES), rng.choice(HOBBIES), rng.choice(DAYS)
    text = f"Let us meet on {day} for {hobby}."
    call = (("send_message", {"to": person, "text": text}),)
    asked = rng.choice(('Tell {}: "{}"', 'Send {} a message: "{}"', 'Write to {}: "{}"'))
    return (
        tool("send_message", "Sends a text to somebody.", {"to": STRING, "text": STRING}),
        Call(asked.format(person, text), call, "sent", f"{person} has got the message."),
    )


def _booking(rng: random.Random) -> tuple[Tool, Call]:
    name, guests, day = rng.choice(NAMES), rng.randint(2, 30), rng.choice(DAYS)
    call = (("book_table", {"name": name, "guests": guests, "day": day}),)
    number = rng.randint(10, 99)
    asked = rng.choice(
        (
            "Book a table for {guests} guests on {day}. The name is {name}.",
            "{name} needs a table on {day} for {guests} people.",
        )
    )
    properties = {"name": STRING, "guests": INTEGER, "day": STRING | {"enum": list(DAYS)}}
    return (
        tool("book_table", "Books a table.", properties),
        Call(
            asked.format(name=name, guests=guests, day=day),
            call,
            f"table {number}",
            f"The table for {name} is booked: table {number}.",
        ),
    )


def _anything(rng: random.Random) -> tuple[Tool, Call]:
    """A tool of any name with values that the request names."""
    verb, thing = rng.choice(VERBS), rng.choice(THINGS)
    name = rng.choice((verb, f"{verb}_{thing}", f"{thing}_{verb}"))
    keys = rng.sample((*KEYS, *THINGS), rng.randint(1, 3))
    given = {
        key: rng.choice((*NAMES, *GOODS)) if rng.random() < 0.4 else rng.randint(2, 999)
        for key in keys
    }
    pairs = ", ".join(f"{key} {value}" for key, value in given.items())
    asked = rng.choice(("Use {name} with {pairs}.", "Please {verb} the {thing}: {pairs}."))
    if len(given) == 1 and rng.random() < 0.5:
        (key, value) = next(iter(given.items()))
        asked, pairs = "Please {verb} {pairs}.", f"{value} {key}"
    bounds = INTEGER | rng.choice(({}, {"minimum": 0}, {"minimum": 0, "maximum": 999}))
    properties = {key: STRING if isinstance(v, str) else bounds for key, v in given.items()}
    return (
        tool(name, "", properties),
        Call(
            asked.format(name=name, pairs=pairs, verb=verb, thing=thing),
            ((name, given),),
            rng.choice(("ok", "done")),
            "It is done.",
        ),
    )


KINDS: tuple[Callable[[random.Random], tuple[Tool, Call]], ...] = (
    _calculator,
    _price,
    _weather,
    _message,
    _booking,
    _anything,
    _anything,
)


def draw(split: Split, rng: random.Random) -> tuple[list[Tool], Call]:
    """One to three tools in random order and a request that one of them meets."""
    while True:
        needed, call = rng.choice(KINDS)(rng)
        if split_of("tools", tuple(map(str, call.calls))) == split:
            break
    offered = {needed["function"]["name"]: needed}
    for _ in range(rng.choice((0, 0, 1, 2))):
        other = rng.choice(KINDS)(rng)[0]
        offered.setdefault(other["function"]["name"], other)
    tools = list(offered.values())
    rng.shuffle(tools)
    for leave_out in ("description", "additionalProperties"):
        if rng.random() < 0.4:
            for one in tools:
                one["function"].pop(leave_out, None)
                one["function"]["parameters"].pop(leave_out, None)
    return tools, call


def turns(call: Call, rng: random.Random) -> list[Problem]:
    """The request and the calls; then, now and then, the tool's result and the answer."""
    asked = [Problem(call.question, call.text())]
    if len(call.calls) == 1 and rng.random() < 0.35:
        result = f"<tool_response>\n{call.result}\n</tool_response>"
        asked.append(Problem(result, call.final))
    return asked
