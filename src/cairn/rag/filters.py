"""OpenAI's attribute filters over documents: comparisons joined by `and` and `or`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cairn.rag.definition import Attribute
from cairn.types.errors import InvalidRequest

Filter = Callable[[Mapping[str, Attribute]], bool]

MAX_COMPARISONS = 64
MAX_LISTED = 256
"""Values of one `in` or `nin` comparison."""
_DEEPEST = 8


def filter_of(given: Any, field: str = "filters") -> Filter:
    """Compile a filter to a predicate over a document's attributes. Raise InvalidRequest if it is not valid."""
    return _FilterReader().read(given, field, 1)


class _FilterReader:
    """Compiles one filter and counts its comparisons."""

    def __init__(self) -> None:
        self._count = 0

    def read(self, given: Any, field: str, depth: int) -> Filter:
        """Compile a filter or a part of one, at this depth of nesting."""
        if not isinstance(given, dict):
            raise InvalidRequest(f"{field} must be an object", field=field)
        if depth > _DEEPEST:
            raise InvalidRequest(f"{field} nests deeper than {_DEEPEST} filters, the limit", field=field)
        kind = given.get("type")
        if kind in ("and", "or"):
            return self._joined(given, field, depth, all if kind == "and" else any)
        self._count += 1
        if self._count > MAX_COMPARISONS:
            raise InvalidRequest(f"{field} holds more than {MAX_COMPARISONS} comparisons, the limit", field=field)
        return _comparison(given, field)

    def _joined(self, given: Mapping[str, Any], field: str, depth: int, join: Callable[[Any], bool]) -> Filter:
        parts = given.get("filters")
        if not isinstance(parts, list) or not parts or len(parts) > MAX_COMPARISONS:
            raise InvalidRequest(f"{field}.filters must be a list of 1 to {MAX_COMPARISONS}", field=f"{field}.filters")
        read = [self.read(one, f"{field}.filters[{at}]", depth + 1) for at, one in enumerate(parts)]
        return lambda noted: join(one(noted) for one in read)


def _comparison(given: Mapping[str, Any], field: str) -> Filter:
    kind, key, value = given.get("type"), given.get("key"), given.get("value")
    if not isinstance(key, str):
        raise InvalidRequest(f"{field}.key must be a text", field=f"{field}.key")
    if kind in ("in", "nin"):
        if not isinstance(value, list) or len(value) > MAX_LISTED or not all(map(_is_value, value)):
            raise InvalidRequest(f"{field}.value must be a list of at most {MAX_LISTED} values", field=f"{field}.value")
        listed = frozenset((isinstance(one, bool), one) for one in value)
        return lambda noted: (key in noted and (isinstance(noted[key], bool), noted[key]) in listed) == (kind == "in")
    if not _is_value(value):
        raise InvalidRequest(f"{field}.value must be a text, a number, true or false", field=f"{field}.value")
    if kind in ("eq", "ne"):
        return lambda noted: (key in noted and _same(noted[key], value)) == (kind == "eq")
    if not isinstance(kind, str) or kind not in _ORDERS:
        kinds = "eq, ne, gt, gte, lt, lte, in, nin, and, or"
        raise InvalidRequest(f"{field}.type must be one of {kinds}", field=f"{field}.type")
    if not _is_number(value):
        raise InvalidRequest(f"{field}.value must be a number: {kind} compares numbers", field=f"{field}.value")
    fits = _ORDERS[kind]
    return lambda noted: _is_number(noted.get(key)) and fits(noted[key], value)


_ORDERS: Mapping[str, Callable[[Any, Any], bool]] = {
    "gt": lambda one, other: one > other,
    "gte": lambda one, other: one >= other,
    "lt": lambda one, other: one < other,
    "lte": lambda one, other: one <= other,
}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_value(value: object) -> bool:
    return isinstance(value, str | bool) or _is_number(value)


def _same(one: object, other: object) -> bool:
    """Return whether two values are equal; true is not 1."""
    return isinstance(one, bool) == isinstance(other, bool) and one == other
