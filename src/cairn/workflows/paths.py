"""Values by their path, conditions over them, and prompts with such values in them.

    path        NODE{.FIELD | .NUMBER}          inputs.task   plan.steps.0   previous.fix.code   item
    template    {{ PATH {or PATH} }}            anything else is text

Nothing is computed: a path only looks up, and a template only puts in. A value that is no text is put in as JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from cairn.types.errors import InvalidRequest
from cairn.workflows.definition import Condition, Node

MISSING = msgspec.UNSET
"""What stands where there is nothing."""
_SLOT = re.compile(r"\{\{(.*?)\}\}", re.DOTALL)
_PATH = re.compile(r"[A-Za-z][A-Za-z0-9_-]*(?:\.[A-Za-z0-9_-]+)*")
ITEM = "item"
"""In a fan-out the item, and `index` its number."""
INDEX = "index"
PREVIOUS = "previous"
"""In a loop the outputs of its run before."""
INPUTS = "inputs"


def check_path(path: str, field: str) -> str:
    """The path. InvalidRequest for what is none."""
    if not _PATH.fullmatch(path):
        raise InvalidRequest(
            f"{field}: {path[:64]!r} is no path; it should look like plan.steps or plan.steps.0", field=field
        )
    return path


def slots(template: str, field: str) -> list[tuple[str, ...]]:
    """The paths of each slot of a template. InvalidRequest for a slot that holds none."""
    found = []
    for match in _SLOT.finditer(template):
        parts = [part.strip() for part in re.split(r"\bor\b", match[1])]
        found.append(tuple(check_path(part, field) for part in parts))
    rest = _SLOT.sub("", template)
    if "{{" in rest or "}}" in rest:
        raise InvalidRequest(f"{field} has a {{{{ or }}}} without its other half", field=field)
    return found


def lookup(values: Mapping[str, Any], path: str) -> Any:
    """The value of a path; MISSING where there is none."""
    found: Any = values
    for part in path.split("."):
        if isinstance(found, Mapping) and part in found:
            found = found[part]
        elif isinstance(found, list | tuple) and part.isascii() and part.isdigit() and int(part) < len(found):
            found = found[int(part)]
        else:
            return MISSING
    return found


def first(values: Mapping[str, Any], paths: tuple[str, ...]) -> Any:
    """The first of these values that is there."""
    return next((found for path in paths if (found := lookup(values, path)) is not MISSING), MISSING)


def fill(template: str, values: Mapping[str, Any]) -> str:
    """A template with its values. KeyError with the path of one that is not there."""

    def put(match: re.Match[str]) -> str:
        paths = tuple(part.strip() for part in re.split(r"\bor\b", match[1]))
        found = first(values, paths)
        if found is MISSING:
            raise KeyError(paths[0])
        return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False, indent=1)

    return _SLOT.sub(put, template)


def paths_of(condition: Condition) -> Iterator[str]:
    """Every path that a condition looks at."""
    if condition.output:
        yield condition.output
    for several in (condition.every, condition.some):
        for one in several or ():
            yield from paths_of(one)


def read(node: Node) -> Iterator[tuple[tuple[str, ...], str]]:
    """What a node reads: alternative paths, and the field that says so."""
    for one in slots(node.prompt, f"{node.id}.prompt"):
        yield one, f"{node.id}.prompt"
    if node.when is not None:
        for path in paths_of(node.when):
            yield (check_path(path, f"{node.id}.when"),), f"{node.id}.when"
    if node.each is not None:
        yield (check_path(node.each.items, f"{node.id}.each.in"),), f"{node.id}.each.in"
    for path in node.takes:
        yield (check_path(path, f"{node.id}.takes"),), f"{node.id}.takes"


def check_condition(condition: Condition, field: str) -> None:
    """InvalidRequest unless it says exactly one thing."""
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
    for several in groups:
        for one in several or ():
            check_condition(one, field)


def holds(condition: Condition, values: Mapping[str, Any]) -> bool:
    """Whether a condition holds. What is not there is equal to nothing."""
    if condition.every is not MISSING:
        return all(holds(one, values) for one in condition.every or ())
    if condition.some is not MISSING:
        return any(holds(one, values) for one in condition.some or ())
    found = lookup(values, condition.output)
    if condition.exists is not MISSING:
        return (found is not MISSING) is condition.exists
    return found is not MISSING and _compare(condition, found)


def _compare(condition: Condition, found: Any) -> bool:
    if condition.equals is not MISSING:
        return same(found, condition.equals)
    if condition.differs is not MISSING:
        return not same(found, condition.differs)
    if condition.one_of is not MISSING:
        return any(same(found, one) for one in condition.one_of)  # type: ignore[union-attr]
    number = isinstance(found, int | float) and not isinstance(found, bool)
    if condition.above is not MISSING:
        return number and found > condition.above
    return number and found < condition.below


def same(one: Any, other: Any) -> bool:
    """Whether two values are the same JSON: 1 is 1.0, and true is not 1."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(same(*pair) for pair in zip(one, other, strict=True))
    return isinstance(one, bool) is isinstance(other, bool) and bool(one == other)
