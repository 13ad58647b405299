"""The services of one server that are loaded now, for whoever keeps something of several models."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING

from cairn.types.errors import NotLoaded

if TYPE_CHECKING:
    from cairn.frontend.service import Service
    from cairn.text.chat.replay import ReplayTable

MOST_REPLAYS = 4
"""How many models that are away keep what they sampled in memory: up to 16 MiB each. Others read it at a restart."""


class Services:
    """The loaded services. There is always a first one, or was. Two may have the same model, with other options."""

    def __init__(self, first: Service) -> None:
        self._first = first
        self._loaded = [first]
        self._gone: dict[bytes, int] = {}
        """The longest context of each model that was unloaded, by its identity."""
        self._replays: dict[bytes, ReplayTable] = {}
        """What such a model sampled, by its identity, so that it knows its answers again when it returns."""
        self._ended = (0, 0)
        """Bytes read from and written to the disk by services that are gone."""
        self._watchers: list[Callable[[Service], None]] = []
        self.want: Callable[[str], bool] | None = None
        """Has a model of this name loaded, where there are several; False where there is none."""

    def __iter__(self) -> Iterator[Service]:
        return iter(tuple(self._loaded))

    @property
    def first(self) -> Service:
        """What serves where nothing says which model; one that was unloaded gives way to any that is there."""
        return self._first

    def of(self, identity: bytes) -> Service | None:
        """A service of this model, where it is loaded."""
        return next((one for one in self._loaded if one.spec.identity == identity), None)

    @property
    def several(self) -> bool:
        """Whether the server has several models."""
        return self.want is not None

    def named(self, name: str) -> Service | None:
        """The service of the model with this name; None where the server has no such model, or one for all.

        NotLoaded where it is not loaded now: from here on it is being loaded.
        """
        if self.want is None or not name:
            return None
        found = next((one for one in self._loaded if one.name == name), None)
        if found is None and self.want(name):
            raise NotLoaded(f"{name} is being loaded; ask again shortly", retry_after=1.0)
        return found

    def known(self, identity: bytes) -> bool:
        """Whether this server has, or has had, the model loaded: its KV may be on the disk, and it may come back."""
        return self.of(identity) is not None or identity in self._gone

    def away(self, but: Collection[bytes] = ()) -> set[bytes]:
        """The models that were loaded and are not now, without these."""
        return {one for one in self._gone if one not in but and self.of(one) is None}

    def context(self, identity: bytes) -> int:
        """The longest context of a model that is `known`."""
        service = self.of(identity)
        return self._gone[identity] if service is None else service.spec.context

    def watch(self, watcher: Callable[[Service], None]) -> None:
        """Call this with every service that is added from now on."""
        self._watchers.append(watcher)

    def add(self, service: Service) -> None:
        """A model was loaded."""
        if (replays := self._replays.pop(service.spec.identity, None)) is not None:
            service.chat.replays = replays
        if not self._loaded:
            self._first = service
        self._loaded.append(service)
        for watcher in self._watchers:
            watcher(service)

    def lead(self, service: Service) -> None:
        """This one serves where nothing says which."""
        self._first = service

    def remove(self, service: Service) -> None:
        """A model is being unloaded."""
        if service not in self._loaded:
            return
        self._loaded.remove(service)
        self._gone[service.spec.identity] = service.spec.context
        self._replays[service.spec.identity] = service.chat.replays
        while len(self._replays) > MOST_REPLAYS:
            del self._replays[next(iter(self._replays))]
        read, written = service.metrics.disk_bytes
        self._ended = (self._ended[0] + read, self._ended[1] + written)
        if service is self._first and self._loaded:
            self._first = self._loaded[0]

    @property
    def disk_bytes(self) -> tuple[int, int]:
        """Bytes of KV (read from, written to) the disk by all workers of this process."""
        pairs = [self._ended, *(one.metrics.disk_bytes for one in self._loaded)]
        return sum(read for read, _ in pairs), sum(written for _, written in pairs)
