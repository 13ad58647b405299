"""The limits that a helper process sets on itself before it reads untrusted input.

A helper imports this, so it imports little.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys

OPEN_FILES = 64
"""Most open file descriptors of a helper."""


def restrict(memory: int | None = None, seconds: int | None = None) -> None:
    """Set limits that cannot be raised again: no core file, no written file, few descriptors.

    `memory`: bytes of address space; `seconds`: processor time, after which the system ends the process.
    """
    for kind, most in (
        (resource.RLIMIT_CORE, 0),  # a core file would hold the text of requests
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
    """Limit the process's address space in bytes. A later call may raise the limit again."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def memory_in_use() -> int | None:
    """Return the process's address space in bytes; None if the system does not report it."""
    pages = _statm()
    return None if pages is None else pages[0] * os.sysconf("SC_PAGE_SIZE")


def held_memory() -> int:
    """Return the process's private memory in bytes, after returning free memory to the system.

    If the system does not report it, return the peak of resident memory instead.
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
    """Return the processor time of this process in seconds.

    Not `time.process_time`: on Linux it only advances with the system's tick while a timer of processor time runs, and
    a job may be shorter than a tick.
    """
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _statm() -> list[int] | None:
    """Return the numbers of /proc/self/statm: pages of the address space, resident pages, shared pages, and more."""
    try:
        with open("/proc/self/statm") as file:
            return [int(word) for word in file.read().split()]
    except (OSError, ValueError):
        return None
