"""The thread that writes a token log: the ends of all turns that wait are one write and one sync."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Iterable, Sequence, Set
from typing import NamedTuple

import msgspec

from cairn.agents.log.index import RecordKind
from cairn.agents.log.segment import Record
from cairn.agents.log.token_log import TokenLog
from cairn.types.errors import Unavailable, trace

log = logging.getLogger(__name__)

FLUSH_SECONDS = 1.0
"""How long a record that nobody waits for may stay unsynced while nothing else is written."""
BACKLOG_BYTES = 64 << 20
"""Limit on bytes that wait for a slow disk. Beyond it, records that nobody waits for are dropped."""
PAUSE_SECONDS = 5.0
"""Pause between attempts at compaction that the disk refused."""


class _Job(NamedTuple):
    records: Sequence[Record]
    keys: Sequence[int]
    """Keys to erase after the records are written."""
    done: asyncio.Future[None] | None
    """Set when the job is done. None: nobody waits, and no sync is needed."""
    sync: bool = True
    """Whether the records must be synced, not only be known to the operating system."""


class Writer:
    """Writer for one event loop. Jobs are done in the order in which they were submitted."""

    def __init__(self, log: TokenLog) -> None:
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._jobs: deque[_Job] = deque()
        self.submitted = 0
        """Jobs submitted so far: while this is unchanged, so is the log."""
        self._waiting = 0
        """Bytes of the records in `_jobs`."""
        self._closing = False
        self._lost: set[int] = set()
        self._erasers: list[_Job] = []
        """Jobs whose erasure is not done."""
        self._change = threading.Condition()
        self._over = asyncio.Event()
        """Set by the thread at its end.

        Joining it would take another thread, which the interpreter waits for at the end of the program, however long
        the disk hangs.
        """
        self.dropped = 0
        """Records dropped because the disk was too slow or refused them."""
        self._thread = threading.Thread(target=self._run, name="cairn-token-log", daemon=True)
        self._thread.start()

    @property
    def loss(self) -> str:
        """What the log had lost when it was opened, as a sentence; empty for nothing."""
        return self._log.loss

    @property
    def trouble(self) -> str:
        """Why the log cannot be written, as a sentence; empty while it can."""
        return self._log.trouble

    def bytes_of(self, keys: Set[int]) -> int:
        """Return the bytes of the records with these keys that count. Any thread."""
        return self._log.bytes_of(keys)

    @property
    def bytes(self) -> int:
        """Bytes that the log takes on the disk."""
        return self._log.bytes

    def record(self, kind: RecordKind, value: msgspec.Struct, key: int = 0) -> Record:
        """Return a new record; without a key its own number is its key."""
        lsn = self._log.next_lsn()
        return Record(lsn, kind, key or lsn, msgspec.msgpack.encode(value))

    def key(self) -> int:
        """Return a new key."""
        return self._log.next_lsn()

    def append(self, *records: Record) -> None:
        """Write records without waiting; a crash may lose them. They are synced within seconds."""
        job = _Job(records, (), None)
        if self._waiting > BACKLOG_BYTES:
            self._lose([job])
        else:
            self._give(job)

    def lost(self) -> set[int]:
        """Return the keys of dropped records that nobody waited for, since the last call."""
        with self._change:
            lost, self._lost = self._lost, set()
        return lost

    def _lose(self, jobs: Sequence[_Job]) -> None:
        with self._change:
            self.dropped += sum(len(job.records) for job in jobs)
            self._lost.update(record.key for job in jobs if job.done is None for record in job.records)

    async def sync(self, *records: Record) -> None:
        """Write records; on return they and all before them are durable. Raise Unavailable: then they do not count."""
        await self._wait(records, ())

    async def written(self, seconds: float) -> None:
        """Wait until the operating system has everything submitted so far.

        That survives a killed process, but maybe not a power cut. Return after `seconds` in any case, and at once if
        the disk refuses.
        """
        done: asyncio.Future[None] = self._loop.create_future()
        with contextlib.suppress(OSError, Unavailable, TimeoutError):
            self._give(_Job((), (), done, sync=False))
            await asyncio.wait_for(done, seconds)

    async def erase(self, keys: Iterable[int], *records: Record) -> None:
        """Write the records, then return when every byte under these keys is gone from the disk.

        Raise Unavailable. If the erasure itself was logged, it is finished as soon as the disk works.
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
            self.submitted += 1
            self._waiting += sum(record.size for record in job.records)
            self._change.notify()

    async def close(self) -> None:
        """Write what waits, close the log and end the thread. Cancelling the caller delays nobody."""
        with self._change:
            self._closing = True
            self._change.notify()
        await self._over.wait()

    # --------------------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            self._work()
        finally:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits
                self._loop.call_soon_threadsafe(self._over.set)

    def _work(self) -> None:
        busy = True  # whether there may be something to compact
        while True:
            with self._change:
                if not self._jobs and not self._closing and not busy:
                    self._change.wait(FLUSH_SECONDS if self._log.unsynced else None)
                jobs, self._jobs, self._waiting = list(self._jobs), deque(), 0
                if not jobs and self._closing and not self._erasers:
                    break
            try:
                if jobs:
                    busy = self._group(jobs)
                if self._erasers:  # a segment at a time, between groups: other turns end meanwhile
                    busy = self._erase_some()
                elif not jobs:
                    busy = self._tidy()
            except Exception as error:  # a bug; those who wait must not wait for ever
                log.error("the token log failed: %s", trace(error))
                self._tell([*jobs, *self._erasers], OSError(str(type(error).__name__)))
                self._erasers = []
                busy = False
        with contextlib.suppress(OSError):
            self._log.close()

    def _group(self, jobs: list[_Job]) -> bool:
        """Write all records of the jobs, sync once if anybody waits, then note what is to be erased."""
        records = [record for job in jobs for record in job.records]
        waited = [job for job in jobs if job.done is not None]
        try:
            self._log.write(records, sync=any(job.sync for job in waited))
        except OSError as error:
            self._lose(jobs)
            self._tell(waited, error)
            return False
        self._tell([job for job in waited if not job.keys], None)
        if erasers := [job for job in waited if job.keys]:
            try:
                self._log.begin_erasure(key for job in erasers for key in job.keys)
            except OSError as error:
                self._tell(erasers, error)
            else:
                self._erasers += erasers
        return True

    def _erase_some(self) -> bool:
        """Rewrite one segment without what is erased; report to the erasers that are done, or to all if none can be."""
        try:
            if self._log.erase_some():
                self._tell([job for job in self._erasers if self._log.erased(job.keys)], None)
                self._erasers = [job for job in self._erasers if not self._log.erased(job.keys)]
        except OSError as error:
            self._tell(self._erasers, error)
            self._erasers = []
        return True

    def _tidy(self) -> bool:
        """Compact while nobody waits, then sync what is unsynced."""
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
            with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits
                self._loop.call_soon_threadsafe(_settle, done, error)


def _settle(waiting: Iterable[asyncio.Future[None]], error: OSError | None) -> None:
    for future in waiting:
        if future.done():
            continue
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
