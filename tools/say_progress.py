"""Run an installation by pip and say every few seconds what it is doing: python say_progress.py [--every S] COMMAND ...

The command's own output is shown only where it fails; of one that succeeds its warnings. pip must be verbose.
"""

from __future__ import annotations

import queue
import re
import subprocess
import sys
import threading
import time
from collections import deque

EVERY = 5.0
"""Seconds between two lines."""
TAIL = 60
"""Lines that are shown of a command that failed."""
PHASES = (
    (re.compile(r"\s*\[(\d+)/(\d+)\] (?:Building|Linking)"), r"compiling the kernels, \1 of \2 files"),
    (re.compile(r"\s*(?:Installing build dependencies|Getting requirements to build)"), "getting the build tools"),
    (re.compile(r"\s*(?:\*\*\* )?Configuring CMake|\s*-- "), "looking at the compiler"),
    (re.compile(r"\s*Downloading (\S+?)(?:-\d[^/\s]*)?(?: \(.*)?$"), r"downloading \1"),
    (re.compile(r"\s*(?:Collecting|Requirement already satisfied:) ([\w.-]+)"), r"finding packages: \1"),
    (re.compile(r"\s*Building (?:editable|wheels?) for"), "building Cairn"),
    (re.compile(r"Installing collected packages"), "installing packages"),
)


def phase(line: str) -> str | None:
    """What a line of pip's output says is being done; None where it says nothing of that."""
    for pattern, words in PHASES:
        if match := pattern.match(line):
            return match.expand(words)
    return None


def main(arguments: list[str]) -> int:
    every = EVERY
    if arguments[:1] == ["--every"]:
        every, arguments = float(arguments[1]), arguments[2:]
    began = said = time.monotonic()
    process = subprocess.Popen(
        arguments,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_read, args=(process, lines), daemon=True).start()
    tail: deque[str] = deque(maxlen=TAIL)
    warnings: list[str] = []
    doing = "starting pip"
    over = False
    while not over:
        try:
            line = lines.get(timeout=max(0.0, said + every - time.monotonic()) + 0.01)
        except queue.Empty:
            pass
        else:
            if over := line is None:
                continue
            tail.append(line)
            if line.startswith(("WARNING:", "DEPRECATION:")):
                warnings.append(line)
            doing = phase(line) or doing
        if time.monotonic() - said >= every:
            said = time.monotonic()
            print(f"  {said - began:3.0f} s: {doing}", flush=True)
    code = process.wait()
    sys.stderr.write("".join(tail if code else warnings))
    return code if code >= 0 else 1


def _read(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put(None)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
