"""Values that dialogues are filled with: names, cities, numbers, addresses, phrases.

Training and evaluation draw from the same lists but never meet: a value is held out when a checksum of it says so.
That rule also covers made-up words and numbers, so an evaluation value is one the model has never been shown.
"""

import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from . import words

ONSETS = "b br c ch cl d dr f fl g gl gr h j k kl l m n p pl pr qu r s sh sk sl st t th tr v w x y z".split()
VOWELS = "a e i o u ai au ea ee io oa oo ou y".split()
CODAS = "b ck d f g k l ll m n nd ng nt p r rd rk rn s sh st t th x z".split()
FOREIGN = "á à ä â å ã ç é è ê ë í î ï ñ ó ö ô õ ø ú ü û ý ß š ž č ć ł ń ś ż ğ \u0131 ř ů ő æ þ ð".split()
SCRIPTS = ((0x3B1, 0x3C9), (0x430, 0x44F), (0x5D0, 0x5EA), (0x627, 0x64A), (0x3042, 0x3093), (0x4E00, 0x5E00))


def held_out(value: str, share: int = 6) -> bool:
    """Whether a value belongs to the evaluation: one in ``share``, by checksum, whatever its case."""
    return zlib.crc32(value.casefold().encode()) % share == 0


@dataclass(frozen=True, slots=True)
class Value:
    """A value as a person writes it and as a JSON argument carries it."""

    text: str
    data: str | int | float | bool


