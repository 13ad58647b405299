"""Imports by threads of one process that start together."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from cairn.models.hub.hub import DEMO

STARTS = """
import sys, threading
from cairn.frontend import launch

class Noted(threading.Thread):
    def start(self):
        before.update(sys.modules)
        super().start()

before = set()
launch.threading = type("threading", (), {"Thread": Noted})
from cairn.entrypoints.llm import LLM
with LLM(sys.argv[1], engine=sys.argv[2], threads=1, kv_gb=0.05, context=64) as model:
    model.generate("x", max_tokens=2)
assert before
rooms = ("numpy", "safetensors", "tokenizers", "cairn.engine", "cairn.kernels", "cairn.models", "cairn.text")
print(*sorted(name for name in set(sys.modules) - before if name.startswith(rooms)))
"""


@pytest.mark.parametrize("engine", ["cpu", "fake"])
def test_a_worker_on_a_thread_finds_all_heavy_modules_imported(engine: str) -> None:
    """`cairn generate` on a busy machine once got half-imported numpy, since two threads imported it at once."""
    command = [sys.executable, "-c", STARTS, DEMO, engine]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert set(done.stdout.split()) <= {"cairn.kernels._native"}  # only our own extension module, which imports nothing


CUT = b"(the answer was cut at the token limit: finish_reason length)\n"
"""The whole output: no traceback."""


def test_many_starts_under_load_import_whole_modules(prove: bool) -> None:
    """Five at once, so that each is interrupted at different places."""
    if not prove:
        pytest.skip("fifty starts: for `make prove`")
    ask = ["generate", DEMO, "-p", "hi", "--max-tokens", "1", "--threads", "1", "--kv-gb", "0.05"]
    command = [sys.executable, "-c", f"from cairn.cli import main; main({ask})"]
    for _ in range(10):
        starts = [
            subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            for _ in range(5)
        ]
        assert [start.communicate()[1] for start in starts] == [CUT] * 5
        assert [start.returncode for start in starts] == [0] * 5
