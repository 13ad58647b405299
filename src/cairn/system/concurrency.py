"""Several coroutines at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Literal, TypeVar

T = TypeVar("T")


async def together(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all and return their results in order. The first failure cancels the others and is raised itself."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


async def gather_with_limit(
    places: asyncio.Semaphore, work: Iterable[tuple[bool, Callable[[], Coroutine[Any, Any, T]]]]
) -> list[T]:
    """Run all and return their results in order, as `together` does, but limit how many run at once.

    Each comes with whether it needs one of the `places`; if so, it starts when one is free and holds it to its end.
    """
    tasks: list[asyncio.Task[T]] = []
    try:
        async with asyncio.TaskGroup() as group:
            for needs_place, begin in work:
                if needs_place:
                    await places.acquire()
                task = group.create_task(begin())
                tasks.append(task)
                if needs_place:
                    task.add_done_callback(lambda _: places.release())
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


class CountedLock(asyncio.Lock):
    """A lock that counts who holds it or waits for it: from one holder to the next, `locked` is false for a moment."""

    def __init__(self) -> None:
        super().__init__()
        self.users = 0

    async def acquire(self) -> Literal[True]:
        """Acquire the lock, and count as a user until `release`."""
        self.users += 1
        try:
            return await super().acquire()
        except BaseException:
            self.users -= 1
            raise

    def release(self) -> None:
        """Release the lock."""
        self.users -= 1
        super().release()


class StartBarrier:
    """A barrier that opens once every runner has arrived or left."""

    def __init__(self, runners: int) -> None:
        self._missing = runners
        self._opened = asyncio.Event()

    def runner(self) -> Runner:
        """Return one of the runners."""
        return Runner(self)

    def arrive(self) -> None:
        """Count one runner as arrived."""
        self._missing -= 1
        if self._missing <= 0:  # not at once, so that the last to arrive also waits, and continues after the others
            asyncio.get_running_loop().call_soon(self._opened.set)

    async def wait(self) -> None:
        """Wait until all runners have arrived."""
        await self._opened.wait()


class Runner:
    """One of the runners at a barrier. It arrives once, however often it is ready."""

    def __init__(self, line: StartBarrier) -> None:
        self._line = line
        self._there = False

    async def ready(self) -> None:
        """Arrive, and wait for the others."""
        self.leave()
        await self._line.wait()

    def leave(self) -> None:
        """Arrive without waiting."""
        if not self._there:
            self._there = True
            self._line.arrive()


async def in_step(work: Sequence[Callable[[Runner], Coroutine[Any, Any, T]]]) -> list[T]:
    """Run all as `together` does, from one barrier. One that ends without being ready delays nobody."""
    line = StartBarrier(len(work))

    async def run(one: Callable[[Runner], Coroutine[Any, Any, T]]) -> T:
        runner = line.runner()
        try:
            return await one(runner)
        finally:
            runner.leave()

    return await together([run(one) for one in work])
