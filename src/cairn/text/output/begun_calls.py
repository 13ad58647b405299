"""Calls that are streamed while they are written.

After the mark of a section, the name of an offered tool and the beginning of its arguments, the text is a call whatever
follows. Its arguments are streamed as far as no later character can change them. Broken arguments are streamed as they
were written, so that the client sees what is wrong; if the answer is cut, they stay cut.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Collection, Mapping, Sequence

from cairn.text.output.json_scan import JsonScanner
from cairn.text.tokens.tokenizer import valid_text

OWN_ID = re.compile(r'"([0-9A-Za-z]{9})"')
"""An id that the model writes into its call, as Mistral's models do."""


class BegunCall:
    """The certain part of an incomplete call."""

    def __init__(self, name: str, id: str = "") -> None:
        self.name, self.id = name, id
        self._pieces: list[str] = []

    @property
    def arguments(self) -> str:
        """The arguments so far, as JSON."""
        return "".join(self._pieces)

    def add(self, text: str) -> None:
        """Append to the arguments."""
        self._pieces.append(text)

    def since(self, piece: int) -> tuple[str, int]:
        """Return the arguments from a piece on, and the index of the next piece."""
        return "".join(self._pieces[piece:]), len(self._pieces)


class BegunObject:
    """A call that is one JSON object, streamed from the beginning to the end of its arguments."""

    def __init__(self, scanner: JsonScanner, offered: Collection[str], names: Mapping[str, str] | None = None) -> None:
        """Follow `scanner`; `names` maps the format's member names to "name" and "arguments"."""
        self._scanner, self._offered, self._names = scanner, offered, names or {}
        self._name = self._id = ""
        self._seen = self._sent = self._next = 0
        """Number of members examined; number of characters and of pieces of the arguments that were streamed."""
        self._decided = False
        self.call: BegunCall | None = None
        """The call, once it is certain to be one."""
        self.end: int | None = None
        """Number of characters read up to the end of its arguments; None before."""

    @property
    def place(self) -> int:
        """Number of characters from which the streamed part was read."""
        return self._scanner.certain[1] if self.end is None else self.end

    def look(self) -> None:
        """Stream what the scanner has read since the last time."""
        scanner = self._scanner
        while not self._decided and self._seen < len(scanner.members):
            self._member(*scanner.members[self._seen])
            self._seen += not self._decided
        if not self._decided and scanner.member is not None:
            self._member(scanner.key, "{")
        if self.call is None or self.end is not None:
            return
        if self._seen < len(scanner.members):
            self.call.add(scanner.members[self._seen][1][self._sent :])
            self.end = scanner.ends[self._seen]
        elif scanner.member is not None:
            begin, end = max(self._next, scanner.member), scanner.certain[0]
            if end > begin:
                text = scanner.between(begin, end)
                self.call.add(text)
                self._next, self._sent = end, self._sent + len(text)

    def _member(self, key: str, value: str) -> None:
        """Examine the next member of the object; `value` is its value or the beginning of it."""
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
    """Writer of arguments in tags as a JSON object, while they are read."""

    def __init__(self, call: BegunCall) -> None:
        self._call = call
        self._empty = True
        self._open = ""
        """The argument whose text is incomplete."""

    def text(self, key: str, more: str) -> None:
        """Append to the text of an argument."""
        if self._open != key:
            self._begin(key)
            self._call.add('"')
            self._open = key
        self._call.add(json.dumps(valid_text(more), ensure_ascii=False)[1:-1])

    def value(self, key: str, written: str) -> None:
        """Complete an argument: end its streamed text, or add its value as JSON."""
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
    """Return where the first of `marks` begins in text[at:], and the mark; both include a line break before it.

    Without one, return where the suffix begins that may become a mark, and "".
    """
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
