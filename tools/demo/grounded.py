"""Tools whose words are drawn anew each time: only what a request and a schema share tells which tool is meant, and
which value belongs to which argument.

The tools of acttable.py teach what people call things; these teach to look: an answer that is right here can only have
been read off the schema. Their words are nouns, made-up words and abbreviations, so no word can be known by heart.
"""

import random
import re
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from . import words
from .acttable import acts
from .acttalk import any_act
from .compose import asked, tool_of
from .dialogue import AS_IS
from .things import number, thing
from .toolbox import Param, Tool
from .toolwords import CONTEXT, SYNONYMS
from .values import Values

# Requests: {v} is the verb, {n} what the tool is about, {0} the main value.
READS = """what is the {n} of {0}?|what's the {n} for {0}?|{n} of {0}|{n} for {0}|{0} {n}|{n} {0}|{n}: {0}|{n} in {0}|
how is the {n} in {0}?|give me the {n} of {0}|I need the {n} for {0}|show me {0}'s {n}|check the {n} at {0}|
{v} the {n} of {0}|{v} {n} for {0}|is there a {n} for {0}?|any {n} at {0}?|tell me the {n} of {0}|what {n} does {0} have?|
I want to know the {n} of {0}|{0}, what is its {n}?|how about the {n} of {0}?|can I get the {n} for {0}?|{v} {n} {0}|
how high is the {n} in {0}?|which {n} has {0}?|let me see the {n} of {0}|get {0} {n}|I wonder about the {n} in {0}""".replace(
    "\n", ""
).split("|")
BARE_READS = """what is the {n}?|show the {n}|{n}|{n}?|give me the {n}|{v} {n}|{v} the {n}|how is the {n}?|let me see the {n}|
I need the {n}|tell me the {n}|any {n}?|what's the {n} now?""".replace("\n", "").split("|")
DEEDS = """{v} a {n} called {0}|{v} the {n} {0}|{v} {n} {0}|I need a {n} for {0}|I'd like a {n} for {0}|{v} {0} as a {n}|
{n} for {0}|{v} a {n} for {0}|I want a {n} of {0}|{0} needs a {n}|there is a {n} {0}, {v} it|use {0} for the {n}|
{v} {n}: {0}|{n}: {0}|I need to {v} a {n}: {0}|{v} a new {n} named {0}|{v} the {n} with {0}|it is time to {v} {n} {0}|
let's {v} a {n}, {0}|{v} my {n} {0}|{n} {0}|I have to {v} the {n} {0}|a {n} for {0}|turn {0} into a {n}|{0} as {n}|
we should {v} the {n} of {0}|time for a {n}: {0}|let me have a {n} of {0}|someone has to {v} the {n} {0}|{v} the {0} {n}|{v} {0} {n}|
the {0} {n} is what I want to {v}""".replace("\n", "").split("|")
BARE_DEEDS = "{v} the {n}|{v} {n}|I want to {v} the {n}|{v} a {n}|{v} my {n} now|it is time to {v} the {n}|I need to {v} {n}".split(
    "|"
)
COMMANDS = ("{v}", "give", "show", "check", "tell", "let", "get", "use", "turn")
READING = "get show find check fetch list read lookup query view retrieve".split()
DOING = """create add send start stop open close book order set make generate update delete remove cancel run post log
schedule convert calculate compute submit request reserve play build search save move copy print lock assign""".split()
SUBJECTS = """city person label word id email file brand noun fullname title phrase topic path url phrase word title host
label city person topic date room country food""".split()
LABELS = [kind for kind in SUBJECTS if kind != "topic"]
MEASURED = "length size distance weight height duration limit amount price width age level depth speed budget".split()
COUNTED = """minutes hours days weeks people guests pages pixels copies rows euros percent kilometres kilograms
centimetres grams litres seats nights rooms questions items points lines steps seconds months years dollars""".split()
OPTIONS = "type mode style kind priority format quality order view status unit category group shape".split()
MARKS = "force overwrite notify verbose recursive confirm repeat dry_run urgent shuffle archive sync".split()
LABELLED = """{p} {0}|with {p} {0}|{p}: {0}|{p} = {0}|with the {p} {0}|, the {p} is {0}|{0} as the {p}|{0} as {p}|
for {p} {0}|, use {0} as {p}|in the {0} {p}|in {p} {0}|, {p} should be {0}|under the {p} {0}|the {0} {p}|{0} {p}""".replace(
    "\n", ""
).split("|")
UNITED = "{0} {u}|with {0} {u}|for {0} {u}|{0} {u}|, {0} {u}|{u}: {0}|of {0} {u}|{u} {0}|at {0} {u}".split("|")
MEASURES = """{q} {0}|{q} of {0}|with {q} {0}|{q}: {0}|at {q} {0}|{q} {0} {u}|{0} {u} {q}|{0} {u}|{0} {u}|with a {q} of {0}|
, the {q} is {0} {u}|{0} as {q}""".replace("\n", "").split("|")
CHOSEN = "^{0}|^{0}|^{0}|{p} {0}|{0} {p}|as {0}|in {0}|, {0}|{p}: {0}|, make it {0}|with {p} {0}|in {0} {p}|{0}".split(
    "|"
)


