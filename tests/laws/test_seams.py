"""The heart of the server meets the outside world only through its seams."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "cairn"
HEART = [
    "scheduler/scheduler.py",
    "scheduler/encoder_queue.py",
    "scheduler/planned_step.py",
    "scheduler/step_budget.py",
    "scheduler/fairness.py",
    "scheduler/sequence.py",
    "scheduler/queue.py",
    "scheduler/speculation.py",
]
HEART += [
    "kv/pool/blocks.py",
    "kv/pool/prefix.py",
    "kv/pool/cache.py",
    "kv/pool/sequence_kv.py",
    "kv/pool/waiters.py",
]
HEART += ["kv/pool/partial_blocks.py", "kv/pool/seen_blocks.py", "kv/pool/snapshots.py"]
HEART += ["kv/pool/spare_states.py", "scheduler/drafts/drafter.py"]
OUTSIDE = {"asyncio", "datetime", "io", "os", "pathlib", "random", "secrets", "socket", "subprocess", "sys"}
OUTSIDE |= {"tempfile", "threading", "time", "uuid", "numpy", "torch"}
ALLOWED = {
    "types.errors",
    "types.outputs",
    "types.model_spec",
    "types.request",
    "types.stats",
    "system.interfaces",
    "types.step",
    "kv.pool.blocks",
    "kv.pool.prefix",
    "kv.pool.cache",
}
ALLOWED |= {
    "kv.pool",
    "kv.pool.partial_blocks",
    "kv.pool.seen_blocks",
    "kv.pool.sequence_kv",
    "kv.pool.snapshots",
    "kv.pool.spare_states",
    "kv.tiers.store",
    "kv.pool.waiters",
    "scheduler.planned_step",
    "scheduler.step_budget",
    "scheduler.fairness",
    "scheduler.sequence",
    "scheduler.encoder_queue",
    "scheduler.queue",
    "scheduler.drafts.drafter",
    "scheduler.speculation",
}


def imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


@pytest.mark.parametrize("file", HEART)
def test_time_chance_and_files_come_through_the_seams(file: str) -> None:
    names = imports(SOURCE / file)
    assert not {name.split(".")[0] for name in names} & OUTSIDE
    assert {name.removeprefix("cairn.") for name in names if name.startswith("cairn")} <= ALLOWED


@pytest.mark.parametrize("file", HEART)
def test_the_heart_uses_neither_python_hash_nor_global_state(file: str) -> None:
    """`hash()` of strings and bytes differs in every process: keys made of it would not survive a restart.

    Known failure 27.
    """
    tree = ast.parse((SOURCE / file).read_text())
    calls = {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    assert not calls & {"hash", "id", "eval", "exec", "open", "print"}
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Global | ast.Nonlocal)]
