"""Ids of calls as a chat template takes them, which need not be the ids that the client sees.

Mistral's templates refuse every id but one of nine letters and digits, Kimi's write `functions.NAME:INDEX` and nothing
else of a call's name. Each id is made from the messages up to its call alone, so a longer conversation renders the same
beginning.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

from cairn.text.output.tool_parser import written_id

CallIds = Literal["any", "nine", "kimi"]
"""The ids a template takes: any text; nine letters and digits; `functions.NAME:INDEX`."""

SIZE = 9
_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_NINE = re.compile(rf"[0-9A-Za-z]{{{SIZE}}}")
_HEX_END = re.compile(rf"call_[0-9a-f]*([0-9a-f]{{{SIZE}}})")
_KIMI = re.compile(r"functions\.(.{1,256}):([0-9]{1,9})", re.DOTALL)


def with_ids(messages: Sequence[dict[str, Any]], kind: CallIds) -> list[dict[str, Any]]:
    """Return plain messages whose calls and results have ids that the template takes, the same in both."""
    if kind == "any":
        return [*messages]
    make = _NineIds().make if kind == "nine" else _KimiIds().make
    pending = _Pending(make)
    return [pending.renamed(message) for message in messages]


class _Pending:
    """The new ids of the calls so far, and which of the last answer's calls have no result yet."""

    def __init__(self, make: Callable[[str, str], str]) -> None:
        """Take `make`: (name of a tool, the client's id) -> the id that the template is given."""
        self._make = make
        self._by_id: dict[str, str] = {}
        """The client's id -> the template's, of the newest call that has it."""
        self._open: list[tuple[str, str, str]] = []
        """(name, the client's id, the template's id) of calls whose result has not come."""

    def renamed(self, message: dict[str, Any]) -> dict[str, Any]:
        if calls := message.get("tool_calls"):
            self._open = []
            return {**message, "tool_calls": [self._call(call) for call in calls]}
        if message["role"] == "tool":
            return {**message, "tool_call_id": self._result(message)}
        return message

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        name, given = call["function"]["name"], call.get("id", "")
        made = self._make(name, given)
        if given:
            self._by_id[given] = made
        self._open.append((name, given, made))
        return {**call, "id": made}

    def _result(self, message: dict[str, Any]) -> str:
        """Return the id of a result: by the client's id, else that of the next call of its name without a result, else
        a new one, for a call that is not in the conversation."""
        given, name = message.get("tool_call_id"), message.get("name")
        given = given if isinstance(given, str) else ""
        for called, id, made in self._open:
            if id == given if given else name in (None, called):
                self._open.remove((called, id, made))
                return made
        found = self._by_id.get(given) if given else None
        if found is None:
            found = self._make(name if isinstance(name, str) and name else "unknown", given)
            self._by_id[given] = found
        return found


class _NineIds:
    """Makes ids of nine letters and digits, each once."""

    def __init__(self) -> None:
        self._used: set[str] = set()

    def make(self, name: str, given: str) -> str:
        own = written_id(given)
        if _NINE.fullmatch(own):
            # The model wrote it into its answer, which stands in the prompt as it was sampled.
            self._used.add(own)
            return own
        end = _HEX_END.fullmatch(given)
        found = end[1] if end else given
        times = 0
        while not _NINE.fullmatch(found) or found in self._used:
            found = _hashed(f"{given} {times}")
            times += 1
        self._used.add(found)
        return found


class _KimiIds:
    """Makes `functions.NAME:INDEX`, where the index counts the calls of the conversation."""

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