@dataclass(frozen=True, slots=True)
class Extra:
    """An argument beside the main one, with the ways to say it; for a switch, those that say yes and those that say no.

    ``^`` begins what stands before the noun, a comma what takes no other joint.
    """

    param: Param
    ways: tuple[str, ...]
    denials: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Grounded(Tool):
    """A tool of drawn words; ``short`` says less of the noun, which is enough among the tools on offer."""

    verb: str = ""
    noun: tuple[str, ...] = ()
    extras: tuple[Extra, ...] = ()
    short: tuple[str, ...] = ()
    by_verb: bool = field(default=False)
    """Whether another tool on offer has the same noun, so that the verb must be said."""

    def request(self, values: Values) -> tuple[str, dict[str, Any]]:
        """A request and its arguments."""
        rng = values.rng
        fitting = [r for r in self.requests if "{v}" in r] if self.by_verb else list(self.requests)
        head = rng.choice(fitting)
        drawn: dict[str, Any] = {}
        fronts, tails = list[str](), list[str]()
        for extra in rng.sample(self.extras, len(self.extras)):
            if not extra.param.required and rng.random() < 0.5:
                continue
            said, drawn[extra.param.name] = _said(values, extra)
            (fronts if said.startswith("^") else tails).append(said.removeprefix("^"))
        noun = " ".join([*fronts[:1], _spoken(rng, self.short if self.short and rng.random() < 0.25 else self.noun)])
        tails += fronts[1:]
        main = ""
        if "{0}" in head:
            value = thing(values, self.params[0].kind)
            main = value.text
            drawn[self.params[0].name] = value.data if self.params[0].type != "s" else str(value.data)
        verb = self.verb.replace("_", " ")
        if not self.by_verb and verb in SYNONYMS and rng.random() < 0.25:
            verb = rng.choice(SYNONYMS[verb])
        text = _joined(rng, head.format(main, v=verb, n=noun), tails)
        if head.split(" ")[0] in COMMANDS:
            text = asked(values, text, free=not tails)
        elif not head.startswith("{0}"):
            text = _upper(text) if rng.random() < 0.65 else text
            text = text.rstrip("?") if rng.random() < 0.15 else text
        text = _beside(values, text)
        return AS_IS + text, {p.name: drawn[p.name] for p in self.params if p.name in drawn}


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]


def _spoken(rng: random.Random, noun: tuple[str, ...]) -> str:
    """The noun as people write it: an abbreviation in either case, rarely a plural."""
    said = " ".join(word.lower() if word.isupper() and rng.random() < 0.35 else word for word in noun)
    return f"{said}s" if rng.random() < 0.08 else said


def _joined(rng: random.Random, text: str, tails: list[str]) -> str:
    mark = text[-1] if text[-1] in "?." else ""
    body = text[:-1] if mark else text
    if tails and rng.random() < 0.1 and not tails[0].startswith(","):
        body, tails = f"{tails[0]}{rng.choice((', ', ': ', ' - '))}{body}", tails[1:]
    for tail in tails:
        body += tail if tail.startswith(",") else rng.choice((" ", " ", ", ", " and ")) + tail
    return body + mark


