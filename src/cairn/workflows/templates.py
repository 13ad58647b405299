"""Prompt templates: `{{ plan.steps }}` is a slot for a value.

`{{ fix.code or code.code }}` is the first value that exists, and `{{ fix.code or "" }}` nothing if it does not exist.
Everything else is text; there are no expressions. Values that are not text are inserted as JSON. A template is read in
one pass, and its result measured before it is joined.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from cairn.types.errors import InvalidRequest
from cairn.workflows.definition import MAX_ALTERNATIVES, MAX_FILLED, MAX_SLOTS, Node
from cairn.workflows.paths import MISSING, check_path, first, paths_of

Slot = tuple[str, ...]
"""Alternative paths; the first that has a value is used. EMPTY as the last stands for an empty text."""
EMPTY = ""
_MARKS = re.compile(r"(\{\{|\}\})")
_OR = re.compile(r"\bor\b")
_JSON = json.JSONEncoder(ensure_ascii=False, indent=1)


class Absent(Exception):
    """A slot has no value; the message is its path."""


class TooLong(Exception):
    """A filled template exceeds MAX_FILLED characters; the message says so."""


class Filling(NamedTuple):
    """A template's texts and slot values, not yet joined."""

    parts: list[Any]
    """Texts, and values to insert as JSON."""

    def size(self, field: str) -> int:
        """Return the length of the joined text without building it. Raise TooLong beyond MAX_FILLED."""
        measured: dict[int, int] = {}
        size = 0
        for part in self.parts:
            if id(part) not in measured:
                measured[id(part)] = len(part) if isinstance(part, str) else _size(part, MAX_FILLED)
            size += measured[id(part)]
            if size > MAX_FILLED:
                raise TooLong(f"{field} has more than {MAX_FILLED} characters once it is filled, the limit")
        return size

    def text(self) -> str:
        """Return the joined text."""
        return "".join(part if isinstance(part, str) else _JSON.encode(part) for part in self.parts)


def _size(value: Any, most: int) -> int:
    """Return the length of a value's JSON; some number above `most` if it exceeds that."""
    size = 0
    for piece in _JSON.iterencode(value):
        size += len(piece)
        if size > most:
            break
    return size


def slots(template: str, field: str) -> list[Slot]:
    """Return the slots of a template. Raise InvalidRequest for a malformed slot or more than MAX_SLOTS."""
    return [part for part in _parts(template, field) if isinstance(part, tuple)]


def filling(template: str, values: Mapping[str, Any]) -> Filling:
    """Look up the values of a template's slots. Raise Absent for a slot without a value."""
    parts: list[Any] = []
    for part in _parts(template, "prompt"):
        if isinstance(part, str):
            parts.append(part)
            continue
        value = first(values, part)
        if value is MISSING and part[-1] == EMPTY:
            continue
        if value is MISSING:
            raise Absent(part[0])
        parts.append(value)
    return Filling(parts)


def _parts(template: str, field: str) -> Iterator[str | Slot]:
    """Yield texts and slots in order."""
    count = template.count("{{")
    if count > MAX_SLOTS:
        raise InvalidRequest(f"{field} has {count} slots; the limit is {MAX_SLOTS}", field=field)
    inside = False
    for place, piece in enumerate(_MARKS.split(template)):
        if place % 2 == 0:
            yield _slot(piece, field) if inside else piece
        elif (piece == "{{") is inside:
            break
        else:
            inside = not inside
    else:
        if not inside:
            return
    raise InvalidRequest(f"{field} has a {{{{ or }}}} without its other half", field=field)


def _slot(text: str, field: str) -> Slot:
    paths = tuple(part.strip() for part in _OR.split(text, MAX_ALTERNATIVES))
    if len(paths) > MAX_ALTERNATIVES:
        raise InvalidRequest(f"{field}: a slot has more than {MAX_ALTERNATIVES} paths, the limit", field=field)
    empty = len(paths) > 1 and paths[-1] in ('""', "''")
    named = paths[:-1] if empty else paths
    return (*(check_path(path, field) for path in named), *([EMPTY] if empty else []))


def read(node: Node) -> Iterator[tuple[Slot, str]]:
    """Yield the paths that a node reads, each with the field that names them."""
    for one in slots(node.prompt, f"{node.id}.prompt"):
        yield one, f"{node.id}.prompt"
    if node.when is not None:
        for path in paths_of(node.when):
            yield (check_path(path, f"{node.id}.when"),), f"{node.id}.when"
    if node.each is not None:
        yield (check_path(node.each.items, f"{node.id}.each.in"),), f"{node.id}.each.in"
    for path in node.takes:
        yield (check_path(path, f"{node.id}.takes"),), f"{node.id}.takes"
