"""Loaded services of a server, for parts that keep something for several models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from cairn.types.errors import NotLoaded
from cairn.types.model_variant import ModelVariant, known_variant

if TYPE_CHECKING:
    from cairn.frontend.adapter_services import ServedAdapters
    from cairn.frontend.service import Service
    from cairn.text.chat.replay import ReplayTable

MOST_REPLAYS = 4
"""Limit on unloaded models whose sampled answers stay in memory, up to 16 MiB each.

Those of other models are read again at a restart.
"""


class Services:
    """Loaded services. Two may serve the same model with different options."""

    def __init__(self, first: Service, adapters: ServedAdapters | None = None) -> None:
        self._first = first
        self._loaded = [first]
        self._adapters: dict[Service, ServedAdapters] = {}
        self._gone: dict[bytes, int] = {}
        """Longest context of each model that was unloaded, by its identity."""
        self._stored = set[bytes]()
        """Identities of unloaded models whose KV is stored where it outlives their workers."""
        self._variants: dict[bytes, list[ModelVariant]] = {}
        """Variants of each unloaded model that were used last, held so that `known_variant` finds them."""
        self._replays: dict[bytes, ReplayTable] = {}
        """Sampled answers of each unloaded model, by its identity, for when it is loaded again."""
        self._ended = (0, 0)
        """Bytes (read from, written to) the disk by services that were closed."""
        self._watchers: list[Callable[[Service], None]] = []
        self.start_loading: Callable[[str], bool] | None = None
        """Starts loading the model of this name, on a server with several; False if there is no such model."""
        if adapters is not None:
            self._follow(first, adapters)

    def __iter__(self) -> Iterator[Service]:
        return iter(tuple(self._loaded))

    @property
    def first(self) -> Service:
        """Default service. If it is unloaded, another loaded service takes its place."""
        return self._first

    def of(self, identity: bytes) -> Service | None:
        """Return a service of the model with this identity, adapters included; None without one.

        If its adapters were unloaded since, it refuses requests.
        """
        own = next((one for one in self._loaded if one.spec.identity == identity), None)
        if own is not None or not identity:
            return own
        views = (one.of(identity) for one in self._adapters.values())
        return next((view for view in views if view is not None), None)

    def storing(self, identity: bytes) -> Service | None:
        """Return a service for the KV of the model with this identity, or None.

        The model must be loaded, but its adapters need not be.
        """
        if (service := self.of(identity)) is not None:
            return service
        views = (one.storing(identity) for one in self._adapters.values())
        return next((view for view in views if view is not None), None)

    @property
    def several(self) -> bool:
        """Whether the server has several models, those with adapters counted."""
        return self.start_loading is not None or any(one.known for one in self._adapters.values())

    def named(self, name: str) -> Service | None:
        """Return the service of the model with this name; None on a server with one model or for an unknown name.

        If the model is not loaded, start loading it and raise NotLoaded.
        """
        for adapters in self._adapters.values():
            if name and (view := adapters.named(name)) is not None:
                return view
        if self.start_loading is None or not name:
            return None
        service = next((one for one in self._loaded if one.name == name), None)
        if service is None and self.start_loading(name):
            raise NotLoaded(f"{name} is being loaded; ask again shortly", retry_after=1.0)
        return service

    def known(self, identity: bytes) -> bool:
        """Return whether the model is, or was, loaded in this run: its KV may be on the disk, and it may come back."""
        return self.storing(identity) is not None or _base(identity) in self._gone

    def away(self) -> set[bytes]:
        """Return the identities of models without a worker whose KV may still be stored. Adapters do not count."""
        dead = {one.spec.identity for one in self._loaded if one.gave_up and one.stores_kv}
        return dead | {one for one in self._stored if self.of(one) is None}

    def context(self, identity: bytes) -> int:
        """Return the longest context of a model that is `known`."""
        service = self.storing(identity)
        return self._gone[_base(identity)] if service is None else service.spec.context

    def watch(self, watcher: Callable[[Service], None]) -> None:
        """Call `watcher` with every service that is added from now on."""
        self._watchers.append(watcher)

    def _follow(self, service: Service, adapters: ServedAdapters) -> None:
        """Treat adapted services of a model as services, too."""
        self._adapters[service] = adapters
        adapters.on_view = self._watch_view

    def _watch_view(self, view: Service) -> None:
        for watcher in self._watchers:
            watcher(view)

    def add(self, service: Service, adapters: ServedAdapters | None = None) -> None:
        """Add the service of a newly loaded model."""
        if adapters is not None:
            self._follow(service, adapters)
        if (replays := self._replays.pop(service.spec.identity, None)) is not None:
            service.chat.replays = replays
        if not self._loaded:
            self._first = service
        self._loaded.append(service)
        for watcher in self._watchers:
            watcher(service)

    def lead(self, service: Service) -> None:
        """Make this service the default."""
        self._first = service

    def remove(self, service: Service) -> None:
        """Remove the service of a model that is being unloaded."""
        if service not in self._loaded:
            return
        self._loaded.remove(service)
        self._gone[service.spec.identity] = service.spec.context
        if service.stores_kv:
            self._stored.add(service.spec.identity)
        adapters = self._adapters.pop(service, None)
        views = adapters.views if adapters is not None else ()
        self._variants[service.spec.identity] = [service.variant, *(view.variant for view in views)]
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


def _base(identity: bytes) -> bytes:
    """Return the identity of a model without its adapters."""
    found = known_variant(identity)
    return identity if found is None else found.base
