"""Stored KV: what there is of it, and orders to the stores. Admin routes: they are about all tenants at once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from cairn.api.reply import Call
from cairn.service.service import Service
from cairn.types import Swept

Endpoint = Callable[[Call, Service], Awaitable[None]]


def routes() -> dict[str, dict[str, Endpoint]]:
    """Every route, by path and method."""
    return {
        "/v1/cache": {"GET": stats},
        "/v1/cache/flush": {"POST": flush},
        "/v1/cache/scrub": {"POST": scrub},
        "/v1/cache/prune": {"POST": prune},
    }


async def stats(call: Call, service: Service) -> None:
    """GET /v1/cache: the stores below the pool, at most about a second old; null where there is no such store."""
    body: dict[str, Any] = msgspec.to_builtins(service.kv())
    await call.json({"object": "cache", "model": service.name} | body)


async def flush(call: Call, service: Service) -> None:
    """POST /v1/cache/flush: answers when all KV that was to be stored is durable; 503 if a part was given up."""
    await service.flush()
    await stats(call, service)


async def scrub(call: Call, service: Service) -> None:
    """POST /v1/cache/scrub: read and check every stored chunk; damaged ones go."""
    await call.json(_swept("scrub", await service.scrub()))


async def prune(call: Call, service: Service) -> None:
    """POST /v1/cache/prune: remove what nobody used for the time to live."""
    await call.json(_swept("prune", await service.prune()))


def _swept(what: str, found: Swept) -> dict[str, Any]:
    return {"object": what, "checked": found.checked, "removed": found.removed, "removed_bytes": found.bytes}
