"""Stored KV: what there is of it, and orders to the stores. Admin routes: they are about all tenants at once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from cairn.api.agent_schemas import NoBody
from cairn.api.limits import read_nothing
from cairn.api.parse import parse
from cairn.api.reply import Call
from cairn.config import Config
from cairn.figures import Swept
from cairn.service.service import Service

Endpoint = Callable[[Call, Service], Awaitable[None]]


class StoredRoutes:
    """The routes of one server. The orders take no body, or an empty object."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def routes(self) -> dict[str, dict[str, Endpoint]]:
        """Every route, by path and method."""
        return {
            "/v1/cache": {"GET": self.stats},
            "/v1/cache/flush": {"POST": self.flush},
            "/v1/cache/scrub": {"POST": self.scrub},
            "/v1/cache/prune": {"POST": self.prune},
        }

    async def stats(self, call: Call, service: Service) -> None:
        """GET /v1/cache: the stores below the pool, at most about a second old; null where there is no such store."""
        body: dict[str, Any] = msgspec.to_builtins(service.kv())
        await call.json({"object": "cache", "model": service.name} | body)

    async def flush(self, call: Call, service: Service) -> None:
        """POST /v1/cache/flush: answers when all KV that was to be stored is durable; 503 if a part was given up."""
        await self._nothing(call)
        await service.flush()
        await self.stats(call, service)

    async def scrub(self, call: Call, service: Service) -> None:
        """POST /v1/cache/scrub: read and check every stored chunk; damaged ones go."""
        await self._nothing(call)
        await call.json(_swept("scrub", await service.scrub()))

    async def prune(self, call: Call, service: Service) -> None:
        """POST /v1/cache/prune: remove what nobody used for the time to live."""
        await self._nothing(call)
        await call.json(_swept("prune", await service.prune()))

    async def _nothing(self, call: Call) -> None:
        parse(NoBody, await read_nothing(call, self._config), self._config)


def _swept(what: str, found: Swept) -> dict[str, Any]:
    figures = {"checked": found.checked, "removed": found.removed, "removed_bytes": found.bytes}
    return {"object": what} | figures | {"unreadable": found.unreadable}