class Values:
    """Draws values of a named kind, from the training side or from the held-out side."""

    def __init__(self, rng: random.Random, *, evaluation: bool = False) -> None:
        self.rng = rng
        self.evaluation = evaluation
        keep = self._mine
        self._first = [v for v in words.FIRST_NAMES if keep(v)]
        self._last = [v for v in words.LAST_NAMES if keep(v)]
        self._cities = [v for v in words.CITIES if keep(v)]
        self.nouns = [v for v in words.NOUNS if keep(v)]
        self._kinds: dict[str, Callable[[], str | int | float]] = _kinds(self)

    def _mine(self, value: str) -> bool:
        return held_out(value) == self.evaluation

    def draw(self, kind: str) -> Value:
        """One value of a kind named in the table below; an unknown kind is a KeyError."""
        data = self._kinds[kind]()
        if isinstance(data, float):
            return Value(f"{data:g}", data)
        if isinstance(data, int) and 1 < data < 11 and self.rng.random() < 0.08:
            return Value("two three four five six seven eight nine ten".split()[data - 2], data)
        return Value(str(data), data)

    def text(self, kind: str) -> str:
        """The written form of a fresh value."""
        return self.draw(kind).text

    def pick(self, items: Sequence[str]) -> str:
        """One of the items."""
        return self.rng.choice(items)

    def made_up(self, syllables: int = 0) -> str:
        """A pronounceable word that is in no dictionary, so that only copying can produce it."""
        rng = self.rng
        while True:
            count = syllables or rng.choice((1, 2, 2, 2, 3))
            word = "".join(rng.choice(ONSETS) + rng.choice(VOWELS) for _ in range(count)) + rng.choice(CODAS)
            if rng.random() < 0.06:
                spot = rng.randrange(len(word))
                word = word[:spot] + rng.choice(FOREIGN) + word[spot + 1 :]
            if self._mine(word):
                return word

    def foreign(self) -> str:
        """A short word in another script, so that copying bytes is practised."""
        first, last = self.rng.choice(SCRIPTS)
        return "".join(chr(self.rng.randrange(first, last)) for _ in range(self.rng.randrange(2, 6)))

    def person(self) -> str:
        """A first name: real, made up, or (rarely) in another script."""
        roll = self.rng.random()
        if roll < 0.52:
            return self.rng.choice(self._first)
        return self.made_up().capitalize() if roll < 0.985 else self.foreign()

    def full_name(self) -> str:
        """First and last name."""
        last = self.rng.choice(self._last) if self.rng.random() < 0.6 else self.made_up().capitalize()
        return f"{self.person()} {last}"

    def anyone(self) -> str:
        """A first name, or now and then a full one."""
        return self.person() if self.rng.random() < 0.75 else self.full_name()

    def city(self) -> str:
        """A city: real, made up, or two words of which one is made up."""
        roll = self.rng.random()
        if roll < 0.55:
            return self.rng.choice(self._cities)
        name = self.made_up().capitalize()
        if roll < 0.9:
            return name
        return f"{self.rng.choice(('San', 'New', 'Port', 'Bad', 'Saint', 'Lake', 'El'))} {name}"

    def number(self, low: int, high: int) -> int:
        """An integer; from 1000 up it respects the held-out rule."""
        while True:
            number = self.rng.randint(low, high)
            if number < 1000 or self._mine(str(number)):
                return number

    def noun(self) -> str:
        """A real English noun of this side."""
        return self.rng.choice(self.nouns)

    def phrase(self) -> str:
        """An adjective and a noun, or two nouns."""
        first = self.rng.choice(words.ADJECTIVES) if self.rng.random() < 0.7 else self.noun()
        return f"{first} {self.noun()}"

    def topic(self) -> str:
        """What a person might search for, one to five words."""
        rng, roll = self.rng, self.rng.random()
        if roll < 0.2:
            return self.noun()
        if roll < 0.5:
            return self.phrase()
        if roll < 0.62:
            return f"{self.phrase()} {rng.choice(('in', 'near', 'from'))} {self.city()}"
        if roll < 0.75:
            return f"{rng.choice(('how to', 'best way to', 'where to'))} {rng.choice(words.VERBS)} a {self.noun()}"
        if roll < 0.88:
            return f"{self.noun()} {rng.choice(('and', 'for', 'with', 'without', 'of', 'on'))} {self.phrase()}"
        return f"{self.made_up()} {self.noun()}" if roll < 0.95 else f"{rng.choice(('best', 'cheap'))} {self.phrase()}s"

    def sentence(self) -> str:
        """A short message of the kind that one person sends another."""
        rng = self.rng
        return rng.choice(
            (
                lambda: f"the {self.noun()} is {rng.choice(words.ADJECTIVES)}",
                lambda: f"I will be {rng.randrange(5, 60)} minutes late",
                lambda: f"please bring the {self.phrase()}",
                lambda: f"see you in {self.city()} on {rng.choice(words.DAYS)}",
                lambda: f"the {self.noun()} meeting moved to {rng.choice(words.DAYS)}",
                lambda: f"{rng.choice(words.VERBS)} the {self.noun()} before {self.clock()}",
                lambda: f"thank you for the {self.noun()}",
                lambda: f"we need {rng.randrange(2, 40)} more {self.noun()}s",
                lambda: f"don't forget the {self.noun()}",
                lambda: f"{self.person()} has the {self.phrase()}",
            )
        )()

    def title(self) -> str:
        """A capitalised title of one to three words."""
        text = self.rng.choice((self.phrase, self.phrase, self.noun))()
        return text.capitalize() if self.rng.random() < 0.5 else text.title()

    def clock(self) -> str:
        """A time of day."""
        rng = self.rng
        if rng.random() < 0.5:
            return f"{rng.randrange(24):02d}:{rng.choice((0, 10, 15, 20, 30, 40, 45)):02d}"
        return (
            f"{rng.randrange(1, 13)}{rng.choice(('', ':30', ':15'))}{rng.choice((' ', ''))}{rng.choice(('am', 'pm'))}"
        )

    def iso_date(self) -> str:
        """A date such as 2026-03-14."""
        return f"{self.rng.randrange(2024, 2030)}-{self.rng.randrange(1, 13):02d}-{self.rng.randrange(1, 29):02d}"

    def date(self) -> str:
        """A date as written in a chat."""
        rng, roll = self.rng, self.rng.random()
        if roll < 0.4:
            return self.iso_date()
        if roll < 0.6:
            return f"{rng.choice(words.MONTHS)} {rng.randrange(1, 29)}"
        if roll < 0.7:
            return f"{rng.randrange(1, 29)} {rng.choice(words.MONTHS)}"
        if roll < 0.85:
            return rng.choice(words.DAYS)
        return rng.choice(("today", "tomorrow", "tonight", "next week", f"next {rng.choice(words.DAYS)}"))

    def label(self) -> str:
        """A lower-case identifier: a noun, a made-up word, or two joined by a mark."""
        rng, roll = self.rng, self.rng.random()
        one = self.noun() if rng.random() < 0.6 else self.made_up()
        if roll < 0.35:
            return one
        return rng.choice(("-", "_", "-", ".")).join((one, self.noun() if roll < 0.8 else str(rng.randrange(1, 100))))

    def identifier(self) -> str:
        """An order, ticket or part number such as ORD-4821."""
        rng, roll = self.rng, self.rng.random()
        prefix = "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(rng.choice((1, 2, 2, 3))))
        number = self.number(100, 99999)
        if roll < 0.5:
            return f"{prefix}-{number}"
        if roll < 0.7:
            return f"{prefix}{number}"
        return str(number) if roll < 0.76 else f"{prefix.lower()}-{number}"

    def email(self) -> str:
        """An e-mail address."""
        user = self.rng.choice((self.made_up, lambda: self.rng.choice(self._first).lower(), self.label))()
        return f"{user}@{self.made_up() + '.com' if self.rng.random() < 0.4 else self.rng.choice(words.DOMAINS)}"

    def url(self) -> str:
        """A web address."""
        tail = f"/{self.label()}" if self.rng.random() < 0.5 else ""
        return f"https://{self.made_up() if self.rng.random() < 0.5 else self.noun()}.{self.pick(('com', 'org', 'net'))}{tail}"

    def file(self) -> str:
        """A file name."""
        return f"{self.label()}.{self.rng.choice(words.EXTENSIONS)}"

    def path(self) -> str:
        """A file path, absolute or relative."""
        roots = ("/home/", "/var/", "/data/", "src/", "docs/", "./", "~/", "/etc/", "/")
        middle = f"{self.label()}/" if self.rng.random() < 0.5 else ""
        return f"{self.rng.choice(roots)}{middle}{self.file() if self.rng.random() < 0.7 else self.label()}"