def _beside(values: Values, text: str) -> str:
    """Now and then with a sentence that asks for nothing."""
    rng, roll = values.rng, values.rng.random()
    if roll > 0.16:
        return text
    aside = rng.choice(
        (
            rng.choice(CONTEXT),
            f"The {values.noun()} is {rng.choice(words.ADJECTIVES)}.",
            f"{values.person()} is waiting.",
            f"{values.person()} likes the {values.noun()}.",
            f"I have no {values.noun()} left.",
            f"Is the {values.noun()} {rng.choice(words.ADJECTIVES)}?",
        )
    )
    if roll < 0.1:
        return f"{aside} {text}" if rng.random() < 0.7 or aside[-1] == "?" else f"{aside.rstrip('.')}, so {text}"
    return text + ("" if text[-1] in ".?!" else ".") + " " + aside


def _said(values: Values, extra: Extra) -> tuple[str, Any]:
    rng, param = values.rng, extra.param
    if param.type == "b":
        yes = not extra.denials or rng.random() < 0.6
        return rng.choice(extra.ways if yes else extra.denials), yes
    if param.choices:
        choice = rng.choice(param.choices)
        return rng.choice(extra.ways).replace("{0}", choice), choice
    value = thing(values, param.kind)
    if param.type in "in" and isinstance(value.data, int | float):
        value = number(values, value.data if param.type == "n" else int(value.data))
    data = value.data if param.type in "in" else str(value.data)
    way = rng.choice(extra.ways)
    return way.replace("{0}", value.text), data


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


def made(values: Values, verb: str = "", first: str = "", noun: tuple[str, ...] = ()) -> Grounded:
    """A tool, with the verb, the first word of its noun, or the noun given."""
    rng = values.rng
    reads = verb in READING if verb else rng.random() < 0.45
    verb = verb or rng.choice(READING if reads else DOING if rng.random() < 0.8 else words.VERBS)
    if not noun:
        count = 2 if first else rng.choices((1, 2, 3), (45, 50, 5))[0]
        drawn = [word(values) for _ in range(count)]
        noun = (first, *drawn[1:]) if first else tuple(drawn)
    extras = _extras(values, set(noun))
    names = {extra.param.name for extra in extras}
    subject = _subject(values, noun, names)
    bare = not subject
    templates = (BARE_READS if bare else READS) if reads else (BARE_DEEDS if bare else DEEDS)
    params = [*([subject] if subject else []), *(extra.param for extra in extras)]
    if len(params) > 1 and rng.random() < 0.2 and bare:
        rng.shuffle(params)
    return Grounded(
        "-".join(noun).lower(), _name(rng, verb, noun, reads=reads), _described(rng, verb, noun, subject, reads=reads),
        tuple(params), tuple(templates), (("status", "ok"),), verb, noun, tuple(extras),
    )  # fmt: skip


def _subject(values: Values, noun: tuple[str, ...], names: set[str]) -> Param | None:
    rng = values.rng
    if rng.random() < 0.1:
        return None
    kind = rng.choice(SUBJECTS)
    own = noun[-1].lower()
    choices = [
        kind if kind.isalpha() else "name",
        "name",
        "target",
        "query",
        own,
        f"{own}_name",
        f"{own}_id",
        "text",
        "value",
    ]
    choices += [word(values).lower(), f"{word(values).lower()}_name", kind]
    name = next(n for n in iter(lambda: rng.choice([*choices, "subject", "item", "input"]), "") if n not in names)
    plain = name.replace("_", " ")
    text = rng.choice(
        (f"The {plain}", _upper(plain), f"Which {plain}", f"{_upper(plain)} to use", f"Name of the {plain}")
    )
    return Param("0", name, "s", kind, text)


