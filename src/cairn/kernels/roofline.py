"""What this machine can do at most: bytes read and float32 operations a second, the two limits of every kernel.

Measured with the instruction set that computes: in C++ for the native kernels, with BLAS for the reference ones.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cairn.kernels import native
from cairn.kernels.choose import REFERENCE

READ_BYTES = 256 << 20
"""Far more than a CPU's caches."""
ROUNDS, SECONDS = 5, 0.7
"""The best of so many rounds, and of all that end in so long, counts: whatever else runs can only slow one down."""
QUICK_BYTES, QUICK_SECONDS = 64 << 20, 0.1
"""What is enough for a rule of thumb."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """The most that was seen, on all threads together."""

    read: float
    """Bytes from memory in a second."""
    arithmetic: float
    """float32 operations in a second; a multiply-add is two."""


def measure(kernels: str, threads: int, now: Callable[[], float], read_bytes: int = READ_BYTES) -> Roofline:
    """Probe with the instructions of `kernels`, a name that `choose.chosen` gave; `now` is a clock in seconds."""
    numbers = np.ones(read_bytes // 4, np.float32)
    if kernels != REFERENCE:
        return _measured(native.Probe(kernels, threads), numbers, now)
    from cairn.kernels.blas import one_blas_thread  # which the native kernels have no use for

    one_blas_thread.enter()
    try:
        return _measured(_Numpy(threads), numbers, now)
    finally:
        one_blas_thread.leave()


def read_rate(kernels: str, threads: int, now: Callable[[], float]) -> float:
    """Bytes read from memory in a second, about: in a tenth of a second, where `measure` takes its time."""
    numbers = np.ones(QUICK_BYTES // 4, np.float32)
    probe: native.Probe | _Numpy = _Numpy(threads) if kernels == REFERENCE else native.Probe(kernels, threads)
    return _best(lambda: probe.read(numbers), now, QUICK_SECONDS)


def _measured(probe: native.Probe | _Numpy, numbers: NDArray[np.float32], now: Callable[[], float]) -> Roofline:
    return Roofline(_best(lambda: probe.read(numbers), now), _best(probe.multiply, now))


def _best(work: Callable[[], int], now: Callable[[], float], seconds: float = SECONDS) -> float:
    """What `work` does in a second, at best; once more at first, to wake threads and touch memory."""
    work()
    best = 0.0
    rounds, end = 0, now() + seconds
    while rounds < (ROUNDS if seconds == SECONDS else 1) or now() < end:
        start = now()
        done = work()
        best = max(best, done / max(now() - start, 1e-9))
        rounds += 1
    return best


class _Numpy:
    """The probe with BLAS, which must be held to one thread: each of ours works for itself."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._square = np.ones((1024, 1024), np.float32)

    def read(self, numbers: Any) -> int:
        parts = np.array_split(numbers, self._threads)
        with ThreadPoolExecutor(self._threads) as pool:
            list(pool.map(np.dot, parts, parts))
        return int(numbers.nbytes)

    def multiply(self) -> int:
        with ThreadPoolExecutor(self._threads) as pool:
            list(pool.map(np.matmul, [self._square] * self._threads, [self._square] * self._threads))
        return 2 * self._threads * len(self._square) ** 3
