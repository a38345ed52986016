"""The word problems' texts: each template is a story, its number ranges and its calculation."""

from collections.abc import Sequence
from dataclasses import dataclass

# fmt: off
NAMES = (
    "Ada", "Alma", "Amir", "Ana", "Anton", "Bea", "Ben", "Carla", "Carlos", "Chloe", "Clara",
    "Dan", "Diego", "Elena", "Eli", "Emma", "Felix", "Grace", "Hana", "Hugo", "Ines", "Ivan",
    "Jack", "Julia", "Kai", "Lena", "Leo", "Lucy", "Maria", "Mark", "Mia", "Nina", "Noah",
    "Omar", "Paul", "Rosa", "Sam", "Sara", "Tom", "Zoe",
)
# fmt: on


@dataclass(frozen=True)
class Step:
    """One line of the answer: `formula` is `result = left op right`; `{calc}` shows it."""

    formula: str
    text: str


@dataclass(frozen=True)
class Template:
    """A story with two phrasings of the same question and one answer.

    `numbers` gives each variable's possible values; `steps` compute the rest from them. Draws whose
    steps leave 1..999 or do not divide are thrown away by the generator.
    """

    name: str
    phrasings: tuple[str, str]
    numbers: dict[str, Sequence[int]]
    steps: tuple[Step, ...]