def _name(rng: random.Random, verb: str, noun: tuple[str, ...], *, reads: bool) -> str:
    parts, roll = [part.lower() for part in noun], rng.random()
    parts = parts if roll < 0.08 else [*parts, verb] if roll < 0.14 else [verb, *parts]
    if reads and roll > 0.95:
        parts = [*parts[1:], "info"]
    style = rng.random()
    if style < 0.82:
        return "_".join(parts)
    return parts[0] + "".join(map(_upper, parts[1:])) if style < 0.95 else "-".join(parts)


def _described(rng: random.Random, verb: str, noun: tuple[str, ...], subject: Param | None, *, reads: bool) -> str:
    said, verb = " ".join(noun), verb.replace("_", " ")
    of = subject.name.replace("_", " ") if subject else ""
    choices = [
        f"{_upper(verb)} a {said}",
        f"{_upper(verb)} the {said}",
        f"{_upper(verb)}s a {said}",
        f"{_upper(verb)} {said}",
    ]
    if reads:
        choices += [f"Returns the {said}", f"Current {said}", f"The {said}" + (f" of a {of}" if of else "")]
    if of:
        choices += [
            f"{_upper(verb)} the {said} {rng.choice(('of', 'for'))} {rng.choice(('a', 'the', 'a given'))} {of}"
        ] * 3
    return rng.choice(choices) + rng.choice((".", ".", ""))


def _extras(values: Values, used: set[str]) -> list[Extra]:
    rng = values.rng
    found: list[Extra] = []
    for _ in range(rng.choices((0, 1, 2, 3), (28, 36, 26, 10))[0]):
        extra = rng.choice((_amount, _amount, _labelled, _labelled, _choice, _choice, _switch))(values)
        if extra.param.name not in {e.param.name for e in found} | used:
            found.append(extra)
    return found


def _required(rng: random.Random) -> bool:
    return rng.random() < 0.45


def _amount(values: Values) -> Extra:
    """A number with its unit, or with what it measures."""
    rng = values.rng
    unit = rng.choice(COUNTED) if rng.random() < 0.6 else f"{word(values).lower()}s"
    type_, kind = rng.choice((("i", "int9"), ("i", "int9"), ("i", "small"), ("n", "float"), ("i", "int9k")))
    needed = _required(rng)
    if rng.random() < 0.55:
        name = rng.choice(
            (unit, f"num_{unit}", f"max_{unit}", f"{unit[:-1]}_count", unit, f"number_of_{unit}", "count")
        )
        text = rng.choice(
            (f"Number of {unit}", f"How many {unit}", _upper(unit) if name != "count" else f"Count of {unit}")
        )
        return Extra(Param(name, name, type_, kind, text, needed), tuple(way.replace("{u}", unit) for way in UNITED))
    measured = rng.choice(MEASURED) if rng.random() < 0.6 else word(values).lower()
    name = rng.choice((measured, f"{measured}_{unit}", f"{measured}_in_{unit}", measured))
    text = rng.choice((f"{_upper(measured)} in {unit}", f"The {measured} in {unit}", f"{_upper(measured)} ({unit})"))
    ways = tuple(way.replace("{u}", unit).replace("{q}", measured) for way in MEASURES)
    return Extra(Param(name, name, type_, kind, text, needed), ways)


def _labelled(values: Values) -> Extra:
    """A text that stands beside the name of its argument."""
    rng = values.rng
    label = word(values)
    name = rng.choice((label, label, f"{label}_name", f"{label}_id")).lower()
    said = rng.choice(
        (f"The {label}", _upper(label), f"Which {label}", f"{_upper(label)} to use", f"Name of the {label}")
    )
    ways = tuple(way.replace("{p}", label if rng.random() < 0.8 else label.lower()) for way in LABELLED)
    return Extra(Param(name, name, "s", rng.choice(LABELS), said, _required(rng)), ways)


def _choice(values: Values) -> Extra:
    """One of some words, mostly said in passing."""
    rng = values.rng
    label = rng.choice(OPTIONS) if rng.random() < 0.6 else word(values).lower()
    listed = {rng.choice(words.ADJECTIVES) if rng.random() < 0.5 else word(values) for _ in range(rng.randint(2, 5))}
    choices = sorted(listed) if rng.random() < 0.3 else list(dict.fromkeys(rng.sample(sorted(listed), len(listed))))
    ways = tuple(way.replace("{p}", label) for way in CHOSEN)
    text = rng.choice((f"The {label}", _upper(label), f"Which {label}", f"{_upper(label)} to use"))
    return Extra(Param(label, label, "e", ",".join(choices), text, _required(rng)), ways)


