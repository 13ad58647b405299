"""Deadlines and a circuit breaker around a shared store: a slow or dead store costs time, and little of it.

Every call runs on a daemon thread and is given up at its deadline. After `FAILURES` calls in a row that failed, calls
fail at once for `PAUSE` seconds; then one call tries again. A call that fails for one object alone does not count.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol, TypeVar

from cairn.cluster.blobs import Blobs
from cairn.system.disk_threads import DiskThreads
from cairn.system.interfaces import Clock

T = TypeVar("T")

DEADLINE = 5.0
"""Seconds that a call may take."""
FAILURES = 3
PAUSE = 5.0
THREADS = 16
AHEAD = 12
"""Most reads at once by those who read many objects, so that others always find a free thread."""
PROBE = "beats"
"""The folder that is listed to learn whether the store works: every server writes there twice a second."""
OF_ONE_OBJECT = frozenset({errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG})
"""Errors of writing that say nothing about the store as a whole."""


class ObjectFailed(OSError):
    """The error of one object, or one folder, of a store that works otherwise."""


class AsyncBlobs(Protocol):
    """The calls of `Blobs`, awaited."""

    async def create(self, name: str, data: bytes) -> bool:
        """See `Blobs`. An object with exactly this data counts as made: an earlier try may have worked."""
        ...

    async def replace(self, name: str, data: bytes) -> None:
        """See `Blobs`."""
        ...

    async def read(self, name: str) -> bytes | None:
        """See `Blobs`."""
        ...

    async def read_several(self, names: Sequence[str], *, waits: bool = True) -> Sequence[bytes | OSError | None]:
        """Return for each name what `read` returns or raises. Several are read at once.

        With `waits`, at most AHEAD of all that are read like this; else each as soon as a thread is free.
        """
        ...

    async def list(self, folder: str, after: str = "") -> Sequence[str]:
        """See `Blobs`."""
        ...

    async def delete(self, names: Sequence[str]) -> None:
        """See `Blobs`."""
        ...


async def put(blobs: AsyncBlobs, name: str, data: bytes) -> None:
    """Make an object, or replace the one of that name. New: durable; replaced: not durable in a folder."""
    if not await blobs.create(name, data):
        await blobs.replace(name, data)


def readable(data: bytes | OSError | None) -> bytes | None:
    """Return an object of `read_several`; None for one that alone cannot be read. Raise the store's own error."""
    if isinstance(data, OSError):
        if not isinstance(data, ObjectFailed):
            raise data
        return None
    return data


