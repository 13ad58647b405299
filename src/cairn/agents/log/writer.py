"""The one thread that writes a token log: the ends of all turns that wait are one write and one sync."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence, Set
from concurrent.futures import Future
from typing import Any, NamedTuple, ParamSpec, TypeVar

import msgspec

from cairn.agents.log.index import RecordKind
from cairn.agents.log.log import Log
from cairn.agents.log.segment import Record
from cairn.types.errors import Unavailable, trace

MOST = 8
"""Threads at once: a disk that hangs takes no more, and what else waits for it is in a queue."""

P = ParamSpec("P")
T = TypeVar("T")


class DiskThreads:
    """At most `most` daemon threads, started when there is work that no idle one takes."""

    def __init__(self, most: int) -> None:
        self._most, self._started = most, 0
        self._idle = 0
        """Below zero: jobs that wait for a thread."""
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()

    def submit(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Do this on one of the threads."""
        done: Future[T] = Future()
        with self._lock:
            if self._idle <= 0 and self._started < self._most:
                threading.Thread(target=self._run, name="cairn-agents-disk", daemon=True).start()
                self._started += 1
            else:
                self._idle -= 1
        self._jobs.put((done, lambda: work(*args, **kwargs)))
        return done

    def _run(self) -> None:
        while True:
            done, work = self._jobs.get()
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(work())
                except BaseException as error:
                    done.set_exception(error)
            del done, work  # nothing of them is kept while the next is waited for
            with self._lock:
                self._idle += 1


_threads = DiskThreads(MOST)


