"""Loading, unloading and swapping models of a running server: for its owner.

GET  /v1/admin/models                            all models, what they take and what is left
POST /v1/admin/models/load    {"model"}          answered when it is loaded; also /v1/models/load (llama-server)
POST /v1/admin/models/unload  {"model", "grace"}     also /v1/models/unload
POST /v1/admin/models/swap    {"model", "to", "grace"}
POST /v1/admin/reload                            options that can change, read again
POST /v1/admin/drain          {"grace"}          no new requests from now on; the process stays, and is not ready
"""

from __future__ import annotations

import asyncio
import math
from typing import Any

from cairn.api.chat.parse import parse
from cairn.api.chat.state import ServerState
from cairn.api.http.auth import has_keys, is_local
from cairn.api.http.body import Body, Number, read_json, read_nothing
from cairn.api.http.call import HTTPCall, Watch
from cairn.api.http.routes import Route
from cairn.api.native.agent_schemas import NoBody
from cairn.config.config import Config
from cairn.frontend.service import DRAINED, Service
from cairn.served_models.served_model import ServedModel
from cairn.types.errors import Forbidden, InvalidRequest

MOST_GRACE = 3600.0
"""Seconds that requests may be waited for."""
SWAP_GRACE = 20.0
"""Default of `grace` for a swap. Calls that come meanwhile wait that long too."""
MOST_NAME = 4096
"""Characters of a model's name or place: no path is longer."""


class LoadBody(Body):
    """Which model."""

    model: str


class UnloadBody(Body):
    """Which model, and how many seconds its requests may go on."""

    model: str
    grace: Number = None


class SwapBody(Body):
    """The model whose names move, and their new target.

    `to` is a place, a hub id, or a model of the server that is not loaded.
    """

    model: str
    to: str
    grace: Number = None


class DrainBody(Body):
    """How many seconds requests may go on."""

    grace: Number = None


