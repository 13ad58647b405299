"""The masks of a step's rows: all that were asked for by then are computed in one call, in a thread beside the step.

A thread for each would cost more than most masks do: they are a few microseconds each. llguidance spreads one call over
threads of its own, without the interpreter's lock.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

THREADS = 2
"""Of one call."""


class Masked(Protocol):
    """What needs a mask."""

    @property
    def follower(self) -> Any:
        """The `llguidance.LLMatcher` that says what may come."""
        ...

    @property
    def words(self) -> int:
        """Words of 32 tokens that a mask has."""
        ...

    def fit(self, bits: NDArray[np.uint8]) -> bytes:
        """The mask, of what that says, which is overwritten."""
        ...


@dataclass(slots=True, eq=False)
class _Batch:
    asking: list[Masked] = field(default_factory=list)
    masks: Future[list[bytes]] = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class Later:
    """A mask that is computed beside the step: an `engine.base.Pending`."""

    masks: Future[list[bytes]]
    number: int

    def wait(self) -> bytes:
        """The mask."""
        return self.masks.result()[self.number]


class Masks:
    """One thread asks."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="cairn-masks")
        self._lock = threading.Lock()
        self._open: _Batch | None = None
        self._executor: Any = None

    def ask(self, row: Masked) -> Later:
        """Compute a row's mask. What it goes by may not change until that is there."""
        with self._lock:
            batch = self._open
            if batch is None:
                batch = self._open = _Batch()
                self._pool.submit(self._work, batch)
            batch.asking.append(row)
            return Later(batch.masks, len(batch.asking) - 1)

    def close(self) -> None:
        """Nothing more is computed."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _work(self, batch: _Batch) -> None:
        with self._lock:  # who asks from now on is of the next one
            self._open = None
        try:
            batch.masks.set_result(self._computed(batch.asking))
        except BaseException as error:
            batch.masks.set_exception(error)

    def _computed(self, rows: list[Masked]) -> list[bytes]:
        from llguidance import LLExecutor

        if self._executor is None:
            self._executor = LLExecutor(THREADS)
        bits = np.empty((len(rows), max(row.words for row in rows)), np.uint32)
        pairs = [(row.follower, number) for number, row in enumerate(rows)]
        self._executor.unsafe_compute_mask_ptr(pairs, bits.ctypes.data, 4 * bits.shape[1], len(rows))
        return [row.fit(line.view(np.uint8)) for row, line in zip(rows, bits, strict=True)]
