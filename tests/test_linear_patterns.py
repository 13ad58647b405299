"""Regular expressions over text of clients, servers and models take time linear in it, whatever it holds.

A search keeps the interpreter's lock: one that is quadratic stops the event loop, and every other request, for seconds.
"""

from __future__ import annotations

import ast
import importlib
import itertools
import pkgutil
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from re import _constants as constants  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

import pytest

import cairn

ROOT = Path(cairn.__file__).parent
ROOMS = ("api", "cluster", "text", "agents", "rag", "teams", "workflows", "types", "frontend", "served_models")
SHORT = 1 << 11
FAST = 2e-3
"""Seconds that a short text may always take: a linear search of it takes a tenth of that on a slow machine."""
MOST_RATIO = 3.0
"""How many times longer a search of four times the text may take for each doubling: 2 is linear, 4 quadratic."""
WHOLE = ("match", "fullmatch")


def used(name: str, source: str) -> set[str]:
    """Return the methods of the pattern of this name that a source calls."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute))
    return {one.attr for one in calls if isinstance(one.value, ast.Name) and one.value.id == name}


def patterns() -> Iterator[tuple[str, re.Pattern[Any], str]]:
    """Yield the compiled patterns of modules, with `search` or `match` for how they are used."""
    for room in ROOMS:
        for found in pkgutil.walk_packages([str(ROOT / room)], f"cairn.{room}."):
            path = ROOT.joinpath(*found.name.split(".")[1:]).with_suffix(".py")
            if not path.exists() or "re.compile" not in (source := path.read_text()):
                continue
            for name, value in vars(importlib.import_module(found.name)).items():
                if isinstance(value, re.Pattern):
                    methods = used(name, source)
                    anchored = bool(methods) and methods <= {*WHOLE, "pattern", "flags"}
                    yield f"{found.name}.{name}", value, "match" if anchored else "search"


def atoms(tree: Any) -> Iterator[str]:
    """Yield characters and texts that parts of a pattern match."""
    text = ""
    for kind, value in tree:
        if kind is constants.LITERAL:
            text += chr(value)
            continue
        if text:
            yield text
            text = ""
        if kind is constants.IN:
            yield member(value)
        elif kind is constants.BRANCH:
            yield from itertools.chain.from_iterable(map(atoms, value[1]))
        elif kind is constants.SUBPATTERN:
            yield from atoms(value[-1])
        elif kind in (constants.MAX_REPEAT, constants.MIN_REPEAT, constants.POSSESSIVE_REPEAT):
            yield from atoms(value[2])
        elif kind in (constants.ASSERT, constants.ASSERT_NOT):
            yield from atoms(value[1])
        elif kind is constants.ATOMIC_GROUP:
            yield from atoms(value)
    if text:
        yield text


def member(items: Any) -> str:
    """Return a character that a class matches, if one is soon found."""
    if items[0][0] is constants.NEGATE:
        return "a"
    for kind, value in items:
        if kind is constants.LITERAL:
            return chr(value)
        if kind is constants.RANGE:
            return chr(value[0])
        if kind is constants.CATEGORY:
            return {"CATEGORY_SPACE": " ", "CATEGORY_DIGIT": "0"}.get(str(value), "a")
    return "a"


def texts(pattern: re.Pattern[Any]) -> Iterator[Callable[[int], str]]:
    """Yield makers of texts that a pattern may read more than once: parts of what it matches, repeated."""
    parts = list(dict.fromkeys([*atoms(parser.parse(_text(pattern), pattern.flags & ~re.UNICODE)), " ", "a"]))[:14]
    whole = "".join(parts)
    for part in parts:
        yield lambda size, part=part: part * (size // len(part)) + "\x01"
        yield lambda size, part=part: whole + part * (size // len(part)) + "\x01"
    for one, other in itertools.permutations(parts, 2):
        yield lambda size, one=one, other=other: one + other * (size // len(other)) + "\x01"
        yield lambda size, one=one, other=other: (one + other) * (size // len(one + other)) + "\x01"


def _text(pattern: re.Pattern[Any]) -> str:
    return pattern.pattern if isinstance(pattern.pattern, str) else pattern.pattern.decode("latin-1")


def seconds(pattern: re.Pattern[Any], how: str, text: str) -> float:
    """Return the shortest of some times that all matches in a text take."""
    given: Any = text if isinstance(pattern.pattern, str) else text.encode("latin-1", "replace")
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        if how == "match":
            pattern.match(given), pattern.fullmatch(given)
        else:
            for _ in pattern.finditer(given):
                pass
        best = min(best, time.perf_counter() - began)
        if best < FAST:
            break
    return best


def slow_text(pattern: re.Pattern[Any], how: str) -> str:
    """Return the beginning of a text that takes a pattern more than linear time; empty if none was found."""
    for make in texts(pattern):
        if seconds(pattern, how, make(SHORT)) < FAST:
            continue
        few, many = seconds(pattern, how, make(SHORT)), seconds(pattern, how, make(4 * SHORT))
        if many > few * MOST_RATIO**2:
            return repr(make(60))
    return ""


def test_every_pattern_is_linear() -> None:
    found = list(patterns())
    assert len(found) > 100
    slow = {f"{name} ({how})": text for name, pattern, how in found if (text := slow_text(pattern, how))}
    assert not slow


@pytest.mark.parametrize(
    "quadratic", [r',?\s*"cache_control"', r"\s+\Z", r"(?:a|\s)*b", r"<think>(.*?)</think>", r"[0-9]*\.[0-9]*x"]
)
def test_a_pattern_that_is_not_is_found(quadratic: str) -> None:
    assert slow_text(re.compile(quadratic, re.DOTALL), "search")
    assert slow_text(re.compile(quadratic.encode(), re.DOTALL), "search")
