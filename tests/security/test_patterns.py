r"""Cairn's own regular expressions: `\Z` marks the end, as `$` also matches before a final line break."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from re import _constants, _parser  # type: ignore[attr-defined]

import pytest
from pydantic import TypeAdapter, ValidationError

import cairn
from cairn.api.chat.message_schemas import FunctionTool
from cairn.teams.definition import NAME, TEAM_ID

SOURCE = Path(cairn.__file__).parent
CALLS = frozenset({"compile", "match", "search", "fullmatch", "sub", "subn", "split", "findall", "finditer"})


def patterns(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and text of each pattern given to `re` and msgspec; interpolated values count as one letter."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
        argument: ast.expr | None = None
        if owner == "re" and node.func.attr in CALLS and node.args:
            argument = node.args[0]
        elif owner == "msgspec" and node.func.attr == "Meta":
            argument = next((keyword.value for keyword in node.keywords if keyword.arg == "pattern"), None)
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str | bytes):
            text = argument.value
            yield node.lineno, text if isinstance(text, str) else text.decode("latin-1")
        elif isinstance(argument, ast.JoinedStr):
            parts = [value.value if isinstance(value, ast.Constant) else "x" for value in argument.values]
            yield node.lineno, "".join(map(str, parts))


def ends_loosely(pattern: str) -> bool:
    """Return whether a pattern has a `$` that means the end."""

    def holds(value: object) -> bool:
        if value == (_constants.AT, _constants.AT_END):
            return True
        return isinstance(value, list | tuple | _parser.SubPattern) and any(map(holds, value))

    return holds(_parser.parse(pattern))


def test_no_pattern_of_ours_ends_before_a_line_break() -> None:
    loose, seen = [], 0
    for path in sorted(SOURCE.rglob("*.py")):
        for line, pattern in patterns(ast.parse(path.read_text())):
            seen += 1
            if ends_loosely(pattern):
                loose.append(f"{path.relative_to(SOURCE)}:{line}: {pattern}")
    assert not loose
    assert seen > 100


@pytest.mark.parametrize("pattern", ["a$", "(?:^|x)(a|b$)", "[a]$|b", "(?=/|$)", "(a(?:$)){2}"])
def test_a_dollar_that_means_the_end_is_found(pattern: str) -> None:
    assert ends_loosely(pattern) and re.compile(pattern)


@pytest.mark.parametrize("pattern", [r"a\Z", r"[$]", r"\$", "a"])
def test_a_pattern_without_one_passes(pattern: str) -> None:
    assert not ends_loosely(pattern)


def test_names_of_tools_teams_and_members_end_with_their_last_letter() -> None:
    """A tool's name is matched by another library, in which `$` matches at the end of the text only."""
    adapter = TypeAdapter(FunctionTool)
    assert adapter.validate_python({"name": "a"}).name == "a"
    for name in ("a\n", "a\r\n", "\na", "a\n\n"):
        with pytest.raises(ValidationError):
            adapter.validate_python({"name": name})
        assert not TEAM_ID.fullmatch(name) and not NAME.fullmatch(name)
