"""Everyday words to fill requests with: the lists of acts/things*.txt, whose items may hold other kinds in braces.

``text=>data`` is an item that is said in one way and passed on in another ("the airport" said, "airport" passed on).
"""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

from . import words
from .values import Value, Values, held_out

THINGS = Path(__file__).with_name("acts")
SLOT = re.compile(r"\{(\w+)\}")
# A list shorter than this is not split between training and evaluation.
LONG = 25
NUMBER_WORDS = "two three four five six seven eight nine ten eleven twelve".split()


@cache
def lists() -> dict[str, tuple[str, ...]]:
    """The items of every kind."""
    texts = (path.read_text("utf-8") for path in sorted(THINGS.glob("things*.txt")))
    lines = (line.partition(": ") for text in texts for line in text.splitlines() if line.strip())
    return {kind: tuple(items.split("|")) for kind, _, items in lines}


@cache
def _side(kind: str, evaluation: bool) -> tuple[str, ...]:
    items = lists()[kind]
    if len(items) < LONG:
        return items
    return tuple(item for item in items if "{" in item or held_out(item) == evaluation)


def _numbers(values: Values) -> dict[str, Callable[[], str | int | float]]:
    rng = values.rng
    return {
        "int9": lambda: values.number(1, rng.choice((20, 100, 999))),
        "int9k": lambda: values.number(1, 400) * rng.choice((100, 500, 1000)),
        "degrees": lambda: rng.choice((rng.randint(15, 28), rng.randint(15, 28), rng.randint(30, 43) / 2)),
        "degreesbig": lambda: rng.randrange(120, 260, 10),
        "rating": lambda: rng.choice((1, 2, 3, 4, 5, 3.5, 4.5)),
        "stars5": lambda: rng.randint(1, 5),
        "cm": lambda: rng.randint(145, 205),
        "pixels": lambda: rng.choice(
            (100, 128, 200, 256, 300, 400, 480, 512, 600, 640, 720, 768, 800, 1024, 1080, 1920)
        ),
        "angle": lambda: rng.choice((30, 45, 60, 90, 120, 180, 270, 15)),
        "port": lambda: rng.choice((22, 80, 443, 8080, 3000, 5432, 8000, 25, values.number(1000, 9999))),
        "dsides": lambda: rng.choice((4, 6, 8, 10, 12, 20, 100)),
        "lens": lambda: rng.randint(6, 40),
    }


def _texts(values: Values) -> dict[str, Callable[[], str]]:
    rng = values.rng
    return {
        "hm": lambda: f"{rng.randrange(24)}:{rng.randrange(12) * 5:02d}",
        "tickers": lambda: values.text("ticker"),
        "ids": lambda: values.text("id"),
        "five": lambda: f"{rng.randrange(100000):05d}",
        "verb": lambda: rng.choice(words.VERBS),
        "last": lambda: rng.choice(words.LAST_NAMES),
        "countries": lambda: rng.choice(words.COUNTRIES),
    }


def thing(values: Values, kind: str) -> Value:
    """A value of a kind of this module or of values.py; an unknown kind is a KeyError."""
    if kind in lists():
        return _expanded(values, values.rng.choice(_side(kind, values.evaluation)))
    texts = _texts(values)
    if kind in texts:
        text = texts[kind]()
        return Value(text, text)
    numbers = _numbers(values)
    return number(values, numbers[kind]()) if kind in numbers else values.draw(kind)


def number(values: Values, data: str | int | float) -> Value:
    """How a number is said: in digits, rarely as a word or with a comma after the thousands."""
    if isinstance(data, int) and 1 < data < 13 and values.rng.random() < 0.12:
        return Value(NUMBER_WORDS[data - 2], data)
    if isinstance(data, int) and data > 999 and values.rng.random() < 0.15:
        return Value(f"{data:,}", data)
    return Value(f"{data:g}" if isinstance(data, float) else str(data), data)


def _expanded(values: Values, item: str) -> Value:
    said, mapped, passed = item.partition("=>")
    drawn = [_named(values, name) for name in SLOT.findall(said)]
    text = _filled(said, drawn)
    return Value(text, _filled(passed, drawn) if mapped else text)


def _filled(template: str, drawn: list[str]) -> str:
    rest = iter(drawn)
    return SLOT.sub(lambda match: next(rest), template)


def _named(values: Values, name: str) -> str:
    text = str(thing(values, name.lower()).data)
    return text if name.islower() else text[:1].upper() + text[1:]
