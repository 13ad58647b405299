"""The thread that writes chunks to the stores, in order with other jobs on them."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

from cairn.kv.tiers.store import Chunk, Store, spared
from cairn.system.interfaces import Clock
from cairn.types.errors import trace

log = logging.getLogger(__name__)

TEND_SECONDS = 1.0
BATCH_BYTES = 32 << 20
"""Bytes of pages given to the stores at once: made durable together, they wait for the disk once."""


class StoreWriter:
    """A queue of chunks and other jobs on the stores, done in order by one thread."""

    def __init__(
        self,
        stores: Sequence[Store],
        clock: Clock,
        wake: Callable[[], None],
        tend: Callable[[], None],
        durable: Store | None = None,
    ) -> None:
        """Prepare the queue. `durable`: the store whose chunks count as stored; default: the last one.

        The thread calls `wake` whenever something is finished, and `tend` about once in `TEND_SECONDS`.
        """
        self._durable = durable
        self._tend = tend
        self._clock = clock
        self._stores = tuple(stores)
        self._wake = wake
        self._changed = threading.Condition()
        self._jobs: deque[Chunk | Callable[[], None]] = deque()
        self._closing = False
        self._thread: threading.Thread | None = None
        self.finished: deque[tuple[bytes, bool]] = deque()
        """Keys of chunks, and whether the durable store has them now."""

    def push(self, job: Chunk | Callable[[], None]) -> None:
        """Queue a chunk, parents before children, or a job to run after what was queued before."""
        with self._changed:
            self._jobs.append(job)
            self._changed.notify()

    def drop(self, keys: Sequence[bytes]) -> None:
        """Drop chunks, and those that extend them, from all stores. To be run as a job."""
        for store in self._stores:
            store.drop(keys)

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="cairn-kv-write", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait until something is finished; return False after `seconds`, or if there is no thread."""
        with self._changed:
            return self._thread is not None and self._changed.wait_for(lambda: bool(self.finished), max(0.0, seconds))

    def close(self, grace: float) -> bool:
        """Write what is queued for up to `grace` seconds, then stop; return False if the thread still hangs."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is None:
            return True
        self._thread.join(grace)
        with self._changed:
            self._jobs.clear()
        self._thread.join(1.0)
        return not self._thread.is_alive()

    def work(self) -> bool:
        """Do the next job or write the next batch; return False if there is nothing to do."""
        with self._changed:
            if not self._jobs:
                return False
            job = self._jobs.popleft()
            batch = [job] if isinstance(job, Chunk) else []
            size = _size(batch)
            while batch and self._jobs and isinstance(following := self._jobs[0], Chunk) and size < BATCH_BYTES:
                batch.append(following)
                size += _size((following,))
                self._jobs.popleft()
        kept: set[bytes] = set()
        try:
            if not isinstance(job, Chunk):
                job()
            for store in self._stores:
                if store is self._durable or self._durable is None:
                    kept = set()
                    kept = _keep(store, batch)
                else:
                    _keep(store, batch)
        finally:  # even if a store fails, or those who wait for these chunks would wait for ever
            with self._changed:
                self.finished.extend((chunk.key, chunk.key in kept) for chunk in batch)
                self._changed.notify_all()
            self._wake()
        return True

    def _run(self) -> None:
        tended = self._clock.now()
        while True:
            with self._changed:
                if not self._jobs and not self._closing:
                    self._changed.wait(TEND_SECONDS)
                if not self._jobs and self._closing:
                    return
            try:
                self.work()
                if self._clock.now() - tended >= TEND_SECONDS:
                    self._tend()
                    tended = self._clock.now()
            except Exception as error:  # a bug of ours with one chunk; the next may still be written
                log.error("KV could not be written: %s", trace(error))


def _keep(store: Store, batch: Sequence[Chunk]) -> set[bytes]:
    """Store a batch; return the keys of the chunks that the store has now.

    A chunk that is refused takes those that extend it along.
    """
    kept: set[bytes] = set()
    rest = list(batch)
    while rest:
        count = store.keep(rest)
        kept.update(chunk.key for chunk in rest[:count])
        rest = spared(rest[count:])
    return kept


def _size(chunks: Sequence[Chunk]) -> int:
    return sum(len(memoryview(chunk.pages).cast("B")) for chunk in chunks)
