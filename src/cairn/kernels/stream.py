"""Streams of a kernel set's work: run at once on the caller's thread, or in order on a thread of their own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, Protocol, TypeVar

from cairn.types.step import EngineCall, Ready

T = TypeVar("T")
Work = Callable[[], None]


class WorkStream(Protocol):
    """Runs pieces of work one after another, in the order in which they were submitted."""

    @property
    def depth(self) -> int:
        """How many pieces of work may wait behind the running one; 0: `submit` returns when its work is done."""
        ...

    def submit(self, work: Callable[[], T]) -> EngineCall[T]:
        """Run the work after all that was submitted before. Its exception is raised here or by `wait`."""
        ...

    def close(self) -> None:
        """Wait for all submitted work and end. Nothing may be submitted afterwards; a second call does nothing."""
        ...


class InlineStream:
    """A `WorkStream` for kernels that use all cores themselves: work is done when `submit` returns."""

    depth = 0

    def submit(self, work: Callable[[], T]) -> Ready[T]:
        """Run the work now."""
        return Ready(work())

    def close(self) -> None:
        """Do nothing: no work is left."""


class Submitted(Generic[T]):
    """Work submitted to a `ThreadStream`."""

    __slots__ = ("_future",)

    def __init__(self, future: Future[T]) -> None:
        self._future = future

    @property
    def done(self) -> bool:
        """Whether `wait` returns at once."""
        return self._future.done()

    def wait(self) -> T:
        """Block until the work is done, and return its result or raise its exception."""
        return self._future.result()


class ThreadStream:
    """A `WorkStream` for a device: its thread mostly waits, and the next step is planned meanwhile."""

    depth = 1

    def __init__(self, name: str, translate: Callable[[Exception], Exception] = lambda error: error) -> None:
        """Start the thread. `translate` turns exceptions of the device's library into typed errors."""
        self._translate = translate
        self._queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], T]) -> Submitted[T]:
        """Queue the work behind all that was submitted before."""
        if self._thread is None:
            raise RuntimeError("the stream is closed")
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(self._translate(error))

        self._queue.put(run)
        return Submitted(future)

    def close(self) -> None:
        """Run what is queued, then end the thread."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work()
            del work  # otherwise it keeps a step's arrays alive until the next step
