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


def names_of(module: Path) -> set[str]:
    """Return the names that a module binds at its top, and its submodules."""
    names: set[str] = {path.stem for path in module.parent.glob("*")} if module.name == "__init__.py" else set()
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


@pytest.mark.parametrize("folder", ["benchmarks", "tools"])
def test_scripts_import_names_that_the_package_has(folder: str) -> None:
    """Most scripts are run by hand, so a name that moved would be missed for long."""
    missing = []
    for script in sorted((ROOT / folder).glob("*.py")):
        for node in ast.walk(ast.parse(script.read_text())):
            if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] != "cairn":
                continue
            place = SOURCE.parent / (node.module or "").replace(".", "/")
            module = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
            names = names_of(module) if module.exists() else set()
            missing += [f"{script.name}: {node.module}.{alias.name}" for alias in node.names if alias.name not in names]
    assert missing == []
