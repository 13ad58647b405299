"""Names lead somewhere: one class for each name, and every file that the pages name exists."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "cairn"


def test_no_two_classes_have_one_name() -> None:
    trees = (ast.parse(path.read_text()) for path in SOURCE.rglob("*.py"))
    names = Counter(node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize("page", sorted(path.name for path in (ROOT / "docs").glob("*.md")))
def test_every_file_that_a_page_names_is_there(page: str) -> None:
    folders = ("src", "tests", "benchmarks", "tools")
    files = [path.as_posix() for folder in folders for path in (ROOT / folder).rglob("*.py")]
    text = (ROOT / "docs" / page).read_text()
    named = set(re.findall(r"`([\w/]+\.py)`", text))
    assert [name for name in sorted(named) if not any(file.endswith(f"/{name}") for file in files)] == []
