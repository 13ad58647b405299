"""Paths into values, and conditions over them.

    path        NODE{.FIELD | .NUMBER}          inputs.task   plan.steps.0   previous.fix.code   item

A path only looks up a value; there are no expressions.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from cairn.types.errors import InvalidRequest
from cairn.workflows.definition import MAX_CONDITIONS, MAX_PATH, MAX_VALUES, Condition

MISSING = msgspec.UNSET
"""Result of looking up a path that has no value."""
_PATH = re.compile(r"[A-Za-z][A-Za-z0-9_-]*(?:\.[A-Za-z0-9_-]+)*")
_DIGITS = 9
"""Most digits of an item's index: no list is that long."""
ITEM = "item"
"""Root of the current item in a fan-out; `index` is its number."""
INDEX = "index"
PREVIOUS = "previous"
"""Root of the outputs of a loop's previous iteration."""
INPUTS = "inputs"


def check_path(path: str, field: str) -> str:
    """Return the path. Raise InvalidRequest if it is malformed."""
    if len(path) > MAX_PATH:
        raise InvalidRequest(f"{field}: a path has {len(path)} characters; the limit is {MAX_PATH}", field=field)
    if not _PATH.fullmatch(path):
        raise InvalidRequest(
            f"{field}: {path[:64]!r} is no path; it should look like plan.steps or plan.steps.0", field=field
        )
    return path


def lookup(values: Mapping[str, Any], path: str) -> Any:
    """Return the value at a path; MISSING if there is none."""
    found: Any = values
    for part in path.split("."):
        if isinstance(found, Mapping) and part in found:
            found = found[part]
        elif isinstance(found, list | tuple) and (index := index_of(part)) is not None and index < len(found):
            found = found[index]
        else:
            return MISSING
    return found


def index_of(part: str) -> int | None:
    """Return a path part as an item's index; None if it is not a number."""
    return int(part) if len(part) <= _DIGITS and part.isascii() and part.isdigit() else None


def first(values: Mapping[str, Any], paths: tuple[str, ...]) -> Any:
    """Return the first of these paths' values that exists, else MISSING."""
    return next((found for path in paths if (found := lookup(values, path)) is not MISSING), MISSING)


def paths_of(condition: Condition) -> Iterator[str]:
    """Yield every path that a condition reads."""
    if condition.output:
        yield condition.output
    for several in (condition.every, condition.some):
        for one in several or ():
            yield from paths_of(one)


def check_condition(condition: Condition, field: str) -> None:
    """Raise InvalidRequest unless each condition has exactly one comparison and all limits hold."""
    count, waiting = 0, [condition]
    while waiting:
        one = waiting.pop()
        count += 1
        if count > MAX_CONDITIONS:
            raise InvalidRequest(f"{field} holds more than {MAX_CONDITIONS} conditions, the limit", field=field)
        _check_one(one, field)
        for several in (one.every, one.some):
            waiting += several or ()


def _check_one(condition: Condition, field: str) -> None:
    groups = [one for one in (condition.every, condition.some) if one is not MISSING]
    said = [
        one
        for one in (
            condition.equals,
            condition.differs,
            condition.one_of,
            condition.above,
            condition.below,
            condition.exists,
        )
        if one is not MISSING
    ]
    if len(groups) + len(said) != 1 or bool(condition.output) != bool(said):
        raise InvalidRequest(
            f"{field} must be an `output` with one of is, is_not, in, above, below and exists; or `all` or `any` of "
            "such conditions",
            field=field,
        )
    if condition.one_of is not MISSING and len(condition.one_of or ()) > MAX_VALUES:
        raise InvalidRequest(
            f"{field}.in holds {len(condition.one_of or ())} values; the limit is {MAX_VALUES}", field=f"{field}.in"
        )


def holds(condition: Condition, values: Mapping[str, Any]) -> bool:
    """Return whether a condition holds. A missing value satisfies no comparison."""
    return _holds(condition, values, {})


def _holds(condition: Condition, values: Mapping[str, Any], keys: dict[str, Hashable]) -> bool:
    """Implement `holds`; `keys` has the keys of values by their paths, so that a long value is read once."""
    if condition.every is not MISSING:
        return all(_holds(one, values, keys) for one in condition.every or ())
    if condition.some is not MISSING:
        return any(_holds(one, values, keys) for one in condition.some or ())
    found = lookup(values, condition.output)
    if condition.exists is not MISSING:
        return (found is not MISSING) is condition.exists
    if found is MISSING:
        return False
    wanted = _wanted(condition)
    if wanted is not None:
        if condition.output not in keys:
            keys[condition.output] = key_of(found)
        key = keys[condition.output]
        return any(key == key_of(one) for one in wanted) is (condition.differs is MISSING)
    return _compare(condition, found)


def _wanted(condition: Condition) -> Sequence[Any] | None:
    """Return the values that a condition compares with for equality; None if it compares numbers."""
    if condition.one_of is not MISSING:
        return condition.one_of or ()
    one = condition.equals if condition.equals is not MISSING else condition.differs
    return None if one is MISSING else (one,)


def _compare(condition: Condition, found: Any) -> bool:
    number = isinstance(found, int | float) and not isinstance(found, bool)
    if condition.above is not MISSING:
        return number and found > condition.above
    return number and found < condition.below


_BOOLEANS: Mapping[bool, Hashable] = {False: object(), True: object()}
"""Keys of false and true, which Python holds equal to 0 and 1."""


def same(one: Any, other: Any) -> bool:
    """Return whether two values are the same JSON: 1 is 1.0, and true is not 1."""
    return key_of(one) == key_of(other)


def key_of(value: Any) -> Hashable:
    """Return a hashable key that is equal for equal JSON values only."""
    if isinstance(value, Mapping):
        return frozenset((name, key_of(item)) for name, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(key_of, value))
    return _BOOLEANS[value] if isinstance(value, bool) else value
