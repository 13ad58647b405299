"""The ASGI application: one layer of access before every route, one place where errors become answers.

Routes (POST bodies are JSON):

    POST /v1/chat/completions   POST /v1/completions         openai.py
    GET  /v1/models             GET  /v1/models/{id}         admin.py
    POST /tokenize              POST /detokenize
    GET  /v1/requests/{id}      POST /v1/requests/{id}/cancel
    GET  /v1/requests/{id}/events                            resumable.py
    /v1/agents and below                                     agents.py
    GET  /v1/cache              POST /v1/cache/flush|scrub|prune    stored.py
    GET  /health/live           GET  /health/ready
    GET  /metrics
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Awaitable, Callable

from cairn.api.admin import Admin
from cairn.api.agents import AgentRoutes
from cairn.api.auth import Access, has_tenants, preflight
from cairn.api.body_budget import BodyBudget
from cairn.api.folders import agents_folder, named
from cairn.api.openai import OpenAI
from cairn.api.registry import Registry
from cairn.api.reply import Call, Disconnected, Receive, Scope, Send, internal, shown
from cairn.api.resumable import Tapes
from cairn.api.stored import StoredRoutes
from cairn.api.ties import Ties
from cairn.config import Config
from cairn.errors import CairnError, MethodNotAllowed, NotFound, Unavailable, trace
from cairn.seams import Rng
from cairn.service.service import Service
from cairn.system import SystemClock, SystemRng

log = logging.getLogger("cairn.api")

Endpoint = Callable[[Call, Service], Awaitable[None]]
STARTING_RETRY = 2.0
"""Seconds after which a client may ask again while the model loads."""


class App:
    """The application of one server. `service` is None until the model is loaded; `draining` refuses new work."""

    def __init__(self, service: Service | None, config: Config, rng: Rng | None = None) -> None:
        self.service = service
        self.config = config
        self.draining = False
        self._rng = rng or SystemRng()
        self._access = Access(config)
        total = config.max_bodies_mib << 20
        self.bodies = BodyBudget(total, total // 2 if has_tenants(config) else total)
        registry = Registry(SystemClock())
        self.ties = Ties()
        self._folders = named(config, os.environ)
        tapes = Tapes(config.reconnect_grace, config.max_resumable_mib << 20)
        openai = OpenAI(config, registry, tapes, self.ties)
        admin = self._admin = Admin(config, registry, tapes)
        self._agent_routes = AgentRoutes(config, tapes, self.ties, agents_folder(config, os.environ))
        self._exact: dict[str, dict[str, Endpoint]] = {
            "/v1/chat/completions": {"POST": openai.chat},
            "/v1/completions": {"POST": openai.complete},
            "/v1/models": {"GET": admin.models},
            "/tokenize": {"POST": admin.tokenize},
            "/detokenize": {"POST": admin.detokenize},
            "/metrics": {"GET": admin.metrics},
            **StoredRoutes(config).routes(),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI 3. Only HTTP is served; a lifespan is acknowledged and does nothing."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            raise RuntimeError(f"a {scope['type']} connection is not served")
        number = self._rng.bits64() if self.service is None else self.service.next_id()
        call = Call(scope, receive, send, number, self.bodies)
        began = time.monotonic()
        try:
            await self._answer(call)
        except Disconnected:
            log.debug("request %s: the client left", call.id)
        except CairnError as error:
            await self._fail(call, error)
        except Exception as error:
            log.error("request %s: %s", call.id, trace(error))
            await self._fail(call, internal(call.id))
        finally:
            call.release()
        log.debug("request %s: %d after %.3f s", call.id, call.status, time.monotonic() - began)

    async def _answer(self, call: Call) -> None:
        self._access.cors(call)
        if self._access.is_preflight(call):
            await call.respond(204, b"", preflight(call))
            return
        self._access.check(call)
        if call.path == "/health/live":
            _allow(call, {"GET", "HEAD"})
            await call.json({"status": "live"})
            return
        if call.path == "/health/ready":
            _allow(call, {"GET", "HEAD"})
            await self._admin.ready(call, self.service, self.draining, self.ties.troubles(), self._folders)
            return
        endpoint = self._route(call)
        if self.service is None:
            raise Unavailable("the model is still being loaded; ask again shortly", retry_after=STARTING_RETRY)
        if self.draining and call.scope["method"] == "POST" and not call.path.endswith("/cancel"):
            raise Unavailable("the server is shutting down", retry_after=max(1.0, self.config.shutdown_grace))
        await endpoint(call, self.service)

    def _route(self, call: Call) -> Endpoint:
        path = call.path
        methods = self._exact.get(path) or self._admin.routes(path) or self._agent_routes.routes(path)
        if methods is None:
            raise NotFound(f"there is no route {shown(call.path)}")
        method = call.scope["method"]
        _allow(call, {*methods, *(("HEAD",) if "GET" in methods else ())})
        return methods["GET" if method == "HEAD" else method]

    async def _fail(self, call: Call, error: CairnError) -> None:
        if call.started:
            return
        headers = [(b"www-authenticate", b"Bearer")] if error.status == 401 else []
        if error.status == 405:
            headers.append((b"allow", str(error.field).encode()))
            error.field = None
        await call.fail(error, headers)


def build_app(service: Service | None, config: Config) -> App:
    """The ASGI application for a service; with None it answers 503 until `app.service` is set."""
    return App(service, config)


def _allow(call: Call, methods: set[str]) -> None:
    method = call.scope["method"]
    if method not in methods:
        raise MethodNotAllowed(f"{call.path} is not for {method[:20]}", field=", ".join(sorted(methods)))


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": message["type"] + ".complete"})
        if message["type"] == "lifespan.shutdown":
            return
