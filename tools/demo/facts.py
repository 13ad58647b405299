"""Things that a user can tell: names, places, numbers and the rest; most wordings stand in ``facts.txt``."""

import re
from dataclasses import dataclass
from pathlib import Path

from .values import Values

# Values that a vague question ("Which number was it?") cannot tell apart, by the first word of each line.
SORTS = """
number code int small level id phone float minutes cell version
place city country
when date day time iso month
person anyone fullname drname
word madeup noun phrase label brand title adjective topic
"""
SORT_OF = {kind: line.split()[0] for line in SORTS.strip().splitlines() for kind in line.split()}


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing a user can tell: clauses that state it, questions for it, and the answer; ``{}`` is the value."""

    name: str
    kind: str
    clauses: tuple[str, ...]
    questions: tuple[str, ...]
    answer: str
    greeting: str = ""
    groups: frozenset[str] = frozenset()
    vague: tuple[str, ...] = ()

    @property
    def sort(self) -> str:
        """What a vague question would call the value: a number, a place, a time; else the kind itself."""
        return SORT_OF.get(self.kind, self.kind)

    def value(self, v: Values) -> str:
        """A fresh value: of a kind known to ``v``, or from the fact's own list (``=one/two_words``)."""
        if self.kind.startswith("="):
            return v.pick(self.kind[1:].split("/")).replace("_", " ")
        return v.text(self.kind)

    def mixes_with(self, other: "Fact") -> bool:
        """Whether a question for the one may be taken for a question for the other."""
        return bool(self.groups & other.groups)


def fill(template: str, value: str) -> str:
    """A clause or an answer with its value, and "an" where the value wants it."""
    if value[0].lower() in "aeiou":
        template = re.sub(r"\b([Aa]) (?=\{\})", r"\1n ", template)
    return template.format(value)


def _fact(name: str, kind: str, clauses: str, questions: str, answer: str, groups: str = "") -> Fact:
    own = frozenset(f"{groups} {name.replace('_', ' ')}".lower().split())
    return Fact(name, kind, tuple(clauses.split("|")), tuple(questions.split("|")), answer, groups=own)


def _read() -> tuple[Fact, ...]:
    """The facts of ``facts.txt``; the format is described there."""
    text = Path(__file__).with_name("facts.txt").read_text("utf-8")
    facts = []
    for block in text.split("\n[")[1:]:
        head, *lines = block.strip().splitlines()
        name, kind, *groups = head.rstrip("]").split(" ")
        said: dict[str, list[str]] = {mark: [] for mark in "-?~=!"}
        for line in lines:
            said[line[0]] += line[2:].split(" | ")
        own = frozenset([*groups, *name.split("_")])
        [answer] = said["="]
        clauses, questions, vague = (tuple(said[mark]) for mark in "-?~")
        facts.append(Fact(name, kind, clauses, questions, answer, "|".join(said["!"]), own, vague))
    return tuple(facts)


_ALL = _read()
# Facts whose kinds are all known to values.py: name, city and number first. The others have lists of their own.
FACTS = tuple(fact for fact in _ALL if not fact.kind.startswith("="))
LISTED = tuple(fact for fact in _ALL if fact.kind.startswith("="))
# The blocks that open the file are the everyday ones and come up more often than the many after them.
EVERYDAY = FACTS[3:24]

RELATIVES = "dog cat sister brother mother father wife husband son daughter boss friend neighbour teacher horse boat bike".split()
RELATIVES += "parrot cousin uncle aunt manager doctor colleague car robot plant rabbit hamster goldfish".split()
RELATIVES += "baby nephew niece grandmother grandfather puppy kitten pony tortoise partner coach pupil".split()
RELATIVE_CLAUSES = (
    "my {w} is called {}|my {w}'s name is {}|I have a {w} named {}|the name of my {w} is {}|I have a {w} called {}|"
    "{} is my {w}|we named our {w} {}|my {w} goes by {}|I share my life with a {w}, {}|say hello to {}, my {w}|"
    "my {w} answers to {}|{} is the name of my {w}|there is also my {w} {}|I gave my {w} the name {}|my {w} is {}|"
    "you should meet my {w} {}|everybody calls my {w} {}|I often talk about {}, my {w}|we call our {w} {}"
)
RELATIVE_QUESTIONS = (
    "What is my {w}'s name?|What is my {w} called?|What's the name of my {w}?|Who is my {w}?|Name my {w}.|"
    "Do you remember my {w}'s name?|Tell me the name of my {w}.|How is my {w} called?|What did I say my {w} is called?|"
    "What do we call our {w}?|Which name does my {w} have?|Can you still tell the name of my {w}?|What's my {w} called?|"
    "Remind me what my {w} is called.|I wonder if you know my {w}'s name.|What did we name our {w}?|And my {w} is who?|"
    "To what name does my {w} answer?|Repeat the name of my {w}.|Which name did I give you for my {w}?"
)


def relative_fact(v: Values) -> Fact:
    """A fact about the name of somebody or something of the user's."""
    who = v.pick(RELATIVES) if v.rng.random() < 0.75 else v.noun()
    one = f"an {who}" if who[0] in "aeio" or who == "uncle" else f"a {who}"
    clauses, questions = (
        text.replace("a {w}", one).replace("{w}", who) for text in (RELATIVE_CLAUSES, RELATIVE_QUESTIONS)
    )
    return _fact(who, "person", clauses, questions, f"Your {who} is called {{}}.")


