"""Arguments of drawn words for the tools of grounded.py, with the ways in which a request says them in passing."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from . import words
from .acttable import acts
from .things import number, thing
from .toolbox import Param
from .values import Value, Values

SUBJECTS = """city person label word id email file brand noun fullname title phrase topic path url phrase word title host
label city person topic date room country food""".split()
LABELS = [kind for kind in SUBJECTS if kind != "topic"]
MEASURED = "length size distance weight height duration limit amount price width age level depth speed budget".split()
COUNTED = """minutes hours days weeks people guests pages pixels copies rows euros percent kilometres kilograms
centimetres grams litres seats nights rooms questions items points lines steps seconds months years dollars""".split()
OPTIONS = "type mode style kind priority format quality order view status unit category group shape".split()
MARKS = "force overwrite notify verbose recursive confirm repeat dry_run urgent shuffle archive sync compress".split()
ENDS = "start end|from to|begin end|source target|origin destination|first last|min max|lower upper|old new".split("|")
MOMENTS = "time hour start_time when at slot starts_at until deadline date day start due".split()
LABELLED = """{p} {0}|with {p} {0}|{p}: {0}|{p} = {0}|with the {p} {0}|, the {p} is {0}|{0} as the {p}|{0} as {p}|
for {p} {0}|, use {0} as {p}|in the {0} {p}|in {p} {0}|, {p} should be {0}|under the {p} {0}|the {0} {p}|{0} {p}""".replace(
    "\n", ""
).split("|")
UNITED = "{0} {u}|with {0} {u}|for {0} {u}|{0} {u}|, {0} {u}|{u}: {0}|of {0} {u}|{u} {0}|at {0} {u}".split("|")
MEASURES = """{q} {0}|{q} of {0}|with {q} {0}|{q}: {0}|at {q} {0}|{q} {0} {u}|{0} {u} {q}|{0} {u}|{0} {u}|with a {q} of {0}|
, the {q} is {0} {u}|{0} as {q}""".replace("\n", "").split("|")
CHOSEN = """^{0}|^{0}|^{0}|{p} {0}|{0} {p}|as {0}|in {0}|, {0}|{p}: {0}|, make it {0}|with {p} {0}|in {0} {p}|
{0}""".replace("\n", "").split("|")
SPANS = """from {0} to {1}|from {0} to {1}|{0} to {1}|from {0} until {1}|to {1} from {0}|between {0} and {1}|{0} - {1}|
, {0} to {1}|{0} till {1}|, starting at {0} and ending at {1}""".replace("\n", "").split("|")
LITTLE = set("the which name number of how many count max num in to use id it whether i or not and date time".split())
TIMED = "at {0}|at {0}|, {0}|for {0}|{0}|, at {0}|by {0}|around {0}".split("|")
DATED = "on {0}|on {0}|, {0}|for {0}|{0}|, on {0}|by {0}|from {0}".split("|")


@dataclass(frozen=True, slots=True)
class Extra:
    """One argument, or two that are said together; for a switch, the ways that say yes and those that say no.

    ``^`` begins what stands before the noun, a comma what takes no other joint.
    """

    params: tuple[Param, ...]
    ways: tuple[str, ...]
    denials: tuple[str, ...] = ()

    @property
    def required(self) -> bool:
        """Whether a call must have it."""
        return self.params[0].required

    def said(self, values: Values) -> tuple[str, dict[str, Any]]:
        """What the request says, and the arguments of it."""
        rng, first = values.rng, self.params[0]
        if first.type == "b":
            yes = not self.denials or rng.random() < 0.6
            return rng.choice(self.ways if yes else self.denials), {first.name: yes}
        drawn = [_value(values, param) for param in self.params]
        way = rng.choice(self.ways)
        for place, value in enumerate(drawn):
            way = way.replace(f"{{{place}}}", value.text)
        return way, {param.name: value.data for param, value in zip(self.params, drawn, strict=True)}


def _value(values: Values, param: Param) -> Value:
    if param.choices:
        choice = values.rng.choice(param.choices)
        return Value(choice, choice)
    value = thing(values, param.kind)
    if param.type in "in" and isinstance(value.data, int | float):
        return number(values, value.data if param.type == "n" else int(value.data))
    return Value(value.text, str(value.data))


def upper(text: str) -> str:
    """With a capital first letter; the others stay."""
    return text[:1].upper() + text[1:]


@cache
def _common() -> tuple[str, ...]:
    """The words that the acts of training are named with."""
    named = {word for act in acts(False) for text in act.nouns for word in text.split("_")}
    return tuple(sorted(word for word in named if word.isalpha() and len(word) > 3))


def word(values: Values) -> str:
    """A noun, a word of the acts, a made-up word or an abbreviation (in capitals)."""
    rng, roll = values.rng, values.rng.random()
    if roll < 0.4:
        return values.noun()
    if roll < 0.64:
        return rng.choice(_common())
    if roll < 0.87:
        return values.made_up(rng.choice((1, 1, 2, 2)))
    return "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(rng.choice((2, 2, 3, 3, 4))))


def drawn(values: Values, used: set[str]) -> tuple[Extra, ...]:
    """None to three arguments, whose names are not among those used."""
    rng = values.rng
    kinds: tuple[Callable[[Values], Extra], ...] = (
        _amount, _amount, _amount, _labelled, _labelled, _choice, _choice, _choice, _switch, _switch, _span, _moment,
    )  # fmt: skip
    found: list[Extra] = []
    used = {stem for text in used for stem in stems(text)}
    for _ in range(rng.choices((0, 1, 2, 3), (28, 36, 26, 10))[0]):
        extra = rng.choice(kinds)(values)
        named = {stem for param in extra.params for stem in stems(f"{param.name} {param.description}")}
        if not named & used:
            found.append(extra)
            used |= named
    return tuple(found)


def stems(text: str) -> set[str]:
    """What tells a name or description from others: its words, without the little ones and the mark of many."""
    return {found.removesuffix("s") for found in re.findall(r"[^\W\d_]+", text.lower())} - LITTLE


def _one(values: Values, name: str, type_: str, kind: str, text: str, ways: list[str]) -> Extra:
    return Extra((Param(name, name, type_, kind, text, values.rng.random() < 0.45),), tuple(ways))


def _amount(values: Values) -> Extra:
    """A number with its unit, or with what it measures."""
    rng = values.rng
    unit = rng.choice(COUNTED) if rng.random() < 0.6 else f"{word(values).lower()}s"
    type_, kind = rng.choice((("i", "int9"), ("i", "int9"), ("i", "small"), ("n", "float"), ("i", "int9k")))
    if rng.random() < 0.55:
        names = (unit, f"num_{unit}", f"max_{unit}", f"{unit[:-1]}_count", unit, f"number_of_{unit}", "count")
        name = rng.choice(names)
        text = rng.choice((f"Number of {unit}", f"How many {unit}", f"Count of {unit}"))
        return _one(values, name, type_, kind, text, [way.replace("{u}", unit) for way in UNITED])
    measured = rng.choice(MEASURED) if rng.random() < 0.6 else word(values).lower()
    name = rng.choice((measured, f"{measured}_{unit}", f"{measured}_in_{unit}", measured))
    text = rng.choice((f"{upper(measured)} in {unit}", f"The {measured} in {unit}", f"{upper(measured)} ({unit})"))
    ways = [way.replace("{u}", unit).replace("{q}", measured) for way in MEASURES]
    return _one(values, name, type_, kind, text, ways)


def _labelled(values: Values) -> Extra:
    """A text that stands beside the name of its argument."""
    rng, label = values.rng, word(values)
    name = rng.choice((label, label, f"{label}_name", f"{label}_id")).lower()
    ways = [way.replace("{p}", label if rng.random() < 0.8 else label.lower()) for way in LABELLED]
    return _one(values, name, "s", rng.choice(LABELS), described(values, label), ways)


def described(values: Values, label: str) -> str:
    """What a schema says of an argument with this name."""
    texts = f"The {label}", upper(label), f"Which {label}", f"{upper(label)} to use", f"Name of the {label}"
    return values.rng.choice(texts)


def _choice(values: Values) -> Extra:
    """One of some words, mostly said in passing."""
    rng = values.rng
    label = rng.choice(OPTIONS) if rng.random() < 0.6 else word(values).lower()
    listed = {rng.choice(words.ADJECTIVES) if rng.random() < 0.5 else word(values) for _ in range(rng.randint(2, 5))}
    choices = rng.sample(sorted(listed), len(listed))
    ways = [way.replace("{p}", label) for way in CHOSEN]
    return _one(values, label, "e", ",".join(choices), described(values, label), ways)


def _span(values: Values) -> Extra:
    """Two ends of one kind."""
    rng = values.rng
    first, last = rng.choice(ENDS).split()
    thing_ = rng.choice((*MOMENTS[-2:], "date", "time", "city", "page", "point", word(values).lower(), ""))
    names = [f"{end}_{thing_}".rstrip("_") if rng.random() < 0.95 else end for end in (first, last)]
    kind = {"date": "date", "time": "hm", "city": "city", "page": "int9"}.get(thing_) or rng.choice(
        ("date", "iso", "city", "time", "label", "int9", "room", "brand")
    )
    type_ = "i" if kind == "int9" else "s"
    texts = [upper(name.replace("_", " ")) for name in names]
    needed = rng.random() < 0.5
    params = tuple(Param(n, n, type_, kind, text, needed) for n, text in zip(names, texts, strict=True))
    return Extra(params, tuple(SPANS))


def _moment(values: Values) -> Extra:
    """A time or a date."""
    rng = values.rng
    name = rng.choice(MOMENTS)
    timed = rng.random() < 0.5 if name not in ("date", "day", "due") else False
    kind = rng.choice(("time", "hm", "time")) if timed else rng.choice(("date", "iso", "date", "day"))
    text = described(values, name.replace("_", " ")) if rng.random() < 0.5 else "What time" if timed else "Which day"
    return _one(values, name, "s", kind, text, TIMED if timed else DATED)


def _switch(values: Values) -> Extra:
    """True or false: a quality of the noun, something that goes with it, or something to be done beside."""
    rng, roll = values.rng, values.rng.random()
    if roll < 0.36:
        quality = rng.choice(words.ADJECTIVES) if rng.random() < 0.7 else word(values).lower()
        name = rng.choice((f"is_{quality}", quality, f"make_{quality}", f"{quality}_only"))
        text = f"Whether it is {quality}" if rng.random() < 0.6 else f"{upper(quality)} or not"
        yes = f"^{quality}|^{quality}|^{quality}|, make it {quality}|, {quality}|, it should be {quality}"
        no = f", not {quality}|^non-{quality}|, it should not be {quality}|^not {quality}"
    elif roll < 0.72:
        one = word(values)
        part = f"{one}s" if rng.random() < 0.65 else one
        name = f"{rng.choice(('include_', 'with_', 'use_', 'show_', 'add_', 'has_', '', ''))}{part.lower()}"
        text = rng.choice((f"Whether to include {part}", f"With {part}", f"Include {part}", f"With {part} or without"))
        yes = f"with {part}|including {part}|and {part}|plus {part}|, {part} too|with the {part}|^{one}|with {one}"
        no = f"without {part}|, no {part}|without the {part}|, leave out the {part}|but no {part}|without {one}"
    else:
        deed = rng.choice(MARKS) if rng.random() < 0.6 else rng.choice(words.VERBS)
        name, said, done = deed, deed.replace("_", " "), _past(deed)
        text = rng.choice((f"{upper(said)} or not", f"Whether to {said}", upper(said), f"Whether it is {done}"))
        yes = f"^{done}|^{said}|and {said}|, {said} it|, {said}|with {said}|, {said} please|, {done}"
        no = f", do not {said}|without {said}|, don't {said}|, no {said}|, not {done}"
    param = Param(name, name, "b", "", text, rng.random() < 0.15)
    return Extra((param,), tuple(yes.split("|")), tuple(no.split("|")))


def _past(verb: str) -> str:
    if verb.endswith("e"):
        return f"{verb}d"
    return f"{verb[:-1]}ied" if verb.endswith("y") and verb[-2] not in "aeiou" else f"{verb.replace('_', '-')}ed"
