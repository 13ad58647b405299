"""What this machine can do at most: bytes read and operations a second, the limits of every kernel.

Measured with the instruction set that computes: in C++ for the native kernels, with BLAS for the reference ones. What
fits into the caches is read faster than memory is, so bytes are read from as much as a step reads. Matrices of 4 to 8
bits are multiplied as integers, and by some CPUs those of bfloat16 in pairs: both are faster than float32.
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
"""The best of so many rounds, and of all that end in so long, counts: whatever else runs can only slow one down."""
PIECE_BYTES, CACHED_BYTES = 1 << 20, 32 << 20
"""What is read from the caches is read in pieces of a MiB, so many times that it takes a moment."""
QUICK_BYTES, QUICK_SECONDS = 64 << 20, 0.1
"""What is enough for a rule of thumb."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """The most that was seen, on all threads together."""

    read: float
    """Bytes from memory in a second."""
    arithmetic: float
    """float32 operations in a second; a multiply-add is two."""
    pairs: float = 0.0
    """Operations with pairs of bfloat16 in a second; 0 where no instruction does that."""
    integers: float = 0.0
    """Operations with bytes in a second; 0 where these kernels multiply none."""
    cached: Callable[[int], float] | None = None
    """Bytes in a second, read again and again from so many; None where nobody can tell."""

    def reading(self, size: int) -> float:
        """Return the most bytes in a second for steps that read so many, from the caches where these hold them."""
        if self.cached is None or size >= READ_BYTES:
            return self.read
        return max(self.read, self.cached(size))

    def computing(self, bits: float) -> float:
        """Return the most operations in a second with matrices that are held in so many bits a number."""
        # On the whole: of 16 bits some matrices may be held in 32, and scales stand beside codes of 8.
        pairs, integers = self.pairs if bits < 24 else 0.0, self.integers if bits < 12 else 0.0
        return max(self.arithmetic, pairs, integers)


def share(reached: float, limit: float) -> float:
    """Return what part of a limit was reached, at most 1: a limit is the most that was seen, so what is beyond it is
    one itself."""
    return reached / max(reached, limit)


def measure(kernels: str, threads: int, now: Callable[[], float], read_bytes: int = READ_BYTES) -> Roofline:
    """Probe with the instructions of `kernels`, a name that `choose.chosen` gave; `now` is a clock in seconds."""

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
    from cairn.kernels.blas import one_blas_thread  # which the native kernels have no use for

    one_blas_thread.enter()
    try:
        yield _Numpy(threads)
    finally:
        one_blas_thread.leave()


def read_rate(kernels: str, threads: int, now: Callable[[], float]) -> float:
    """Bytes read from memory in a second, about: in a tenth of a second, where `measure` takes its time."""
    numbers = np.ones(QUICK_BYTES // 4, np.float32)
    probe: native.Probe | _Numpy = _Numpy(threads) if kernels == REFERENCE else native.Probe(kernels, threads)
    return _best(lambda: probe.read(numbers), now, QUICK_SECONDS)


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
