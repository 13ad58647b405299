"""The heart of the server meets the outside world through its seams only."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "cairn"
HEART = ["scheduler.py", "text_queue.py", "plan.py", "round_robin.py", "sequence.py", "waiting.py"]
HEART += ["kv/blocks.py", "kv/prefix.py", "kv/attention_window.py", "kv/cache.py", "kv/sequence_kv.py", "kv/waiters.py"]
HEART += ["kv/snapshots.py"]
OUTSIDE = {"asyncio", "datetime", "io", "os", "pathlib", "random", "secrets", "socket", "subprocess", "sys"}
OUTSIDE |= {"tempfile", "threading", "time", "uuid", "numpy", "torch"}
ALLOWED = {
    "errors",
    "block_size",
    "layer_spec",
    "outputs",
    "request",
    "sampling_params",
    "stats",
    "seams",
    "engine.base",
    "kv.blocks",
    "kv.prefix",
    "kv.attention_window",
    "kv.cache",
}
ALLOWED |= {
    "kv.sequence_kv",
    "kv.snapshots",
    "kv.store",
    "kv.waiters",
    "plan",
    "round_robin",
    "sequence",
    "text_queue",
    "waiting",
}


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


@pytest.mark.parametrize("file", HEART)
def test_time_chance_and_files_come_through_the_seams(file: str) -> None:
    found = imports(SOURCE / file)
    assert not {name.split(".")[0] for name in found} & OUTSIDE
    assert {name.removeprefix("cairn.") for name in found if name.startswith("cairn")} <= ALLOWED


@pytest.mark.parametrize("file", HEART)
def test_python_hash_and_global_state_have_no_part_in_it(file: str) -> None:
    """Known failure 27: `hash()` of strings and bytes differs in every process."""
    tree = ast.parse((SOURCE / file).read_text())
    calls = {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    assert not calls & {"hash", "id", "eval", "exec", "open", "print"}
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Global | ast.Nonlocal)]