class Breaker:
    """The state of the store: whether calls are worth making. Any thread may call."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._failed = 0
        self._until = 0.0
        self.trouble = ""
        """The last failure, while the store fails; empty while it works."""

    def enter(self) -> None:
        """Raise OSError while calls would be in vain."""
        with self._lock:
            now = self._clock.now()
            if self._failed >= FAILURES:
                if now < self._until:
                    raise OSError(errno.EHOSTDOWN, f"the shared store does not work: {self.trouble}")
                self._until = now + PAUSE  # this call tries; others wait for its result

    def worked(self) -> None:
        """Note that a call was answered."""
        with self._lock:
            self._failed, self.trouble = 0, ""

    def failed(self, error: BaseException) -> None:
        """Note that a call failed or was given up."""
        with self._lock:
            self._failed += 1
            self._until = self._clock.now() + PAUSE
            self.trouble = str(getattr(error, "strerror", None) or error) or type(error).__name__

    def passed_over(self) -> None:
        """Note that a call failed for one object alone, which says little of the store: the next call may try."""
        with self._lock:
            self._until = self._clock.now()


class Guarded:
    """A shared store that never holds up its callers for longer than their deadline. It is a `Blobs` itself."""

    def __init__(self, blobs: Blobs, clock: Clock, deadline: float = DEADLINE) -> None:
        self._calls, self._deadline = _Calls(blobs, clock, deadline), deadline
        self._threads = DiskThreads(THREADS)
        self._breaker = Breaker(clock)
        self.ahead = asyncio.Semaphore(AHEAD)
        """Limits reads of many objects."""
        self.soon: AsyncBlobs = _Soon(self)
        """The same store, awaited."""

    @property
    def trouble(self) -> str:
        """Why the store does not work now; empty if it does."""
        return self._breaker.trouble

    def create(self, name: str, data: bytes) -> bool:
        """See `AsyncBlobs.create`."""
        return self._wait(self.submit(self._calls.create, name, data))

    def replace(self, name: str, data: bytes) -> None:
        """See `Blobs`."""
        self._wait(self.submit(self._calls.replace, name, data))

    def read(self, name: str) -> bytes | None:
        """See `Blobs`."""
        return self._wait(self.submit(self._calls.read, name))

    def list(self, folder: str, after: str = "") -> Sequence[str]:
        """See `Blobs`."""
        return self._wait(self.submit(self._calls.list, folder, after))

    def delete(self, names: Sequence[str]) -> None:
        """See `Blobs`."""
        self._wait(self.submit(self._calls.delete, names))

    def submit(self, work: Callable[..., T], *args: object) -> Future[T]:
        """Start a call on a thread. Raise OSError while the breaker is open."""
        self._breaker.enter()
        return self._threads.submit(work, *args)

    def _wait(self, running: Future[T]) -> T:
        try:
            found = running.result(self._deadline)
        except (TimeoutError, concurrent.futures.TimeoutError) as error:
            raise self.late(running) from error
        except OSError as error:
            self._failed(error)
            raise
        self._breaker.worked()
        return found

    def _failed(self, error: OSError) -> None:
        if isinstance(error, ObjectFailed):
            self._breaker.passed_over()
        else:
            self._breaker.failed(error)

    async def wait(self, running: Future[T]) -> T:
        """Await a call; see `submit`. Raise OSError if it fails or takes too long."""
        try:
            async with asyncio.timeout(self._deadline):  # `wait_for` may swallow a cancellation
                found = await asyncio.wrap_future(running)
        except TimeoutError as error:
            raise self.late(running) from error
        except OSError as error:
            self._failed(error)
            raise
        self._breaker.worked()
        return found

    def late(self, running: Future[T]) -> OSError:
        """Give up a call; return the error to raise."""
        running.cancel()
        error = OSError(errno.ETIMEDOUT, f"the shared store did not answer within {self._deadline:g} s")
        self._breaker.failed(error)
        return error

    def calls(self) -> Blobs:
        """Return the unguarded calls, to `submit`."""
        return self._calls


class _Calls:
    """The calls of a store. They raise ObjectFailed for what fails while the store works otherwise."""

    def __init__(self, blobs: Blobs, clock: Clock, deadline: float) -> None:
        self._blobs, self._clock, self._deadline = blobs, clock, deadline
        self._lock = threading.Lock()
        self._reading: dict[str, list[float]] = {}
        """When the reads that go on have begun, by the object."""

    def create(self, name: str, data: bytes) -> bool:
        try:
            if self._blobs.create(name, data):
                return True
        except OSError as error:
            raise self._writing(name, error) from error
        return self.read(name) == data

    def replace(self, name: str, data: bytes) -> None:
        try:
            self._blobs.replace(name, data)
        except OSError as error:
            raise self._writing(name, error) from error

    def read(self, name: str) -> bytes | None:
        now = self._clock.now()
        with self._lock:
            begun = self._reading.setdefault(name, [])
            # Each read that hangs has a thread for ever, so those of one object must not take all.
            if sum(now - at > self._deadline for at in begun) >= FAILURES:
                raise ObjectFailed(errno.ETIMEDOUT, f"{name} cannot be used: earlier reads of it still hang")
            begun.append(now)
        try:
            return self._blobs.read(name)
        except OSError as error:
            raise self._of_one(name, error) from error
        finally:
            with self._lock:
                begun.remove(now)
                if not begun:
                    del self._reading[name]

    def list(self, folder: str, after: str = "") -> Sequence[str]:
        try:
            return self._blobs.list(folder, after)
        except OSError as error:
            raise (error if folder == PROBE else self._of_one(folder, error)) from error

    def delete(self, names: Sequence[str]) -> None:
        try:
            self._blobs.delete(names)
        except OSError as error:
            raise self._writing(names[0], error) from error

    def _writing(self, name: str, error: OSError) -> OSError:
        """Return the error of a write: the store's, unless it is one of permissions or of the kind of a file."""
        if error.errno not in OF_ONE_OBJECT or name.startswith(PROBE):
            return error
        return self._of_one(name, error)

    def _of_one(self, name: str, error: OSError) -> OSError:
        """Return the error of one object if the store can list a folder; else raise the store's own."""
        self._blobs.list(PROBE)
        return ObjectFailed(error.errno or errno.EIO, f"{name} cannot be used: {error.strerror or error}")


class _Soon:
    """`AsyncBlobs` over a guarded store."""

    def __init__(self, guarded: Guarded) -> None:
        self._guarded = guarded
        self._blobs = guarded.calls()

    async def create(self, name: str, data: bytes) -> bool:
        return await self._guarded.wait(self._guarded.submit(self._blobs.create, name, data))

    async def replace(self, name: str, data: bytes) -> None:
        await self._guarded.wait(self._guarded.submit(self._blobs.replace, name, data))

    async def read(self, name: str) -> bytes | None:
        return await self._guarded.wait(self._guarded.submit(self._blobs.read, name))

    async def read_several(self, names: Sequence[str], *, waits: bool = True) -> Sequence[bytes | OSError | None]:
        async def one(name: str) -> bytes | OSError | None:
            async with self._guarded.ahead if waits else contextlib.nullcontext():
                try:
                    return await self.read(name)
                except OSError as error:
                    return error

        return await asyncio.gather(*map(one, names))

    async def list(self, folder: str, after: str = "") -> Sequence[str]:
        return await self._guarded.wait(self._guarded.submit(self._blobs.list, folder, after))

    async def delete(self, names: Sequence[str]) -> None:
        await self._guarded.wait(self._guarded.submit(self._blobs.delete, names))
