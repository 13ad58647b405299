"""The limits that a helper process sets on itself before it reads what a stranger wrote.

A helper imports this, so it imports little.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys

OPEN_FILES = 64
"""Descriptors that a helper may have open."""


def restrict(memory: int | None = None, seconds: int | None = None) -> None:
    """Set limits for good: no core file (it would hold the text of requests), no file written, few descriptors.

    `memory`: bytes of address space; `seconds`: of processor time, after which the system ends the process.
    """
    for kind, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, seconds),
    ):
        if most is not None:
            _, hard = resource.getrlimit(kind)
            least = most if hard == resource.RLIM_INFINITY else min(most, hard)  # the server may have less itself
            later = least + (kind == resource.RLIMIT_CPU)  # at the first of two the system says so, by SIGXCPU
            resource.setrlimit(kind, (least, later if hard == resource.RLIM_INFINITY else min(later, hard)))


def bound_memory(limit: int) -> None:
    """Set the address space that the process may have, in bytes, until the next call."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def memory_in_use() -> int | None:
    """Return the process's address space in bytes; None where the system does not tell."""
    pages = _statm()
    return None if pages is None else pages[0] * os.sysconf("SC_PAGE_SIZE")


def held_memory() -> int:
    """Return the bytes of memory that are the process's own, after what is free was given back.

    Where the system does not tell: the most that they ever were.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    pages = _statm()
    if pages is None:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most << 10
    return (pages[1] - pages[2]) * os.sysconf("SC_PAGE_SIZE")


def cpu_seconds() -> float:
    """Return the processor time of this process.

    `time.process_time` stands still between two ticks of the system while a timer of processor time runs (Linux), and
    so long a job may take.
    """
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _statm() -> list[int] | None:
    """Return the pages of the address space, those in memory, and those of them that are shared with files."""
    try:
        with open("/proc/self/statm") as file:
            return [int(word) for word in file.read().split()]
    except (OSError, ValueError):
        return None
