"""Import circles between modules and between folders, counted by tools/house.py."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "house.py"


@pytest.fixture(scope="module")
def house() -> ModuleType:
    spec = importlib.util.spec_from_file_location("house", TOOL)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_no_module_imports_itself_through_others(house: ModuleType) -> None:
    graph = house.imports(house.modules())
    assert len(graph) > 400
    assert house.circles(graph) == []


def test_no_folder_imports_itself_through_others(house: ModuleType) -> None:
    known = house.modules()
    graph = house.folders(house.imports(known), known)
    assert "cairn.models.gguf" in graph["cairn.models.safetensors"]
    assert house.circles(graph) == []


@pytest.mark.parametrize(
    "written",
    [
        "from cairn.low.leaf import X\n",
        "from cairn.low import leaf\n",
        "import cairn.low.leaf\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from cairn.low.leaf import X\n",
        "def late():\n    from cairn.low.leaf import X\n",
    ],
)
def test_every_form_of_import_closes_a_circle(
    house: ModuleType, written: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "src" / "cairn"
    for folder in (package, package / "low", package / "high"):
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
    (package / "low" / "leaf.py").write_text("from cairn.high.top import Y\n")
    (package / "high" / "top.py").write_text(written)
    monkeypatch.setattr(house, "SOURCE", package)
    known = house.modules()
    graph = house.imports(known)
    assert house.circles(graph) == [["cairn.high.top", "cairn.low.leaf"]]
    assert house.circles(house.folders(graph, known)) == [["cairn.high", "cairn.low"]]


def test_no_folder_has_more_than_24_files(house: ModuleType) -> None:
    folders = {path.parent for path in house.modules().values()}
    crowded = {
        folder.name: count
        for folder in folders
        if (count := sum(path.name != "__init__.py" for path in folder.glob("*.py"))) > 24
    }
    assert crowded == {}
