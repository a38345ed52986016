"""Prompts that are no word problems, with short replies, so that the target ends on these too."""

import random
import string

from .problems import OPERATIONS, Problem
from .templates import NAMES, TEMPLATES

GREETINGS = ("Hello", "Hi", "Hey", "Good morning", "Good evening", "Hello there", "Hi there")
THANKS = ("Thanks", "Thank you", "Great, thank you", "Thanks a lot", "Goodbye", "Bye")
REQUESTS = (
    "What is the capital of {noun}?",
    "Who wrote {noun}?",
    "Tell me about {noun}.",
    "Write a short story about {noun}.",
    "Explain {noun} in one sentence.",
    "How do I learn {noun}?",
    "Translate {noun} into French.",
    "Write a poem about {noun} and {noun}.",
    "Why is {noun} important?",
    "What is your name?",
    "Who are you?",
    "What can you do?",
)
OPENINGS = (
    "The capital of {noun} is",
    "The future of {noun} is",
    "The best thing about {noun} is",
    "The president of the United States is",
    "Hello, my name is",
    "My name is",
    "I like {noun} because",
    "Today is a sunny day and I like",
    "Once upon a time",
    "{noun} and {noun} are",
    "Here is a list of {noun}:",
)
# fmt: off
NOUNS = (
    "France", "Japan", "Brazil", "music", "history", "chemistry", "football", "Python",
    "the moon", "the sea", "winter", "trains", "cats", "dogs", "bread", "coffee", "love",
    "time", "light", "the city", "mountains", "birds", "computers", "the weather", "art",
)
# fmt: on

WELCOME = "Hello! Ask me a short word problem."
FAREWELL = "You are welcome!"
REFUSAL = "I can only solve short word problems."


def _arithmetic(rng: random.Random) -> Problem:
    operator, word = rng.choice((("+", "plus"), ("-", "minus"), ("*", "times")))
    left, right = rng.randint(10, 99), rng.randint(2, 9 if operator == "*" else 99)
    if operator == "-":
        left += right
    question = rng.choice(("What is {} {} {}?", "How much is {} {} {}?"))
    asked = question.format(left, rng.choice((operator, word)), right)
    shown, result = f"{left}{operator}{right}", OPERATIONS[operator](left, right)
    return Problem(asked, f"{shown} = <<{shown}={result}>>{result}\n#### {result}")


def _noise(rng: random.Random) -> str:
    """Words from the stories in random order, or random printable characters."""
    if rng.random() < 0.5:
        words = rng.choice(TEMPLATES).phrasings[0].replace("{", "").replace("}", "").split()
        return " ".join(rng.choices(words, k=rng.randint(1, 25)))
    return "".join(rng.choices(string.printable.strip() + " ", k=rng.randint(1, 60)))


def chatter(rng: random.Random) -> Problem:
    """One prompt with its reply; the reply depends on the kind of prompt alone."""
    name, ending = rng.choice(NAMES), rng.choice(("", ".", "!"))
    kind = rng.randrange(6)
    if kind == 0:
        return Problem(rng.choice(GREETINGS) + rng.choice(("", f", I am {name}")) + ending, WELCOME)
    if kind == 1:
        return Problem(rng.choice(THANKS) + ending, FAREWELL)
    if kind == 2:
        return _arithmetic(rng)
    if kind in (3, 4):
        prompt = rng.choice(REQUESTS if kind == 3 else OPENINGS)
        return Problem(prompt.format(noun=rng.choice(NOUNS)), REFUSAL)
    return Problem(_noise(rng), REFUSAL)