async def on_disk_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What `work` returns, done on another thread. If this is cancelled, work that has begun goes on,
    and nobody waits for it."""
    return await asyncio.wrap_future(_threads.submit(work, *args, **kwargs))


log = logging.getLogger(__name__)

FLUSH_SECONDS = 1.0
"""How long a record that nobody waits for may stay unsynced while nothing else is written."""
BACKLOG_BYTES = 64 << 20
"""Records that nobody waits for are dropped while more than this waits for a slow disk."""
PAUSE_SECONDS = 5.0
"""Between attempts at compaction that the disk refused."""


class _Job(NamedTuple):
    records: Sequence[Record]
    keys: Sequence[int]
    """To be erased after the records are written."""
    done: asyncio.Future[None] | None
    """None: nobody waits, and no sync is needed."""
    sync: bool = True
    """Whether who waits wants more than that the operating system has the records."""


class Writer:
    """Writes and erases for one event loop; jobs are done in the order in which they were given."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._jobs: deque[_Job] = deque()
        self.given = 0
        """Jobs so far: while this stays as it is, nothing that the log knows has changed."""
        self._waiting = 0
        """How many bytes wait in `_jobs`."""
        self._closing = False
        self._lost: set[int] = set()
        self._change = threading.Condition()
        self._over = asyncio.Event()
        """Set by the thread at its end. To join it would take another thread, for which the interpreter waits at the
        end of the program, however long the disk hangs."""
        self.dropped = 0
        """Records dropped because the disk was too slow, or refused them."""
        self._thread = threading.Thread(target=self._run, name="cairn-token-log", daemon=True)
        self._thread.start()

    @property
    def loss(self) -> str:
        """What the log had lost when it was opened, as a sentence; empty for nothing."""
        return self._log.loss

    @property
    def trouble(self) -> str:
        """Why the log does not work now; empty when it does."""
        return self._log.trouble

    def bytes_of(self, keys: Set[int]) -> int:
        """What the records with these keys take. Any thread."""
        return self._log.bytes_of(keys)

    @property
    def bytes(self) -> int:
        """What the log takes on the disk."""
        return self._log.bytes

    def record(self, kind: RecordKind, value: msgspec.Struct, key: int = 0) -> Record:
        """A record to be written; without a key it is about itself."""
        lsn = self._log.next_lsn()
        return Record(lsn, kind, key or lsn, msgspec.msgpack.encode(value))

    def key(self) -> int:
        """A key that no record has yet."""
        return self._log.next_lsn()

    def append(self, *records: Record) -> None:
        """Write records when there is time; a crash may lose them. They are synced within seconds."""
        job = _Job(records, (), None)
        if self._waiting > BACKLOG_BYTES:
            self._lose([job])
        else:
            self._give(job)

    def lost(self) -> set[int]:
        """Keys of records that were dropped and that nobody waited for, since this was last asked."""
        with self._change:
            lost, self._lost = self._lost, set()
        return lost

    def _lose(self, jobs: Sequence[_Job]) -> None:
        with self._change:
            self.dropped += sum(len(job.records) for job in jobs)
            self._lost.update(record.key for job in jobs if job.done is None for record in job.records)

    async def sync(self, *records: Record) -> None:
        """Return when these, and all before them, are durable. Raises Unavailable: then they do not count."""
        await self._wait(records, ())

    async def written(self, seconds: float) -> None:
        """Return when the operating system has all that was given so far: what a killed process does not lose, a power
        cut may. After so many `seconds` in any case, and at once where the disk refuses."""
        done: asyncio.Future[None] = self._loop.create_future()
        with contextlib.suppress(OSError, Unavailable, TimeoutError):
            self._give(_Job((), (), done, sync=False))
            await asyncio.wait_for(done, seconds)

    async def erase(self, keys: Iterable[int], *records: Record) -> None:
        """Write the records, then return when every byte under these keys is gone from the disk.

        Raises Unavailable; if the erasure itself was logged, it is finished as soon as the disk works.
        """
        await self._wait(records, tuple(keys))

    async def _wait(self, records: Sequence[Record], keys: Sequence[int]) -> None:
        done: asyncio.Future[None] = self._loop.create_future()
        self._give(_Job(records, keys, done))
        try:
            await asyncio.shield(done)
        except OSError as error:
            raise Unavailable(
                f"the token log cannot be written: {error.strerror or error}", retry_after=10.0
            ) from error

    def _give(self, job: _Job) -> None:
        with self._change:
            if self._closing:
                raise Unavailable("the token log is closed")
            self._jobs.append(job)
            self.given += 1
            self._waiting += sum(record.size for record in job.records)
            self._change.notify()

    async def close(self) -> None:
        """Write what waits, close the log and end the thread. Who gives up waiting holds nobody up."""
        with self._change:
            self._closing = True
            self._change.notify()
        await self._over.wait()

    # --------------------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            self._work()
        finally:
            with contextlib.suppress(RuntimeError):  # the loop is gone, and so is whoever waited
                self._loop.call_soon_threadsafe(self._over.set)

    def _work(self) -> None:
        busy = True  # whether there may be something to compact
        while True:
            with self._change:
                if not self._jobs and not self._closing and not busy:
                    self._change.wait(FLUSH_SECONDS if self._log.unsynced else None)
                jobs, self._jobs, self._waiting = list(self._jobs), deque(), 0
                if not jobs and self._closing:
                    break
            try:
                busy = self._group(jobs) if jobs else self._tidy()
            except Exception as error:  # a bug of ours; whoever waits must not wait for ever
                log.error("the token log failed: %s", trace(error))
                self._tell(jobs, OSError(str(type(error).__name__)))
                busy = False
        with contextlib.suppress(OSError):
            self._log.close()

    def _group(self, jobs: list[_Job]) -> bool:
        """Write all records of the jobs, sync once if anybody waits, then erase."""
        records = [record for job in jobs for record in job.records]
        waited = [job for job in jobs if job.done is not None]
        try:
            self._log.write(records, sync=any(job.sync for job in waited))
        except OSError as error:
            self._lose(jobs)
            self._tell(waited, error)
            return False
        self._tell([job for job in waited if not job.keys], None)
        keys = [key for job in waited for key in job.keys]
        if keys:
            failure = None
            try:
                self._log.erase(keys)
            except OSError as error:
                failure = error
            self._tell([job for job in waited if job.keys], failure)
        return True

    def _tidy(self) -> bool:
        """Nobody waits: save space, then make sure that nothing stays unsynced."""
        try:
            if self._log.compact():
                return True
            if self._log.unsynced:
                with self._change:
                    self._change.wait_for(lambda: self._jobs or self._closing, FLUSH_SECONDS)
                if not self._jobs:
                    self._log.write((), sync=True)
        except OSError:
            with self._change:
                self._change.wait_for(lambda: self._jobs or self._closing, PAUSE_SECONDS)
            return bool(self._log.trouble)
        return False

    def _tell(self, jobs: Iterable[_Job], error: OSError | None) -> None:
        done = [job.done for job in jobs if job.done is not None]
        if done:
            with contextlib.suppress(RuntimeError):  # the loop is gone, and so is whoever waited
                self._loop.call_soon_threadsafe(_settle, done, error)


def _settle(waiting: Iterable[asyncio.Future[None]], error: OSError | None) -> None:
    for future in waiting:
        if future.done():
            continue
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
