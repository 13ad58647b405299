"""The masks of a step: all that were asked for by then are computed one after another, in a thread beside the step.

Most take a few microseconds, less than handing them to threads of their own costs, and the step has the other cores.
llguidance computes without the interpreter's lock.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol


class Masked(Protocol):
    """What needs a mask."""

    def compute(self) -> bytes:
        """The mask of what may come now. Called by a thread."""
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
            batch.masks.set_result([row.compute() for row in batch.asking])
        except BaseException as error:
            batch.masks.set_exception(error)