class ModelAdmin:
    """The routes."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def _config(self) -> Config:
        """The options as they are now."""
        return self._state.config

    def routes(self) -> list[Route]:
        """Return the table of these routes."""
        return [
            Route("GET", "/v1/admin/models", self.list, access="admin"),
            Route("POST", "/v1/admin/models/load", self.load, LoadBody, access="admin"),
            Route("POST", "/v1/admin/models/unload", self.unload, UnloadBody, access="admin"),
            Route("POST", "/v1/admin/models/swap", self.swap, SwapBody, access="admin"),
            Route("POST", "/v1/admin/drain", self.drain, DrainBody, access="admin"),
            Route("POST", "/v1/admin/reload", self.reload, NoBody, access="admin"),
            Route("POST", "/v1/models/load", self.load, LoadBody, access="admin"),
            Route("POST", "/v1/models/unload", self.unload, UnloadBody, access="admin"),
        ]

    async def list(self, call: HTTPCall, service: Service) -> None:
        """List all models, the memory they take and the memory that is left."""
        models = self._state.registry
        left = await asyncio.to_thread(models.loader.left)
        await call.json(
            {
                "object": "list",
                "data": [self._shown(model) for model in models.models],
                "memory_bytes": models.loader.budget,
                "memory_left_bytes": max(0, left),
                "max_loaded": self._config.max_loaded,
                "draining": models.draining,
            }
        )

    async def load(self, call: HTTPCall, service: Service) -> None:
        """Load a model."""
        body = parse(LoadBody, await self._read(call), self._config, call)
        model = self._find(body.model)
        await self._state.registry.load(model)
        await self._done(call, model)

    async def unload(self, call: HTTPCall, service: Service) -> None:
        """Unload a model. Its requests may go on for `grace` seconds, by default shutdown_grace."""
        body = parse(UnloadBody, await self._read(call), self._config, call)
        model = self._find(body.model)
        await self._state.registry.unload(model, self._grace(body.grace, self._config.shutdown_grace))
        await self._done(call, model)

    async def swap(self, call: HTTPCall, service: Service) -> None:
        """Put another model behind a name. Answered when the new model answers, or with an error when the old one does.

        If the client leaves before, the swap ends and the old model stays.
        """
        body = parse(SwapBody, await self._read(call), self._config, call)
        model, grace = self._find(body.model), self._grace(body.grace, SWAP_GRACE)
        check_name(body.to, "to")
        async with Watch(call) as watch:
            await self._state.registry.swap(model, body.to, grace)
            watch.stop()
        if watch.left:
            call.ended = "client_left"
            return
        await self._done(call, model)

    async def drain(self, call: HTTPCall, service: Service) -> None:
        """Refuse new requests from now on."""
        self._check_owner()
        body = parse(DrainBody, await read_nothing(call, self._config), self._config, call)
        requests, grace = self._state.registry.requests, self._grace(body.grace, self._config.shutdown_grace)
        self._state.registry.leaving = DRAINED
        task = asyncio.create_task(self._state.registry.drain(grace, DRAINED))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await call.json({"object": "drain", "draining": True, "requests": requests})

    async def reload(self, call: HTTPCall, service: Service) -> None:
        """Read the options again. Returns which hold now, and which need a restart."""
        self._check_owner()
        parse(NoBody, await read_nothing(call, self._config), self._config)
        found = self._state.options(self._state.registry)
        unchanged = [{"option": name, "why": why} for name, why in found.unchanged.items()]
        await call.json({"object": "reload", "changed": found.changed, "unchanged": unchanged})

    async def _done(self, call: HTTPCall, model: ServedModel) -> None:
        await call.json(self._shown(model) | {"success": True})

    async def _read(self, call: HTTPCall) -> dict[str, Any]:
        self._check_owner()
        return await read_json(call, self._config)

    def _find(self, name: str) -> ServedModel:
        """Return the model of exactly that name, even if the server answers to any."""
        check_name(name, "model")
        if not self._state.registry.has(name):
            raise self._state.registry.unknown(name)
        return self._state.registry.find(name)

    def _grace(self, seconds: float | None, default: float) -> float:
        if seconds is None:
            return default
        if not 0 <= seconds <= MOST_GRACE:
            raise InvalidRequest(f"grace must be 0 to {MOST_GRACE:g} seconds", field="grace")
        return float(seconds)

    def _check_owner(self) -> None:
        check_owner(self._config)

    def _shown(self, model: ServedModel) -> dict[str, Any]:
        loaded, expires = model.loaded, self._state.registry.expires_in(model)
        stats = loaded.service.stats() if loaded is not None else None
        return {
            "id": model.name,
            "object": "model",
            "state": model.state,
            "kind": model.kind or None,
            "model": model.reference,
            "names": sorted(model.names),
            "pinned": model.pinned,
            "memory_bytes": model.held or None,
            "context": loaded.service.info.context if loaded is not None else None,
            "running": stats.running if stats is not None else 0,
            "waiting": (stats.waiting if stats is not None else 0) + model.waiting,
            "expires_in": None if expires == math.inf else round(expires, 1),
            "load_seconds": round(model.load_seconds, 2),
            "loads": model.loads,
            "failures": model.failures,
            "swaps": model.swaps,
            "error": model.failure or None,
            "troubles": loaded.service.troubles() if loaded is not None else [],
        }


def check_owner(config: Config) -> None:
    """Raise Forbidden if anybody from elsewhere could change models."""
    host = config.host if config.admin_port is None else config.admin_host
    if not has_keys(config) and not is_local(host) and config.admin_key is None:
        raise Forbidden("models are changed over HTTP only with the admin key, or on this machine alone")


def check_name(name: str, field: str) -> None:
    """Raise InvalidRequest for a text that can be no model's name or place."""
    if not name.strip() or "\0" in name:
        raise InvalidRequest(
            f"{field} must name a model: a name of this server's, a folder or a .gguf file", field=field
        )
    if len(name) > MOST_NAME:
        raise InvalidRequest(f"{field} has {len(name)} characters; the limit is {MOST_NAME}", field=field)
