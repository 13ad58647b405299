"""The machine's roofline: most bytes read and operations done in a second, the limits of every kernel.

Measured with the kernels' own instruction set: in C++ for the native kernels, with BLAS for the reference ones. The
caches are faster than memory, so reading is measured over as many bytes as a step reads. Matrices of 4 to 8 bits are
multiplied as integers, and on some CPUs bfloat16 in pairs: both are faster than float32.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from cairn.kernels import native
from cairn.kernels.choose import REFERENCE

READ_BYTES = 256 << 20
"""Far more than a CPU's caches."""
ROUNDS, SECONDS = 5, 0.7
"""At least so many rounds, for at least so many seconds; the best counts, since other load only slows one down."""
PIECE_BYTES, CACHED_BYTES = 1 << 20, 32 << 20
"""Cached reads are measured in steps of a MiB, repeated until so many bytes were read."""
QUICK_BYTES, QUICK_SECONDS = 64 << 20, 0.1
"""Bytes and seconds of a rough measurement."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """The best figures measured, on all threads together."""

    read: float
    """Bytes read from memory in a second."""
    arithmetic: float
    """float32 operations in a second; a multiply-add counts as two."""
    pairs: float = 0.0
    """Operations with pairs of bfloat16 in a second; 0 if no instruction does that."""
    integers: float = 0.0
    """Operations with bytes in a second; 0 if these kernels do not multiply bytes."""
    cached: Callable[[int], float] | None = None
    """Bytes -> bytes read in a second when so many are read repeatedly; None if not measured."""

    def reading(self, size: int) -> float:
        """Return the most bytes in a second for steps that read `size` bytes, from the caches if they fit."""
        if self.cached is None or size >= READ_BYTES:
            return self.read
        return max(self.read, self.cached(size))

    def computing(self, bits: float) -> float:
        """Return the most operations in a second with matrices of `bits` bits for each number, on average."""
        # An average: among 16-bit matrices some may have 32 bits, and 8-bit codes have scales beside them.
        pairs, integers = self.pairs if bits < 24 else 0.0, self.integers if bits < 12 else 0.0
        return max(self.arithmetic, pairs, integers)


def share(reached: float, limit: float) -> float:
    """Return what part of a limit was reached, at most 1: a figure beyond a measured limit is the new limit."""
    return reached / max(reached, limit)


def measure(kernels: str, threads: int, now: Callable[[], float], read_bytes: int = READ_BYTES) -> Roofline:
    """Measure with the instructions of `kernels`, a name from `choose.chosen`; `now` is a clock in seconds."""

    @functools.cache
    def pieces(count: int) -> float:
        numbers = np.ones(count * PIECE_BYTES // 4, np.float32)
        turns = max(1, CACHED_BYTES // numbers.nbytes)
        with _probing(kernels, threads) as probe:
            return _best(lambda: sum(probe.read(numbers) for _ in range(turns)), now, QUICK_SECONDS)

    numbers = np.ones(read_bytes // 4, np.float32)
    with _probing(kernels, threads) as probe:
        pairs = _best(probe.multiply_pairs, now) if isinstance(probe, native.Probe) else 0.0
        integers = _best(probe.multiply_bytes, now) if isinstance(probe, native.Probe) else 0.0
        read, arithmetic = _best(lambda: probe.read(numbers), now), _best(probe.multiply, now)
    return Roofline(read, arithmetic, pairs, integers, lambda size: pieces(max(1, size // PIECE_BYTES)))


@contextlib.contextmanager
def _probing(kernels: str, threads: int) -> Iterator[native.Probe | _Numpy]:
    if kernels != REFERENCE:
        yield native.Probe(kernels, threads)
        return
    from cairn.kernels.blas import one_blas_thread  # imported here: native kernels do not need it

    one_blas_thread.enter()
    try:
        yield _Numpy(threads)
    finally:
        one_blas_thread.leave()


def read_rate(kernels: str, threads: int, now: Callable[[], float]) -> float:
    """Measure the bytes read from memory in a second, roughly: takes a tenth of a second."""
    numbers = np.ones(QUICK_BYTES // 4, np.float32)
    probe: native.Probe | _Numpy = _Numpy(threads) if kernels == REFERENCE else native.Probe(kernels, threads)
    return _best(lambda: probe.read(numbers), now, QUICK_SECONDS)


def _best(work: Callable[[], int], now: Callable[[], float], seconds: float = SECONDS) -> float:
    """Return the best rate of `work` in a second, after one run to wake threads and touch memory."""
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
    """The probe with BLAS, which must be pinned to one thread: each of our threads calls it."""

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