TEMPLATES = (
    Template(
        "clips",
        (
            "{name} sold {april} clips in April, half as many clips in May and {june} clips in "
            "June. How many clips did {name} sell in all?",
            "In April {name} sold {april} clips. In May it was half of that, and in June {june}. "
            "How many clips is that in the three months?",
        ),
        {"april": range(8, 200, 2), "june": range(5, 100)},
        (
            Step("may = april / 2", "{name} sold {calc} clips in May."),
            Step("both = april + may", "In April and May that makes {calc} clips."),
            Step("all = both + june", "With June {name} sold {calc} clips."),
        ),
    ),
    Template(
        "eggs",
        (
            "{name}'s ducks lay {laid} eggs a day. {name} eats {eaten} of them and sells the "
            "rest at the market for ${price} each. How many dollars does {name} make a day?",
            "Every day {name} collects {laid} eggs, keeps {eaten} for cooking and sells the "
            "others for ${price} each. How much money does {name} earn every day?",
        ),
        {"laid": range(12, 61), "eaten": range(2, 12), "price": range(2, 9)},
        (
            Step("rest = laid - eaten", "{name} sells {calc} eggs a day."),
            Step("money = rest * price", "{name} makes ${calc} a day."),
        ),
    ),
    Template(
        "novel",
        (
            "{name} is reading a novel of {pages} pages. {name} reads {daily} pages a day for "
            "{days} days. How many pages are left?",
            "A novel has {pages} pages. For {days} days {name} has read {daily} pages of it each "
            "day. How many pages does {name} still have to read?",
        ),
        {"pages": range(120, 600, 5), "daily": range(8, 41), "days": range(3, 10)},
        (
            Step("read = daily * days", "{name} has read {calc} pages."),
            Step("left = pages - read", "There are {calc} pages left."),
        ),
    ),
    Template(
        "wage",
        (
            "{name} earns ${rate} an hour and works {hours} hours. After work {name} gets ${tip} "
            "in tips. How many dollars does {name} have then?",
            "For {hours} hours of work {name} is paid ${rate} an hour, and the guests leave "
            "${tip} in tips. How much money is that together?",
        ),
        {"rate": range(9, 31), "hours": range(3, 13), "tip": range(4, 60)},
        (
            Step("pay = rate * hours", "The work pays ${calc}."),
            Step("total = pay + tip", "With the tips that makes ${calc}."),
        ),
    ),
    Template(
        "crates",
        (
            "{name} packs {crates} crates with {each} oranges each and gives {given} oranges to "
            "{friend}. How many oranges does {name} have left?",
            "There are {crates} crates on {name}'s truck, and every crate holds {each} oranges. "
            "{friend} takes {given} oranges. How many oranges remain on the truck of {name}?",
        ),
        {"crates": range(3, 13), "each": range(12, 50), "given": range(5, 60)},
        (
            Step("packed = crates * each", "The crates hold {calc} oranges."),
            Step("left = packed - given", "After {friend} took some, {calc} oranges are left."),
        ),
    ),
    Template(
        "sweets",
        (
            "{name} buys {bags} bags with {each} sweets in each bag and shares them equally "
            "among {kids} children. How many sweets does each child get?",
            "A group of {kids} children shares {bags} bags of sweets that {name} brought. There "
            "are {each} sweets in a bag. How many sweets are there for each child?",
        ),
        {"bags": range(2, 13), "each": range(6, 49), "kids": range(2, 13)},
        (
            Step("all = bags * each", "There are {calc} sweets."),
            Step("share = all / kids", "Each child gets {calc} sweets."),
        ),
    ),
    Template(
        "garden",
        (
            "{name} plants {rows} rows of tulips with {each} tulips in a row. Then {eaten} "
            "tulips are eaten by deer, and {name} plants {new} new ones. How many tulips are "
            "there now?",
            "In {name}'s garden there are {rows} rows of {each} tulips. Deer eat {eaten} of them "
            "and {name} adds {new} tulips later. How many tulips does {name} have in the end?",
        ),
        {
            "rows": range(3, 12),
            "each": range(8, 31),
            "eaten": range(3, 20),
            "new": range(4, 40),
        },
        (
            Step("planted = rows * each", "At first there are {calc} tulips."),
            Step("spared = planted - eaten", "The deer leave {calc} tulips."),
            Step("now = spared + new", "With the new ones there are {calc} tulips."),
        ),
    ),
    Template(
        "bicycle",
        (
            "{name} saves ${weekly} a week for {weeks} weeks. The bicycle that {name} wants "
            "costs ${cost}. How many dollars are missing?",
            "A bicycle costs ${cost}. {name} has put aside ${weekly} every week for {weeks} "
            "weeks. How much more money does {name} need?",
        ),
        {"cost": range(150, 500, 5), "weekly": range(5, 31), "weeks": range(3, 13)},
        (
            Step("saved = weekly * weeks", "{name} has saved ${calc}."),
            Step("missing = cost - saved", "So ${calc} are missing."),
        ),
    ),
    Template(
        "bakery",
        (
            "{name} bakes {trays} trays of {each} rolls. {sold} rolls are sold, and the rest go "
            "into bags of {size}. How many bags does {name} fill?",
            "At the bakery {name} takes {trays} trays with {each} rolls each out of the oven, "
            "sells {sold} rolls and puts the others into bags of {size}. How many bags are "
            "needed?",
        ),
        {
            "trays": range(3, 11),
            "each": range(12, 37),
            "sold": range(10, 100),
            "size": range(2, 10),
        },
        (
            Step("baked = trays * each", "{name} bakes {calc} rolls."),
            Step("rest = baked - sold", "After the sale there are {calc} rolls."),
            Step("bags = rest / size", "They fill {calc} bags."),
        ),
    ),
    Template(
        "bus",
        (
            "{name} drives a bus with {start} people. At the first stop {off} get off and {on} "
            "get on, and at the second stop {more} get on. How many people are on the bus then?",
            "There are {start} people on {name}'s bus. First {off} people leave and {on} enter, "
            "then {more} more enter at the next stop. How many people does {name} drive now?",
        ),
        {"start": range(20, 80), "off": range(2, 19), "on": range(3, 25), "more": range(2, 20)},
        (
            Step("stay = start - off", "At the first stop {calc} people stay."),
            Step("first = stay + on", "Then {calc} people ride on."),
            Step("now = first + more", "After the second stop there are {calc} people."),
        ),
    ),
    Template(
        "laps",
        (
            "{name} swims {laps} laps of {length} meters every day, {days} days in a row. How "
            "many meters does {name} swim?",
            "One lap in the pool is {length} meters. For {days} days {name} swims {laps} laps a "
            "day. How many meters is that in all?",
        ),
        {"laps": range(3, 13), "length": range(10, 51), "days": range(2, 10)},
        (
            Step("daily = laps * length", "{name} swims {calc} meters a day."),
            Step("all = daily * days", "In all that makes {calc} meters."),
        ),
    ),
    Template(
        "ages",
        (
            "{name} is {young} years old and {friend} is {gap} years older. What will be the sum "
            "of their ages in {years} years?",
            "{friend} is {gap} years older than {name}, who is {young}. How old will both be "
            "together {years} years from now?",
        ),
        {"young": range(5, 41), "gap": range(2, 25), "years": range(2, 16)},
        (
            Step("old = young + gap", "{friend} is {calc} years old."),
            Step("later = young + years", "Then {name} will be {calc}."),
            Step("oldlater = old + years", "Then {friend} will be {calc}."),
            Step("sum = later + oldlater", "Together they will be {calc}."),
        ),
    ),
    Template(
        "legs",
        (
            "{name} has {cows} cows and {hens} hens. How many legs do the animals have?",
            "On a farm {name} counts the legs of {cows} cows and {hens} hens. How many is that?",
        ),
        {"cows": range(3, 100), "hens": range(4, 100)},
        (
            Step("cowlegs = cows * 4", "The cows have {calc} legs."),
            Step("henlegs = hens * 2", "The hens have {calc} legs."),
            Step("legs = cowlegs + henlegs", "Together they have {calc} legs."),
        ),
    ),
    Template(
        "tickets",
        (
            "A zoo ticket costs ${adult} for an adult and ${child} for a child. {name} buys "
            "tickets for {adults} adults and {children} children. How many dollars does {name} "
            "pay?",
            "{name} goes to the zoo with a group of {adults} adults and {children} children. "
            "Adults pay ${adult} and children pay ${child}. How much do the tickets cost?",
        ),
        {
            "adults": range(2, 10),
            "children": range(2, 13),
            "adult": range(10, 26),
            "child": range(3, 10),
        },
        (
            Step("grown = adults * adult", "The adults pay ${calc}."),
            Step("young = children * child", "The children pay ${calc}."),
            Step("total = grown + young", "Together that is ${calc}."),
        ),
    ),
    Template(
        "sale",
        (
            "A shirt costs ${price}, but today it is ${off} cheaper. {name} buys {count} shirts. "
            "How many dollars does {name} pay?",
            "{name} wants {count} shirts. They cost ${price} each, and there is a discount of "
            "${off} on each of them. How much will {name} pay?",
        ),
        {"price": range(15, 60), "off": range(2, 13), "count": range(2, 10)},
        (
            Step("now = price - off", "A shirt costs ${calc} today."),
            Step("pay = now * count", "{name} pays ${calc}."),
        ),
    ),
    Template(
        "pizza",
        (
            "{name} orders {pizzas} pizzas with {slices} slices each for {guests} guests. Every "
            "guest eats {each} slices. How many slices are left over?",
            "For a party of {guests} guests {name} cuts {pizzas} pizzas into {slices} slices "
            "each. If each guest eats {each} slices, how many slices remain?",
        ),
        {
            "pizzas": range(4, 25),
            "slices": (6, 8, 10, 12),
            "guests": range(5, 40),
            "each": range(2, 6),
        },
        (
            Step("cut = pizzas * slices", "There are {calc} slices."),
            Step("eaten = guests * each", "The guests eat {calc} slices."),
            Step("left = cut - eaten", "So {calc} slices are left."),
        ),
    ),
    Template(
        "tank",
        (
            "A tank holds {full} liters. {name} lets {rate} liters run out every minute for "
            "{minutes} minutes and then pours in {poured} liters. How many liters are in the "
            "tank?",
            "{name} opens a tank of {full} liters for {minutes} minutes. It loses {rate} liters "
            "a minute. Later {name} adds {poured} liters. How much does the tank hold then?",
        ),
        {
            "full": range(200, 600, 10),
            "rate": range(4, 26),
            "minutes": range(3, 13),
            "poured": range(5, 60),
        },
        (
            Step("out = rate * minutes", "{calc} liters run out."),
            Step("rest = full - out", "Then {calc} liters are left."),
            Step("now = rest + poured", "In the end there are {calc} liters."),
        ),
    ),
    Template(
        "marbles",
        (
            "{name} has {count} marbles. {friend} had {times} times as many but lost {lost} of "
            "them. How many marbles do {name} and {friend} have together?",
            "{friend} owned {times} times as many marbles as {name}, who has {count}. Then "
            "{friend} lost {lost} marbles. How many marbles do both have now?",
        ),
        {"count": range(12, 90), "times": range(2, 8), "lost": range(3, 24)},
        (
            Step("had = count * times", "{friend} had {calc} marbles."),
            Step("has = had - lost", "Now {friend} has {calc} marbles."),
            Step("both = has + count", "Together they have {calc} marbles."),
        ),
    ),
    Template(
        "change",
        (
            "{name} buys {pens} pens for ${pen} each and {books} books for ${book} each, and "
            "pays with ${note}. How many dollars of change does {name} get?",
            "A pen costs ${pen} and a book costs ${book}. {name} takes {pens} pens and {books} "
            "books and gives the clerk ${note}. How much money does {name} get back?",
        ),
        {
            "pens": range(2, 13),
            "pen": range(2, 7),
            "books": range(2, 8),
            "book": range(6, 20),
            "note": (100, 150, 200),
        },
        (
            Step("ink = pens * pen", "The pens cost ${calc}."),
            Step("paper = books * book", "The books cost ${calc}."),
            Step("cost = ink + paper", "Together that is ${calc}."),
            Step("change = note - cost", "{name} gets ${calc} back."),
        ),
    ),
    Template(
        "teams",
        (
            "A school has {classes} classes of {each} pupils. {absent} pupils are ill and the "
            "others form teams of {size}. How many teams does teacher {name} count?",
            "{name} teaches at a school with {classes} classes of {each} pupils each. When "
            "{absent} pupils stay at home, how many teams of {size} can {name} form with the "
            "rest?",
        ),
        {
            "classes": range(3, 13),
            "each": range(15, 33),
            "absent": range(2, 40),
            "size": range(3, 10),
        },
        (
            Step("pupils = classes * each", "The school has {calc} pupils."),
            Step("there = pupils - absent", "Of them {calc} are there."),
            Step("teams = there / size", "They form {calc} teams."),
        ),
    ),
)
