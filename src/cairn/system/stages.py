"""Durations of the stages of a process's start, for `--verbose`."""

from __future__ import annotations

import os
import time

from cairn.system.interfaces import Clock


def process_age() -> float:
    """Return the seconds since this process began; 0 if the system does not report it."""
    try:
        with open("/proc/self/stat") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0


class Stages:
    """The stages of one process's start, in the order in which they end."""

    def __init__(self, clock: Clock, age: float = 0.0) -> None:
        """Begin the first stage, which has run for `age` seconds already."""
        self._clock = clock
        self._at, self._cpu = clock.now() - age, 0.0
        self._ended: list[tuple[str, float, float]] = []

    def end(self, name: str) -> None:
        """End a stage and begin the next. The first includes all processor time of the process so far."""
        now, cpu = self._clock.now(), time.process_time()
        self._ended.append((name, now - self._at, cpu - self._cpu))
        self._at, self._cpu = now, cpu

    def sentence(self) -> str:
        """Return the seconds of each stage, with its processor time in brackets, as one line."""
        total = sum(cpu for _, _, cpu in self._ended)
        parts = [f"{name} {wall:.2f} ({cpu:.2f})" for name, wall, cpu in self._ended]
        return f"{', '.join(parts)}; {total:.2f} s of processor time in all"
