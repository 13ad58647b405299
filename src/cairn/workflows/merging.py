"""One result of what several nodes say, and where they differ. It depends on the outputs alone, not on who was done
when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from cairn.workflows.paths import same


class FieldConflict(NamedTuple):
    """Two values of one field."""

    field: str
    won: str
    """The node whose value stands, with the number of the item in a fan-out."""
    value: Any
    lost: str
    other: Any
    why: str


class Merged(NamedTuple):
    """The result."""

    values: dict[str, Any]
    sources: dict[str, str]
    """Whose value each field has."""
    conflicts: list[FieldConflict]


def merge(precedence: Sequence[str], outputs: Mapping[str, Any]) -> Merged:
    """The fields of these nodes' outputs. A node that was skipped says nothing."""
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    conflicts = []
    for name in precedence:
        output = outputs.get(name)
        listed = isinstance(output, list)
        for index, one in enumerate(output if isinstance(output, list) else [output]):
            source = f"{name}.{index}" if listed else name
            for field, value in sorted(one.items()) if isinstance(one, Mapping) else ():
                if field not in values:
                    values[field], sources[field] = value, source
                elif not same(values[field], value):
                    why = _why(sources[field], source)
                    conflicts.append(FieldConflict(field, sources[field], values[field], source, value, why))
    return Merged(values, sources, conflicts)


def _why(won: str, lost: str) -> str:
    one, other = won.partition(".")[0], lost.partition(".")[0]
    if one == other:
        return f"an earlier item of {one} stands before a later one"
    return f"{one} stands before {other} in merge.precedence"
