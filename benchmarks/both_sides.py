"""What the two sides of a benchmark share. Standard library only: the other side's interpreter has nothing of Cairn."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

STEP = 512
"""Most tokens of a prompt in one step."""


def tokens_of(count: int, vocab: int, seed: int = 0) -> list[int]:
    """Tokens that differ from each other; never the last of the vocabulary, which ends an answer."""
    return [(7919 * (at + 1) + 104_729 * seed) % (vocab - 1) for at in range(count)]


class Timed:
    """A side's clock: the wall's, or the CPU seconds of this process. With one thread these hardly depend on what else
    the machine does, but for what shares its caches and its memory."""

    def __init__(self) -> None:
        self.now = time.perf_counter

    def clock(self, name: str) -> dict[str, Any]:
        self.now = {"wall": time.perf_counter, "cpu": time.process_time}[name]
        return {}


def peak() -> int:
    """Most bytes that this process held at once."""
    line = next(one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def answer_lines(side: Any, hello: dict[str, Any]) -> None:
    """Say hello; then each line of standard input names a method and its arguments, and what it returns is printed."""
    print(json.dumps(hello), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(getattr(side, asked.pop("do"))(**asked)), flush=True)