def _switch(values: Values) -> Extra:
    """True or false: a quality of the noun, something that goes with it, or something to be done beside."""
    rng, roll = values.rng, values.rng.random()
    if roll < 0.4:
        quality = rng.choice(words.ADJECTIVES) if rng.random() < 0.7 else word(values).lower()
        name = rng.choice((f"is_{quality}", quality, f"make_{quality}", f"{quality}_only"))
        text = f"Whether it is {quality}" if rng.random() < 0.6 else f"{_upper(quality)} or not"
        yes = f"^{quality}|^{quality}|^{quality}|, make it {quality}|, {quality}|, it should be {quality}"
        no = f", not {quality}|^non-{quality}|, it should not be {quality}|^not {quality}"
    elif roll < 0.75:
        part = f"{word(values)}s"
        name = f"{rng.choice(('include', 'with', 'use', 'show', 'add', 'has'))}_{part.lower()}"
        text = rng.choice((f"Whether to include {part}", f"With {part}", f"Include {part}"))
        yes = f"with {part}|including {part}|and {part}|plus {part}|, {part} too|with the {part}"
        no = f"without {part}|, no {part}|without the {part}|, leave out the {part}|but no {part}|minus {part}"
    else:
        deed = rng.choice(MARKS) if rng.random() < 0.6 else rng.choice(words.VERBS)
        name, said = deed, deed.replace("_", " ")
        text = rng.choice((f"{_upper(said)} or not", f"Whether to {said}", _upper(said)))
        yes = f"^{said}|and {said}|, {said} it|, {said}|with {said}|, {said} please"
        no = f", do not {said}|without {said}|, don't {said}|, no {said}"
    return Extra(Param(name, name, "b", "", text, rng.random() < 0.15), tuple(yes.split("|")), tuple(no.split("|")))


def offer(values: Values, count: int) -> list[Tool]:
    """Tools to offer together: one of drawn words, others that share its verb or a word of its noun, or nothing."""
    rng = values.rng
    first = made(values)
    tools: list[Tool] = [first]
    while len(tools) < count:
        roll = rng.random()
        other: Tool
        if roll < 0.28:
            other = made(values, verb=first.verb)
        elif roll < 0.5:
            other = made(values, first=rng.choice(first.noun))
        elif roll < 0.58:
            other = made(values, noun=first.noun)
        elif roll < 0.76:
            other = made(values)
        else:
            other = tool_of(values, any_act(values))
        if all(_apart(other, tool) for tool in tools):
            tools.append(other)
    rng.shuffle(tools)
    return [_fitted(tool, tools) if isinstance(tool, Grounded) else tool for tool in tools]


def _apart(one: Tool, two: Tool) -> bool:
    if isinstance(one, Grounded) and isinstance(two, Grounded) and set(one.noun) == set(two.noun):
        known = {one.verb, *SYNONYMS.get(one.verb, [])}
        return two.verb not in known and (one.verb in READING) != (two.verb in READING)
    return one.name != two.name


def _fitted(tool: Grounded, tools: list[Tool]) -> Grounded:
    """The tool, knowing what must be said of it beside the others."""
    others = [other for other in tools if other is not tool]
    told = {w for other in others for w in _told(other)}
    left = tuple(w for w in tool.noun if w.lower() not in told)
    same = any(isinstance(other, Grounded) and set(other.noun) == set(tool.noun) for other in others)
    return replace(tool, short=left[-1:] if left else (), by_verb=same)


def _told(tool: Tool) -> set[str]:
    texts = (tool.name, tool.description, *(f"{p.name} {p.kind if p.type == 'e' else ''}" for p in tool.params))
    return {w.lower() for text in texts for w in re.findall(r"[^\W\d_]+", re.sub(r"([a-z])([A-Z])", r"\1 \2", text))}
