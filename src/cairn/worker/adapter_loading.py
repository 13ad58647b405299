"""Attaching and detaching of adapters while the worker runs steps: a thread reads the files."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from cairn.types.errors import CairnError
from cairn.types.step import AdapterData, AdapterFacts, Engine
from cairn.worker import wire

log = logging.getLogger(__name__)


class AdapterLoads:
    """Carries out the front's orders to attach and detach adapters."""

    def __init__(self, channel: wire.Channel, engine: Engine) -> None:
        self._channel, self._engine = channel, engine
        self._reading: list[tuple[wire.KVQuery, Future[AdapterData]]] = []
        self._pool: ThreadPoolExecutor | None = None

    @property
    def owed(self) -> int:
        """Number of orders that were not answered yet."""
        return len(self._reading)

    def take(self, ask: wire.KVQuery) -> None:
        """Begin to read an adapter, or detach one."""
        if ask.what == "detach":
            self._engine.detach(ask.adapter)
            self._channel.send(wire.KVAnswer(ask.id))
            return
        self._pool = self._pool or ThreadPoolExecutor(1, "cairn-adapter")
        future = self._pool.submit(self._engine.read_adapter, Path(ask.path))
        self._reading.append((ask, future))
        future.add_done_callback(lambda _: self._channel.wake())

    def attach_read(self) -> None:
        """Attach the adapters that were read since the last call, between two steps."""
        done = [one for one in self._reading if one[1].done()]
        for ask, future in done:
            self._reading.remove((ask, future))
            self._channel.send(self._attached(ask, future.result))

    def _attached(self, ask: wire.KVQuery, read: Callable[[], AdapterData]) -> wire.KVAnswer:
        try:
            return wire.KVAnswer(ask.id, adapter=self._engine.attach(read()))
        except CairnError as error:
            return wire.KVAnswer(ask.id, refused=str(error))
        except MemoryError:
            return wire.KVAnswer(ask.id, trouble=f"there is not enough memory for the adapter {ask.path}")

    def close(self) -> None:
        """End the thread."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)


def attach_first(engine: Engine, places: tuple[wire.AdapterPlace, ...]) -> tuple[AdapterFacts | None, ...]:
    """Attach the adapters that a worker loads with its model; return a description of each.

    Raise ModelError for a new adapter that cannot be read. One that an earlier worker had is None if it cannot be read
    again or its file has changed.
    """
    found: list[AdapterFacts | None] = []
    for place in places:
        try:
            adapter = engine.read_adapter(Path(place.path))
        except CairnError as error:
            if not place.digest:
                raise
            log.error("the adapter %s cannot be loaded again: %s", place.name, error)
            found.append(None)
            continue
        same = place.digest in (b"", adapter.digest)
        if not same:
            log.error("the adapter %s was changed since it was loaded; unload it and load it again", place.name)
        found.append(engine.attach(adapter) if same else None)
    return tuple(found)
