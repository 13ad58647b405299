"""Routes of stored KV: its figures, flushing, sharing, scrubbing and pruning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from cairn.api.chat.parse import parse
from cairn.api.chat.state import ServerState
from cairn.api.http.body import read_nothing
from cairn.api.http.call import HTTPCall
from cairn.api.http.routes import Route
from cairn.api.native.agent_schemas import NoBody
from cairn.frontend.service import Service
from cairn.types.stats import Swept


class StoredRoutes:
    """Stored KV: its figures, and orders to the stores, which take no body or an empty object.

    All but `share` are admin routes: they concern all tenants at once, and all loaded models.
    """

    def __init__(self, state: ServerState) -> None:
        self._state, self._config = state, state.config

    def routes(self) -> list[Route]:
        """Return the table of these routes."""
        return [
            Route("GET", "/v1/cache", self.stats, access="admin"),
            Route("POST", "/v1/cache/flush", self.flush, NoBody, access="admin"),
            Route("POST", "/v1/cache/share", self.share, NoBody),
            Route("POST", "/v1/cache/scrub", self.scrub, NoBody, access="admin"),
            Route("POST", "/v1/cache/prune", self.prune, NoBody, access="admin"),
        ]

    async def stats(self, call: HTTPCall, service: Service) -> None:
        """Return the figures of the KV stores below the pool, at most about a second old; null for an absent store.

        Of several models each has its own in `models`.
        """
        body: dict[str, Any] = {"object": "cache", "model": service.name, **msgspec.to_builtins(service.kv())}
        if self._state.registry.several:
            body["models"] = {one.name: msgspec.to_builtins(one.kv()) for one in self._state.registry.services}
        await call.json(body)

    async def flush(self, call: HTTPCall, service: Service) -> None:
        """Store all waiting KV. Answered when it is durable, with a 503 if a part was given up."""
        await self._nothing(call)
        for one in self._every(service):
            await one.flush()
        await self.stats(call, service)

    async def share(self, call: HTTPCall, service: Service) -> None:
        """Put all KV into the shared store and learn what others put there: what a router asks of two servers.

        Any key may ask, as any may cause KV to be stored. Answered after two seconds at most, done or not.
        """
        await self._nothing(call)
        for one in self._every(service):
            await one.share()
        await call.json({"object": "cache.shared"})

    async def scrub(self, call: HTTPCall, service: Service) -> None:
        """Read and check every stored chunk. Damaged ones are removed."""
        await self._nothing(call)
        await call.json(_swept("scrub", [await one.scrub() for one in self._every(service)]))

    async def prune(self, call: HTTPCall, service: Service) -> None:
        """Remove KV that nobody used for the time to live."""
        await self._nothing(call)
        await call.json(_swept("prune", [await one.prune() for one in self._every(service)]))

    def _every(self, service: Service) -> list[Service]:
        """Return the services that keep KV; without any the default one, whose call then raises the error."""
        return [one for one in self._state.registry.services if one.spec.kind == "chat"] or [service]

    async def _nothing(self, call: HTTPCall) -> None:
        parse(NoBody, await read_nothing(call, self._config), self._config)


def _swept(what: str, found: Sequence[Swept]) -> dict[str, Any]:
    return {
        "object": what,
        "checked": sum(one.checked for one in found),
        "removed": sum(one.removed for one in found),
        "removed_bytes": sum(one.bytes for one in found),
        "unreadable": sum(one.unreadable for one in found),
    }
