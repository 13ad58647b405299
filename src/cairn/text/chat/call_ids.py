"""Call ids in the form that a chat template needs, which may differ from the client's ids.

Mistral's templates refuse every id but nine letters and digits; Kimi's take a call's name from the id
`functions.NAME:INDEX`. Each id depends only on the messages up to its call, so a longer conversation renders the same
prefix.
"""

from __future__ import annotations

import hashlib
import re
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal

from cairn.text.output.tool_parser import written_id

CallIds = Literal["any", "nine", "kimi"]
"""The ids a template accepts: any text; nine letters and digits; `functions.NAME:INDEX`."""

SIZE = 9
_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_NINE = re.compile(rf"[0-9A-Za-z]{{{SIZE}}}")
_HEX_END = re.compile(rf"call_[0-9a-f]*([0-9a-f]{{{SIZE}}})")
_KIMI = re.compile(r"functions\.(.{1,256}):([0-9]{1,9})", re.DOTALL)


def with_ids(messages: Sequence[dict[str, Any]], kind: CallIds) -> list[dict[str, Any]]:
    """Return plain messages with ids that the template accepts, the same in a call and its result."""
    if kind == "any":
        return [*messages]
    make = _NineIds().make if kind == "nine" else _KimiIds().make
    pending = _Pending(make)
    return [pending.renamed(message) for message in messages]


class _Pending:
    """New ids of the calls so far, and the last answer's calls that have no result yet."""

    def __init__(self, make: Callable[[str, str], str]) -> None:
        """Take `make`: (tool name, client's id) -> template's id."""
        self._make = make
        self._by_id: dict[str, str] = {}
        """Client's id -> template's id, of the newest call with that id."""
        self._open = _UnansweredCalls()

    def renamed(self, message: dict[str, Any]) -> dict[str, Any]:
        if calls := message.get("tool_calls"):
            self._open = _UnansweredCalls()
            return {**message, "tool_calls": [self._call(call) for call in calls]}
        if message["role"] == "tool":
            return {**message, "tool_call_id": self._result(message)}
        return message

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        name, given = call["function"]["name"], call.get("id", "")
        made = self._make(name, given)
        if given:
            self._by_id[given] = made
        self._open.add(name, given, made)
        return {**call, "id": made}

    def _result(self, message: dict[str, Any]) -> str:
        """Return the template's id of a result.

        It is matched by the client's id, or without one to the next open call of its name. A result without a call gets
        a new id.
        """
        given, name = message.get("tool_call_id"), message.get("name")
        given = given if isinstance(given, str) else ""
        if (opened := self._open.take(given, name)) is not None:
            return opened
        made_id = self._by_id.get(given) if given else None
        if made_id is None:
            made_id = self._make(name if isinstance(name, str) and name else "unknown", given)
            self._by_id[given] = made_id
        return made_id


class _UnansweredCalls:
    """The calls of one message that have no result yet, in their order. Each look-up takes constant time."""

    def __init__(self) -> None:
        self._made: list[str] = []
        """The template's ids of all calls of the message."""
        self._taken: set[int] = set()
        """Indices of the calls that have a result."""
        self._lines: dict[tuple[str, str], deque[int]] = {}
        """("id" or "name", its value) -> indices of such calls; ("any", "") -> all indices."""

    def add(self, name: str, given: str, made: str) -> None:
        """Append a call: its tool, the client's id and the template's id."""
        for key in (("id", given), ("name", name), ("any", "")):
            self._lines.setdefault(key, deque()).append(len(self._made))
        self._made.append(made)

    def take(self, given: str, name: Any) -> str | None:
        """Remove the first call with that client's id and return the template's id; None if there is none.

        Without an id it is the first call of the tool `name`, and without a name the first of all.
        """
        key = ("id", given) if given else ("any", "") if name is None else ("name", name)
        line = self._lines.get(key) if isinstance(key[1], str) else None
        while line:
            index = line.popleft()
            if index not in self._taken:
                self._taken.add(index)
                return self._made[index]
        return None


class _NineIds:
    """Maker of unique ids of nine letters and digits."""

    def __init__(self) -> None:
        self._used: set[str] = set()
        self._times: dict[str, int] = {}
        """Client's id -> number of hashes of it that are used: no hash is computed twice, however often it comes."""

    def make(self, name: str, given: str) -> str:
        own = written_id(given)
        if _NINE.fullmatch(own):
            # The model wrote this id itself, and its answer is replayed as it was sampled.
            self._used.add(own)
            return own
        end = _HEX_END.fullmatch(given)
        made_id = end[1] if end else given
        while not _NINE.fullmatch(made_id) or made_id in self._used:
            times = self._times.get(given, 0)
            made_id = _hashed(f"{given} {times}")
            self._times[given] = times + 1
        self._used.add(made_id)
        return made_id


class _KimiIds:
    """Maker of `functions.NAME:INDEX`; the index counts the calls of the conversation."""

    def __init__(self) -> None:
        self._next = 0

    def make(self, name: str, given: str) -> str:
        kept = _KIMI.fullmatch(given)
        own = kept[2] if kept and kept[1] == name else written_id(given)
        index = int(own) if own.isdecimal() and own.isascii() else self._next
        self._next = index + 1
        return f"functions.{name}:{index}"


def _hashed(text: str) -> str:
    number = int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "little")
    digits = []
    for _ in range(SIZE):
        number, digit = divmod(number, len(_DIGITS))
        digits.append(_DIGITS[digit])
    return "".join(digits)
