"""Problems whose answer is far longer than their statement: ledgers, tables, countdowns, relays."""

import random
from collections.abc import Callable

from .chains import calculation
from .problems import LARGEST_NUMBER, Problem, Split, split_of
from .templates import NAMES

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
# fmt: off
THINGS = (
    "coins", "stamps", "marbles", "shells", "cards", "stickers", "apples", "eggs", "pens", "books",
)
# fmt: on

# A kind of problem: its size goes from 0 to 1 and decides how long the answer is.
Kind = Callable[[float, random.Random], Problem | None]


def _between(size: float, low: int, high: int) -> int:
    return low + round(size * (high - low))


def ledger(size: float, rng: random.Random) -> Problem | None:
    """What somebody has after every day of some weeks, of which all days are alike."""
    name, things, start = rng.choice(NAMES), rng.choice(THINGS), rng.randint(20, 400)
    days, weeks = _between(size**0.5, 2, 7), _between(size, 1, 7)
    changes = [rng.choice((-1, 1)) * rng.randint(2, 60) for _ in range(days)]
    got, lost = rng.choice((("gets", "gives away"), ("finds", "loses"), ("buys", "sells")))
    rules = [
        f"every {day} {name} {got if change > 0 else lost} {abs(change)}"
        for day, change in zip(DAYS, changes, strict=False)
    ]
    lines, value = [], start
    for week in range(1, weeks + 1):
        lines.append(f"Week {week}")
        for day, change in zip(DAYS, changes, strict=False):
            shown, value = calculation(value, "+" if change > 0 else "-", abs(change))
            if not 0 < value <= LARGEST_NUMBER:
                return None
            lines.append(f"{day}: {shown}")
    long = "1 week" if weeks == 1 else f"{weeks} weeks"
    ask = rng.choice(
        (
            f"Write down day by day how many {things} {name} has in {long}.",
            f"Go through {long} day by day. How many {things} does {name} have in the end?",
        )
    )
    question = f"{name} has {start} {things}. In a week, {', '.join(rules)}. {ask}"
    return Problem(question, _ended(lines, value), "ledger", (start, *changes))


def table(size: float, rng: random.Random) -> Problem | None:
    """What 1 to n things cost with a fixed fee."""
    name, things = rng.choice(NAMES), rng.choice(THINGS)
    price, fee, count = rng.randint(2, 29), rng.randint(2, 60), _between(size, 2, 30)
    lines, value = [], 0
    for number in range(1, count + 1):
        first, cost = calculation(number, "*", price)
        second, value = calculation(cost, "+", fee)
        lines.append(f"{number} {things}: {first}, {second}")
    if value > LARGEST_NUMBER:
        return None
    question = rng.choice(
        (
            f"{name} sells {things} for ${price} each and takes ${fee} for every delivery. Make a "
            f"table of what 1 to {count} {things} cost with the delivery.",
            f"In {name}'s shop {things} cost ${price} each, and a box costs ${fee}. Write down what "
            f"1 to {count} {things} in a box cost.",
        )
    )
    return Problem(question, _ended(lines, value), "table", (price, fee, count))


def savings(size: float, rng: random.Random) -> Problem | None:
    """What somebody has after each of some months of earning and spending."""
    name, start, months = rng.choice(NAMES), rng.randint(10, 300), _between(size, 2, 26)
    earned, spent = rng.randint(5, 90), rng.randint(5, 90)
    lines, value = [], start
    for month in range(1, months + 1):
        first, high = calculation(value, "+", earned)
        second, value = calculation(high, "-", spent)
        if not 0 < value <= high <= LARGEST_NUMBER:
            return None
        lines.append(f"Month {month}: {first}, {second}")
    question = rng.choice(
        (
            f"{name} has ${start}, earns ${earned} every month and spends ${spent} of it. What does "
            f"{name} have after each of {months} months?",
            f"Every month {name} gets ${earned} and pays ${spent}. At first there are ${start}. "
            f"Write down what is there after every month, for {months} months.",
        )
    )
    return Problem(question, _ended(lines, value), "savings", (start, earned, spent, months))


def countdown(size: float, rng: random.Random) -> Problem | None:
    """What is left after every minute, until less than a minute's loss is left."""
    name, rate, steps = rng.choice(NAMES), rng.randint(4, 60), _between(size, 2, 38)
    full = rate * steps + rng.randrange(rate)
    if full > LARGEST_NUMBER:
        return None
    lines, value = [], full
    for minute in range(1, steps + 1):
        shown, value = calculation(value, "-", rate)
        lines.append(f"Minute {minute}: {shown}")
    question = rng.choice(
        (
            f"{name}'s tank holds {full} liters and loses {rate} liters a minute. Write down what "
            f"is left after every minute, until less than {rate} liters are left.",
            f"{name} has {full} liters of water and uses {rate} liters every minute. How much is "
            f"left after each minute, as long as there is enough for it?",
        )
    )
    return Problem(question, _ended(lines, value), "countdown", (full, rate))


def relay(size: float, rng: random.Random) -> Problem | None:
    """How many things each of several people has, of whom each is compared with the one before."""
    people, things = rng.sample(NAMES, _between(size, 2, 14)), rng.choice(THINGS)
    value, total = rng.randint(4, 60), 0
    facts, numbers, lines = [f"{people[0]} has {value} {things}."], [value], []
    values = [value]
    for before, person in zip(people, people[1:], strict=False):
        operator = rng.choice("++--*")
        amount = rng.randint(2, 3) if operator == "*" else rng.randint(2, 30)
        how = {"+": "{} more than", "-": "{} fewer than", "*": "{} times as many as"}[operator]
        shown, value = calculation(value, operator, amount)
        if not 0 < value <= LARGEST_NUMBER // 2:
            return None
        facts.append(f"{person} has {how.format(amount)} {before}.")
        lines.append(f"{person} has {shown} {things}.")
        numbers.append(amount)
        values.append(value)
    total = values[0]
    for value in values[1:]:
        shown, total = calculation(total, "+", value)
        lines.append(f"Together: {shown}")
    if total > LARGEST_NUMBER:
        return None
    ask = rng.choice(
        (
            "How many does each of them have, and how many do they have together?",
            f"How many {things} do they all have?",
        )
    )
    return Problem(" ".join((*facts, ask)), _ended(lines, total), "relay", tuple(numbers))


def _ended(lines: list[str], value: int) -> str:
    return "\n".join((*lines, f"#### {value}"))


KINDS: tuple[Kind, ...] = (ledger, table, savings, countdown, relay)


def draw(kind: Kind, size: float, split: Split, rng: random.Random) -> Problem:
    """One problem from one side of the split, drawn again until its numbers suit."""
    while True:
        problem = kind(size, rng)
        if problem is not None and split_of(problem.template, problem.numbers) == split:
            return problem