def _kinds(v: Values) -> dict[str, Callable[[], str | int | float]]:
    """The table of kinds; the names are those used in the catalogue and in the fact lists."""
    rng = v.rng
    choose = rng.choice
    return {
        "person": v.person,
        "anyone": v.anyone,
        "fullname": v.full_name,
        "city": v.city,
        "int": lambda: v.number(1, choose((10, 50, 200, 1000, 10000))),
        "small": lambda: rng.randint(1, 12),
        "level": lambda: rng.randint(0, 100),
        "minutes": lambda: choose((1, 2, 3, 5, 8, 10, 12, 15, 20, 25, 30, 40, 45, 50, 60, 75, 90)),
        "code": lambda: v.number(1000, choose((9999, 99999, 999999))),
        "float": lambda: round(rng.uniform(0, choose((2, 20, 300))), choose((1, 1, 2))),
        "date": v.date,
        "iso": v.iso_date,
        "time": v.clock,
        "day": lambda: choose(words.DAYS),
        "email": v.email,
        "url": v.url,
        "path": v.path,
        "file": v.file,
        "phone": lambda: f"+{rng.randrange(1, 99)} {v.number(100, 999)} {v.number(1000, 99999)}",
        "id": v.identifier,
        "label": v.label,
        "noun": v.noun,
        "phrase": v.phrase,
        "topic": v.topic,
        "sentence": v.sentence,
        "title": v.title,
        "word": lambda: v.made_up() if rng.random() < 0.5 else v.noun(),
        "madeup": v.made_up,
        "brand": lambda: v.made_up().capitalize(),
        "colour": lambda: choose(words.COLOURS),
        "animal": lambda: choose(words.ANIMALS),
        "food": lambda: choose(words.FOODS),
        "sport": lambda: choose(words.SPORTS),
        "job": lambda: choose(words.JOBS),
        "language": lambda: choose(words.LANGUAGES),
        "country": lambda: choose(words.COUNTRIES),
        "currency": lambda: choose(words.CURRENCIES),
        "ticker": lambda: "".join(choose("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(choose((3, 4, 4)))),
        "unit": lambda: choose(words.UNITS),
        "room": lambda: choose(words.ROOM_SET),
        "adjective": lambda: choose(words.ADJECTIVES),
        "foreign": v.foreign,
        "ok": lambda: "ok",
        "month": lambda: choose(words.MONTHS),
        "version": lambda: f"{choose(('v', '', 'v'))}{rng.randrange(10)}.{rng.randrange(30)}.{rng.randrange(20)}",
        "cell": lambda: f"{choose('ABCDEFGHJK')}{rng.randrange(1, 200)}",
        "drname": lambda: f"Dr. {v.pick(v._last) if rng.random() < 0.6 else v.made_up().capitalize()}",
        "scene": lambda: f"a {v.phrase()} {choose(('in', 'on', 'with', 'under'))} a {v.phrase()}",
        "sum": lambda: f"{rng.randrange(2, 999)} {choose('+-*/')} {rng.randrange(2, 999)}",
        "host": lambda: f"{v.label()}.{v.made_up()}.{choose(('com', 'org', 'net', 'io'))}",
        "task": lambda: f"{choose(words.VERBS)} the {v.phrase() if rng.random() < 0.5 else v.noun()}",
        "question": lambda: f"Which {v.noun()} do you {choose(('like', 'want', 'use', 'prefer'))}?",
        "pycode": lambda: choose(
            (
                f"print({rng.randrange(99)} + {rng.randrange(99)})",
                f"len('{v.made_up()}')",
                f"sum(range({rng.randrange(99)}))",
            )
        ),
        "shell": lambda: choose(
            (
                f"ls -l {v.path()}",
                f"rm {v.file()}",
                f"cat {v.file()}",
                f"grep {v.made_up()} {v.file()}",
                "df -h",
                "git status",
            )
        ),
        "sql": lambda: choose(
            (
                f"SELECT * FROM {v.noun()}",
                f"SELECT {v.noun()} FROM {v.noun()}",
                f"DELETE FROM {v.noun()} WHERE id = {v.number(1, 999)}",
            )
        ),
    }
