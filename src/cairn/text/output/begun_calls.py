"""Calls that are passed on while they are written.

Behind the mark of a section, the name of an offered tool and the beginning of its arguments stands a call, whatever
follows. Its arguments are passed on as far as no later character can change them. If they turn out to be broken, they
end as they were written, so that who gets the call sees what is wrong with it; if the answer is cut, they stay cut.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Collection, Mapping, Sequence

from cairn.text.output.json_scan import JsonScanner
from cairn.text.tokens.tokenizer import valid_text

OWN_ID = re.compile(r'"([0-9A-Za-z]{9})"')
"""The id that a model writes into its call, as Mistral's do."""


class BegunCall:
    """What is certain of a call that is being written."""

    def __init__(self, name: str, id: str = "") -> None:
        self.name, self.id = name, id
        self._pieces: list[str] = []

    @property
    def arguments(self) -> str:
        """The beginning of the arguments, as JSON."""
        return "".join(self._pieces)

    def add(self, text: str) -> None:
        """Add to the arguments."""
        self._pieces.append(text)

    def since(self, piece: int) -> tuple[str, int]:
        """Return the arguments from a piece on, and the number of the next one."""
        return "".join(self._pieces[piece:]), len(self._pieces)


class BegunObject:
    """Follows a call that is one JSON object, from its beginning to the end of its arguments."""

    def __init__(self, scanner: JsonScanner, offered: Collection[str], names: Mapping[str, str] | None = None) -> None:
        """`names`: what the form calls "name" and "arguments"."""
        self._scanner, self._offered, self._names = scanner, offered, names or {}
        self._name = self._id = ""
        self._seen = self._told = self._next = 0
        """Members that were looked at; characters and pieces of the arguments that were passed on."""
        self._decided = False
        self.call: BegunCall | None = None
        """The call, once it is certain to be one."""
        self.end: int | None = None
        """How many characters were read up to the end of its arguments."""

    @property
    def place(self) -> int:
        """How many characters were read of what was passed on."""
        return self._scanner.certain[1] if self.end is None else self.end

    def look(self) -> None:
        """Pass on what was read since the last time."""
        scanner = self._scanner
        while not self._decided and self._seen < len(scanner.members):
            self._member(*scanner.members[self._seen])
            self._seen += not self._decided
        if not self._decided and scanner.member is not None:
            self._member(scanner.key, "{")
        if self.call is None or self.end is not None:
            return
        if self._seen < len(scanner.members):
            self.call.add(scanner.members[self._seen][1][self._told :])
            self.end = scanner.ends[self._seen]
        elif scanner.member is not None:
            begin, end = max(self._next, scanner.member), scanner.certain[0]
            if end > begin:
                text = scanner.between(begin, end)
                self.call.add(text)
                self._next, self._told = end, self._told + len(text)

    def _member(self, key: str, value: str) -> None:
        """Look at the next member of the object: its value, or the beginning of it."""
        key = self._names.get(key, key)
        if key in ("name", "tool_name"):
            name = json.loads(value) if value.startswith('"') and not self._name else None
            self._name = valid_text(name) if isinstance(name, str) else ""
            self._decided = self._name not in self._offered
        elif key in ("arguments", "parameters"):
            self._decided = True
            if self._name and value.startswith("{"):
                self.call = BegunCall(self._name, self._id)
        elif key == "function":
            self._decided = True
        elif key == "id" and (own := OWN_ID.fullmatch(value)):
            self._id = own[1]


class TaggedArguments:
    """Writes arguments that stand in tags as a JSON object, as far as they are read."""

    def __init__(self, call: BegunCall) -> None:
        self._call = call
        self._empty = True
        self._open = ""
        """The argument of which a text has begun."""

    def text(self, key: str, more: str) -> None:
        """Add to the text that an argument is."""
        if self._open != key:
            self._begin(key)
            self._call.add('"')
            self._open = key
        self._call.add(json.dumps(valid_text(more), ensure_ascii=False)[1:-1])

    def value(self, key: str, written: str) -> None:
        """Add a whole argument, whose text was begun or which is JSON."""
        if self._open == key:
            self._call.add('"')
        else:
            self._begin(key)
            self._call.add(written)
        self._open = ""

    def end(self) -> None:
        """Close the object."""
        self._call.add("{}" if self._empty else "}")

    def _begin(self, key: str) -> None:
        self._call.add(f"{'{' if self._empty else ', '}{json.dumps(key, ensure_ascii=False)}: ")
        self._empty = False


def up_to(text: str, at: int, marks: Sequence[str]) -> tuple[int, str]:
    """Return where the first of some marks begins behind text[at], with the line break before it, and that mark; or
    where the end of the text begins that may become one, and ""."""
    found = _any_of(tuple(marks)).search(text, at) if marks else None
    if found is not None:
        return found.start(), found.group()
    first = max(at, len(text) - max(map(len, marks), default=0))
    for place in range(first, len(text)):
        rest = text[place:].removeprefix("\n")
        if any(mark.startswith(rest) for mark in marks):
            return place, ""
    return len(text), ""


@functools.lru_cache(maxsize=64)
def _any_of(marks: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("\n?(?:" + "|".join(map(re.escape, marks)) + ")")
