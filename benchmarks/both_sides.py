"""Common parts of both sides of a benchmark.

Standard library only: the other side's interpreter has nothing of Cairn.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

STEP = 512
"""Most prompt tokens in one step."""


def tokens_of(count: int, vocab: int, seed: int = 0) -> list[int]:
    """Return tokens that all differ, without the last of the vocabulary, which ends an answer."""
    return [(7919 * (at + 1) + 104_729 * seed) % (vocab - 1) for at in range(count)]


class Timed:
    """A side's clock: wall time, or CPU seconds of this process.

    With one thread, CPU seconds hardly depend on the machine's other work, except through shared caches and memory.
    """

    def __init__(self) -> None:
        self.now = time.perf_counter

    def clock(self, name: str) -> dict[str, Any]:
        self.now = {"wall": time.perf_counter, "cpu": time.process_time}[name]
        return {}


def peak() -> int:
    """Return the peak memory of this process in bytes."""
    line = next(one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def answer_lines(side: Any, hello: dict[str, Any]) -> None:
    """Print a greeting, then call the method named by each input line and print what it returns."""
    print(json.dumps(hello), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(getattr(side, asked.pop("do"))(**asked)), flush=True)
