"""Progress messages for an installation by pip: python say_progress.py [--every S] COMMAND ...

Every few seconds it prints what pip is doing. The command's own output is shown only if it fails; if it succeeds, its
warnings are. pip must be verbose.
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
"""Lines of output that are shown of a command that failed."""
PHASES = (
    (re.compile(r"\s*(?:Installing build dependencies|Getting requirements to build)"), "getting the build tools"),
    (re.compile(r"\s*(?:\*\*\* )?Configuring CMake|\s*-- "), "looking at the compiler"),
    (re.compile(r"\s*Downloading (\S+?)(?:-\d[^/\s]*)?(?: \(.*)?$"), r"downloading \1"),
    (re.compile(r"\s*(?:Collecting|Requirement already satisfied:) ([\w.-]+)"), r"finding packages: \1"),
    (re.compile(r"\s*Building (?:editable|wheels?) for"), "building Cairn"),
    (re.compile(r"Installing collected packages"), "installing packages"),
)

_STEP = re.compile(r"\s*\[\d+/(\d+)\] (?:Building|Linking)(.*)")
_VARIANTS = re.compile(r"\s*-- Kernels are compiled for: (\S+)")
WORK = {"kernels_portable": 6, "kernels_": 24}
"""CPU seconds for one of a variant's two files, by a part of its name; for others OTHER."""
OTHER = 2
FILES = 2
"""Files per variant."""


class CompilerWork:
    """The compiler's progress: its files differ by a factor of ten."""

    def __init__(self) -> None:
        self._variants: list[str] = []
        self._done = 0

    def take(self, line: str) -> str | None:
        """Return the progress that a line reports, or None."""
        if match := _VARIANTS.match(line):
            self._variants = match[1].split(";")
        match = _STEP.match(line)
        if match is None:
            return None
        self._done += _work(match[2])
        files = int(match[1]) - FILES * len(self._variants)
        whole = files * OTHER + FILES * sum(_work(f"kernels_{name}") for name in self._variants)
        return f"compiling the kernels, {min(99, 100 * self._done // max(whole, 1))} % of the work"


def _work(name: str) -> int:
    return next((seconds for part, seconds in WORK.items() if part in name), OTHER)


def phase(line: str) -> str | None:
    """Return the phase that a line of pip's output reports, or None."""
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
    compiler = CompilerWork()
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
            doing = compiler.take(line) or phase(line) or doing
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
