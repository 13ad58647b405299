"""Several pieces of work at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


async def together(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all, in their order; the first failure ends the others, and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


async def as_places_free(
    places: asyncio.Semaphore, work: Iterable[tuple[bool, Callable[[], Coroutine[Any, Any, T]]]]
) -> list[T]:
    """Return the results of all, in their order, as `together` does, but begin each only when there is a place for it.

    Each comes with whether it needs a place; one that does has it until it is done.
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


class StartingLine:
    """Lets several begin together: who is ready waits until all others are, or have left."""

    def __init__(self, runners: int) -> None:
        self._away = runners
        self._off = asyncio.Event()

    def runner(self) -> Runner:
        """One of them."""
        return Runner(self)

    def arrive(self) -> None:
        """One less is away."""
        self._away -= 1
        if self._away <= 0:  # soon, so that whoever came last waits as the others do and goes after them
            asyncio.get_running_loop().call_soon(self._off.set)

    async def wait(self) -> None:
        """Until nobody is away."""
        await self._off.wait()


class Runner:
    """One of those at a starting line. It arrives once, however often it is ready."""

    def __init__(self, line: StartingLine) -> None:
        self._line = line
        self._there = False

    async def ready(self) -> None:
        """Wait for the others."""
        self.leave()
        await self._line.wait()

    def leave(self) -> None:
        """Nobody need wait for this one any more."""
        if not self._there:
            self._there = True
            self._line.arrive()


async def in_step(work: Sequence[Callable[[Runner], Coroutine[Any, Any, T]]]) -> list[T]:
    """As `together`, from one starting line: whoever ends without being ready holds nobody up."""
    line = StartingLine(len(work))

    async def run(one: Callable[[Runner], Coroutine[Any, Any, T]]) -> T:
        runner = line.runner()
        try:
            return await one(runner)
        finally:
            runner.leave()

    return await together([run(one) for one in work])