def thing_fact(v: Values) -> Fact:
    """A fact about any noun: the user's, or simply "the"."""
    noun = v.noun() if v.rng.random() < 0.6 else v.phrase()
    the, your = v.rng.choice((("my", "your"), ("the", "the"), ("our", "your")))
    kind = v.pick(
        "code word brand colour label id date city person email level noun phrase float title adjective".split()
    )
    it = f"{the} {noun}"
    return _fact(
        noun,
        kind,
        f"{it} is {{}}|{it}: {{}}|{it} has the value {{}}|I set {it} to {{}}|for {it} I have {{}}|{it} should be {{}}|"
        f"put down {{}} for {it}|{it} will be {{}}|when it comes to {it}, it is {{}}|{{}} is {it}|I wrote {{}} for {it}|"
        f"as for {it}, take {{}}|they told me that {it} is {{}}|we agreed on {{}} for {it}|keep in mind that {it} is {{}}",
        f"What is {it}?|What's {it}?|Tell me {it}.|What was {it}?|Do you remember {it}?|Which {noun} did I give you?|"
        f"What did I say {it} is?|Remind me of {it}.|What did I tell you about {it}?|What should {it} be?|Repeat {it}.|"
        f"Can you still tell what {it} is?|To what did I set {it}?|What have you noted for {it}?|I forgot {it}, what was it?|"
        f"What did we agree on for {it}?|I wonder if you still know {it}.",
        f"{your.capitalize()} {noun} is {{}}.",
    )


# Kind, clauses, questions and answer of what may be said of somebody else; ``{w}`` is who.
OF_PEOPLE = (
    (
        "city",
        "{w} lives in {}|{w} is from {}|{w} moved to {}|{w} has a flat in {}|in {} lives {w}|I visited {w} in {}|"
        "{} is where {w} lives|{w} settled in {}",
        "Where does {w} live?|Which city does {w} live in?|Where is {w} from?|Where did {w} move?|Where is {w}'s home?|"
        "In which city would I find {w}?|Tell me where {w} lives.",
        "{w} lives in {}.",
    ),
    (
        "job",
        "{w} works as a {}|{w} is a {}|{w} became a {}|{w} was hired as a {}|{w} earns money as a {}",
        "What does {w} do?|What is {w}'s job?|What does {w} work as?|What did {w} become?|How does {w} earn money?|"
        "What's the profession of {w}?",
        "{w} works as a {}.",
    ),
    (
        "brand",
        "{w} works at {}|{w} works for {}|{w} has joined {}|{} has hired {w}|the employer of {w} is {}",
        "Where does {w} work?|Which company does {w} work for?|Who has hired {w}?|Who is the employer of {w}?|"
        "What company did {w} join?",
        "{w} works at {}.",
    ),
    (
        "food",
        "{w} likes {}|{w} loves {}|{w} always eats {}|for {w} it must be {}|you can make {w} happy with {}",
        "What does {w} like?|Which food does {w} love?|What does {w} always eat?|What makes {w} happy?|"
        "What should I cook for {w}?",
        "{w} likes {}.",
    ),
    (
        "code",
        "{w} has the number {}|the number of {w} is {}|{w} got number {}|{} is the number of {w}|{w} drew {}",
        "What is {w}'s number?|Which number does {w} have?|What number did {w} get?|Tell me the number of {w}.",
        "{w} has the number {}.",
    ),
    (
        "phrase",
        "{w} has a {}|{w} owns a {}|{w} bought a {}|I saw {w} with a {}|{w} cannot live without a {}",
        "What does {w} have?|What does {w} own?|What did {w} buy?|With what did I see {w}?",
        "{w} has a {}.",
    ),
    (
        "email",
        "{w} has the email {}|{w}'s email is {}|write to {w} at {}|{} reaches {w}|mail for {w} goes to {}",
        "What is {w}'s email?|How can I mail {w}?|Where can I write to {w}?|What address has {w}?|Where does mail for {w} go?",
        "{w} has the email {}.",
    ),
    (
        "time",
        "{w} comes at {}|{w} arrives at {}|I meet {w} at {}|at {} I see {w}|{w} will be here at {}",
        "When does {w} come?|At what time does {w} arrive?|When do I meet {w}?|When will {w} be here?",
        "{w} comes at {}.",
    ),
)


def person_fact(v: Values) -> Fact:
    """A fact about somebody else, told and asked by name."""
    who = v.anyone()
    kind, *texts = v.rng.choice(OF_PEOPLE)
    clauses, questions, answer = (text.replace("{w}", who) for text in texts)
    return _fact(who, kind, clauses, questions, answer)


def any_fact(v: Values) -> Fact:
    """Names, cities and numbers most often; the rest for breadth."""
    roll = v.rng.random()
    if roll < 0.34:
        return v.rng.choice(FACTS[:3])
    if roll < 0.47:
        return v.rng.choice(EVERYDAY)
    if roll < 0.65:
        return v.rng.choice(_ALL[3:])
    if roll < 0.76:
        return relative_fact(v)
    return thing_fact(v) if roll < 0.88 else person_fact(v)


def distinct_facts(v: Values, count: int) -> list[Fact]:
    """Facts whose questions cannot be mistaken for one another."""
    facts: list[Fact] = []
    while len(facts) < count:
        fact = any_fact(v)
        if not any(fact.mixes_with(other) for other in facts):
            facts.append(fact)
    return facts


def unlike(v: Values, told: list[Fact]) -> Fact:
    """A fact that has nothing to do with those told, not even the sort of its value."""
    while True:
        fact = any_fact(v)
        if not any(fact.mixes_with(other) or fact.sort == other.sort for other in told):
            return fact
