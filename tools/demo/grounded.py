"""Tools whose words are drawn anew each time: only what a request and a schema share tells which tool is meant, and
which value belongs to which argument.

The tools of acttable.py teach what people call things; these teach to look: an answer that is right here can only have
been read off the schema. Their words are nouns, made-up words and abbreviations, so no word can be known by heart.
"""

import random
import re
from dataclasses import dataclass, field, replace
from typing import Any

from . import words
from .acttalk import any_act
from .compose import asked, tool_of
from .dialogue import AS_IS
from .extras import SUBJECTS, Extra, described, drawn, upper, word
from .things import thing
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


@dataclass(frozen=True, slots=True)
class Grounded(Tool):
    """A tool of drawn words; ``short`` says less of the noun, which is enough among the tools on offer."""

    verb: str = ""
    noun: tuple[str, ...] = ()
    extras: tuple[Extra, ...] = ()
    alias: tuple[str, ...] = ()
    """Another noun, which only the description has."""
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
            if not extra.required and rng.random() < 0.5:
                continue
            said, arguments = extra.said(values)
            drawn |= arguments
            (fronts if said.startswith("^") else tails).append(said.removeprefix("^"))
        noun = self.short if self.short and rng.random() < 0.25 else self.noun
        noun = self.alias if self.alias and rng.random() < 0.6 else noun
        named = " ".join([*fronts[:1], _spoken(rng, noun)])
        tails += fronts[1:]
        main = ""
        if "{0}" in head:
            value = thing(values, self.params[0].kind)
            label = self.params[0].name.replace("_", " ")
            main = f"{label} {value.text}" if rng.random() < 0.12 else value.text
            drawn[self.params[0].name] = value.data if self.params[0].type != "s" else str(value.data)
        verb = self.verb.replace("_", " ")
        if not self.by_verb and verb in SYNONYMS and rng.random() < 0.25:
            verb = rng.choice(SYNONYMS[verb])
        text, command = head.format(main, v=verb, n=named), head.split(" ")[0] in COMMANDS
        if not command and not head.startswith("{0}"):
            text = upper(text) if rng.random() < 0.65 else text
            text = text.rstrip("?") if rng.random() < 0.15 else text
        text = _joined(rng, text, tails, first=not command and rng.random() < 0.12)
        text = asked(values, text, free=not tails) if command else text
        text = _beside(values, text)
        return AS_IS + text, {p.name: drawn[p.name] for p in self.params if p.name in drawn}


def _spoken(rng: random.Random, noun: tuple[str, ...]) -> str:
    """The noun as people write it: an abbreviation in either case, rarely a plural."""
    said = " ".join(word.lower() if word.isupper() and rng.random() < 0.35 else word for word in noun)
    return f"{said}s" if rng.random() < 0.08 else said


def _joined(rng: random.Random, text: str, tails: list[str], *, first: bool) -> str:
    """The tails behind the text; `first`: one of them before it."""
    mark = text[-1] if text[-1] in "?." else ""
    body = text[:-1] if mark else text
    if first and tails and not tails[0].startswith(","):
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


def made(values: Values, verb: str = "", first: str = "", noun: tuple[str, ...] = ()) -> Grounded:
    """A tool, with the verb, the first word of its noun, or the noun given."""
    rng = values.rng
    reads = verb in READING if verb else rng.random() < 0.45
    verb = verb or rng.choice(READING if reads else DOING if rng.random() < 0.8 else words.VERBS)
    if not noun:
        count = 2 if first else rng.choices((1, 2, 3), (45, 50, 5))[0]
        noun = tuple(word(values) for _ in range(count))
        noun = (first, *noun[1:]) if first else noun
    extras = drawn(values, set(noun))
    names = {param.name for extra in extras for param in extra.params}
    subject = _subject(values, noun, names)
    alias = tuple(word(values) for _ in range(rng.choice((1, 2)))) if rng.random() < 0.13 else ()
    bare = not subject
    templates = (BARE_READS if bare else READS) if reads else (BARE_DEEDS if bare else DEEDS)
    params = [*([subject] if subject else []), *(param for extra in extras for param in extra.params)]
    if len(params) > 1 and rng.random() < 0.2 and bare:
        rng.shuffle(params)
    return Grounded(
        "-".join(noun).lower(), _name(rng, verb, noun, reads=reads), _described(rng, verb, alias or noun, subject, reads=reads),
        tuple(params), tuple(templates), (("status", "ok"),), verb, noun, extras, alias,
    )  # fmt: skip


def _subject(values: Values, noun: tuple[str, ...], names: set[str]) -> Param | None:
    rng = values.rng
    if rng.random() < 0.1:
        return None
    kind = rng.choice(SUBJECTS)
    own = noun[-1].lower()
    choices = [kind, "name", "target", "query", own, f"{own}_name", f"{own}_id", "text", "value", "subject", "item"]
    choices += [word(values).lower(), f"{word(values).lower()}_name", "input"]
    name = next(n for n in iter(lambda: rng.choice(choices), "") if n not in names)
    text = described(values, name.replace("_", " "))
    return Param("0", name, "s", kind, text)


def _name(rng: random.Random, verb: str, noun: tuple[str, ...], *, reads: bool) -> str:
    parts, roll = [part.lower() for part in noun], rng.random()
    parts = parts if roll < 0.08 else [*parts, verb] if roll < 0.14 else [verb, *parts]
    if reads and roll > 0.95:
        parts = [*parts[1:], "info"]
    style = rng.random()
    if style < 0.82:
        return "_".join(parts)
    return parts[0] + "".join(map(upper, parts[1:])) if style < 0.95 else "-".join(parts)


def _described(rng: random.Random, verb: str, noun: tuple[str, ...], subject: Param | None, *, reads: bool) -> str:
    said, verb = " ".join(noun), verb.replace("_", " ")
    of = subject.name.replace("_", " ") if subject else ""
    choices = [
        f"{upper(verb)} a {said}",
        f"{upper(verb)} the {said}",
        f"{upper(verb)}s a {said}",
        f"{upper(verb)} {said}",
    ]
    if reads:
        choices += [f"Returns the {said}", f"Current {said}", f"The {said}" + (f" of a {of}" if of else "")]
    if of:
        choices += [
            f"{upper(verb)} the {said} {rng.choice(('of', 'for'))} {rng.choice(('a', 'the', 'a given'))} {of}"
        ] * 3
    return rng.choice(choices) + rng.choice((".", ".", ""))


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
