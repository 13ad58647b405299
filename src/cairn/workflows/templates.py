"""Prompts with slots: `{{ plan.steps }}` stands for a value, `{{ fix.code or code.code }}` for the first that is there,
and `{{ fix.code or "" }}` for nothing where it is not.

Anything else is text. Nothing is computed; a value that is no text is put in as JSON. A template is read in one pass,
and what it makes is measured before it is joined.
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
"""Paths, of which the first counts that is there; EMPTY as the last stands for an empty text."""
EMPTY = ""
_MARKS = re.compile(r"(\{\{|\}\})")
_OR = re.compile(r"\bor\b")
_JSON = json.JSONEncoder(ensure_ascii=False, indent=1)


class Absent(Exception):
    """A slot has no value; the text is its path."""


class TooLong(Exception):
    """What a template makes has too many characters; the text says so."""


class Filling(NamedTuple):
    """A template with the value of each slot, not joined yet."""

    parts: list[Any]
    """Texts as they are, and values that are put in as JSON."""

    def size(self, field: str) -> int:
        """Return the characters of the whole text, of which nothing is made. Raise TooLong beyond MAX_FILLED."""
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
        """Return the whole text."""
        return "".join(part if isinstance(part, str) else _JSON.encode(part) for part in self.parts)


def _size(value: Any, most: int) -> int:
    """Return the characters of a value's JSON; of one with more than `most` some number above it."""
    size = 0
    for piece in _JSON.iterencode(value):
        size += len(piece)
        if size > most:
            break
    return size


def slots(template: str, field: str) -> list[Slot]:
    """Return the paths of each slot of a template. Raise InvalidRequest for a bad slot, and for too many."""
    return [part for part in _parts(template, field) if isinstance(part, tuple)]


def filling(template: str, values: Mapping[str, Any]) -> Filling:
    """Look up the values of a template's slots. Raise Absent for one that is not there."""
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
    """Yield texts and slots in their order."""
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
    """Yield what a node reads: alternative paths, and the field that says so."""
    for one in slots(node.prompt, f"{node.id}.prompt"):
        yield one, f"{node.id}.prompt"
    if node.when is not None:
        for path in paths_of(node.when):
            yield (check_path(path, f"{node.id}.when"),), f"{node.id}.when"
    if node.each is not None:
        yield (check_path(node.each.items, f"{node.id}.each.in"),), f"{node.id}.each.in"
    for path in node.takes:
        yield (check_path(path, f"{node.id}.takes"),), f"{node.id}.takes"
