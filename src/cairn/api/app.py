"""The ASGI application: one layer of access before every route, one place where errors become answers.

Each dialect has its table of routes (`http/routes.py`): openai/, anthropic/, ollama/ and llamacpp/ those of other
servers, native/ agents, teams, workflows and collections, admin/ models, requests and health; page.py serves the page,
and http/event_log.py what streams remember. Models, and those of embeddings, are also found without /v1.

`chat/model_choice.py` chooses the model that answers a call before its route sees it; `http/rate_limits.py` enforces
the tenant's limits.

A path that is no route gets a 404 before a key is asked for, judged by its form alone (http/not_found.py).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from typing import Any

from cairn.api.admin import health
from cairn.api.admin.adapters import AdapterAdmin
from cairn.api.admin.kv_events import BlockEvents
from cairn.api.admin.metrics import MetricsRoute
from cairn.api.admin.model_list import ModelList
from cairn.api.admin.models import ModelAdmin
from cairn.api.admin.props import Props
from cairn.api.admin.requests import RequestRoutes
from cairn.api.admin.stored_kv import StoredRoutes
from cairn.api.anthropic.messages import Anthropic
from cairn.api.chat.model_choice import ModelRouter
from cairn.api.chat.state import ServerState
from cairn.api.data_folders import agents_folder, named
from cairn.api.http.auth import has_tenants, preflight
from cairn.api.http.call import BodyBudget, Disconnected, HTTPCall, Receive, Scope, Send, shown, unforeseen
from cairn.api.http.not_found import body_of, canonical, no_route
from cairn.api.http.rate_limits import deadline_of
from cairn.api.http.routes import Route, Router
from cairn.api.llamacpp.completion import Llama
from cairn.api.native.agents import AgentRoutes
from cairn.api.native.collections import CollectionRoutes
from cairn.api.native.live_events import ChangeFeeds, SavingsRoutes
from cairn.api.native.teams import TeamRoutes
from cairn.api.native.workflows import WorkflowRoutes
from cairn.api.ollama.chat import Ollama, OllamaEmbeddings
from cairn.api.ollama.models import OllamaModels
from cairn.api.openai.chat import OpenAI
from cairn.api.openai.embeddings import Embeddings
from cairn.api.openai.files import FileRoutes
from cairn.api.openai.responses import Responses
from cairn.api.openai.tokenize import TokenRoutes
from cairn.api.openai.vector_stores import VectorStoreRoutes
from cairn.api.page import Page
from cairn.api.tracing import Tracing
from cairn.config.config import Config
from cairn.frontend.service import Service
from cairn.served_models.loaded_models import Models
from cairn.system.deadline import DEADLINE
from cairn.system.interfaces import Rng
from cairn.system.posix import FACTS, SystemRng
from cairn.system.spans import PRESENT, Spans
from cairn.types.errors import CairnError, MethodNotAllowed, Unavailable, trace

log = logging.getLogger("cairn.api")
access = logging.getLogger("cairn.access")

PROBES = ("/health", "/metrics", "/livez", "/readyz")
"""Routes, with all below them, that machines ask every few seconds. Their calls are logged only for debugging."""
ADMIN_SIDE = "cairn.admin"
"""Marks the scope of a call that came by the listener for admin routes."""
LEFT = 499
"""The status in the log of a request whose client left before it was answered."""


class App:
    """The application of one server, which serves requests once its `state` has models."""

    def __init__(self, models: Models | None, config: Config, rng: Rng | None = None) -> None:
        state = self.state = ServerState(config, rng or SystemRng(), agents_folder(config, os.environ))
        self.tracing = Tracing.of(config, state.clock)
        total = config.max_bodies_mib << 20
        self.bodies = BodyBudget(total, total // 2 if has_tenants(config) else total)
        self._folders = named(config, os.environ)
        tables = (
            *(OpenAI, Responses, Anthropic, Embeddings, AgentRoutes, TeamRoutes, WorkflowRoutes, CollectionRoutes),
            *(FileRoutes, VectorStoreRoutes, ChangeFeeds, SavingsRoutes, ModelAdmin, AdapterAdmin, StoredRoutes),
            *(Ollama, OllamaEmbeddings, OllamaModels, ModelList, RequestRoutes, MetricsRoute),
            *(Llama, TokenRoutes, Props),
        )
        page = Page(config, self.described)
        self._kv = BlockEvents(state)
        self.router = Router(
            [
                *(route for table in tables for route in table(state).routes()),
                *self._kv.routes(),
                *page.routes(),
                *health.routes(page=config.page),
            ]
        )
        state.options.watch(self._configure)
        if models is not None:
            state.open(models)

    def _configure(self, config: Config) -> None:
        total = config.max_bodies_mib << 20
        self.bodies.share = total // 2 if has_tenants(config) else total

    def described(self) -> bytes:
        """Return /openapi.json."""
        from cairn.api.openapi import document  # pydantic's schemas: only when asked for

        return document(self.router.routes)

    @property
    def service(self) -> Service | None:
        """The service that answers calls without a model's name; None before there is any."""
        return None if self.state.models is None else self.state.models.services.first

    @service.setter
    def service(self, service: Service) -> None:
        self.state.open(Models.of(service, self.state.config))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a call by ASGI 3. Only HTTP is served; a lifespan is acknowledged and does nothing."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            raise RuntimeError(f"a {scope['type']} connection is not served")
        number = self.state.rng.bits64() if self.service is None else self.service.next_id()
        call = HTTPCall(scope, receive, send, number, self.bodies, self.state.config.max_body_mib << 20)
        began, failed = time.monotonic(), ""
        traced = self.tracing.begin(call) if self.tracing is not None and not _is_probe(call.path) else None
        spans = traced.spans if traced is not None else Spans() if self.state.config.log_format == "json" else None
        if spans is not None:
            PRESENT.set(spans)  # of this call's task, and of those that it starts
        try:
            await self._answer(call)
        except Disconnected:
            log.debug("request %s: the client left", call.id)
        except CairnError as error:
            failed = error.code
            await self._fail(call, error)
        except Exception as error:
            log.error("request %s: %s", call.id, trace(error))
            failed = CairnError.code
            await self._fail(call, unforeseen(error, call.id))
        finally:
            call.release()
            if traced is not None:
                traced.end(call, failed)
        _note(call, time.monotonic() - began, spans, "" if traced is None else traced.id, failed)

    async def _answer(self, call: HTTPCall) -> None:
        state, access = self.state, self.state.access
        access.cors(call)
        if access.is_preflight(call):
            await call.respond(200, b"", preflight(call))
            return
        access.check_host(call.scope)
        call.path = canonical(call.path)
        methods = self.router.find(call.path)
        if methods is None or not self._is_here(call, methods):
            host = (call.header(b"host") or b"").decode("latin-1")
            raise no_route(call.path, host, lambda path: self.router.find(path) is not None)
        first = next(iter(methods.values()))
        if first.listed:
            call.route = first.public_path
        access.check(call, first.access)
        route = _route(call, methods)
        if route.always:
            await route.endpoint(call, self._health())
            return
        registry = state.registry
        if state.draining and call.scope["method"] == "POST" and not call.path.endswith("/cancel"):
            raise Unavailable("the server is shutting down", retry_after=max(1.0, state.config.shutdown_grace))
        self._kv.attend(call)
        DEADLINE.set(deadline_of(call, state.clock))  # of this call's task, and of those that it starts
        with state.rates.counted(call, admin=route.access == "admin"):
            await state.attribution.refresh(call)
            async with (
                state.quotas.arriving(call, keeps=route.keeps, upload=route.upload),
                ModelRouter(registry, state.attribution).chosen(call, route.model) as service,
            ):
                await route.endpoint(call, service)

    def _health(self) -> health.ServerHealth:
        state = self.state
        lost = state.library.troubles()
        troubles, refuses = [*state.attribution.troubles(), *lost], state.attribution.refuses or bool(lost)
        return health.ServerHealth(
            state.models, state.draining, troubles, self._folders, state.config.role, refuses=refuses
        )

    def _is_here(self, call: HTTPCall, methods: Mapping[str, Route]) -> bool:
        """Return whether a route answers on the call's listener: admin routes have one of their own, if any."""
        route = next(iter(methods.values()))
        if self.state.config.admin_port is None or route.always:
            return True
        return (route.access == "admin") == (ADMIN_SIDE in call.scope)

    async def _fail(self, call: HTTPCall, error: CairnError) -> None:
        if call.started:
            return
        headers = [(b"www-authenticate", b"Bearer")] if error.status == 401 else []
        if error.status == 405:
            headers.append((b"allow", str(error.field).encode()))
            error.field = None
        await call.fail(error, headers, body_of(call.path, error, call.id))


class AdminSide:
    """The same application on the listener for admin routes."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a call by ASGI 3."""
        await self._app({**scope, ADMIN_SIDE: True}, receive, send)


def build_app(service: Service | None, config: Config) -> App:
    """Return the application for a service; without one it answers 503 until `app.state.open` gives it models."""
    return App(None if service is None else Models.of(service, config), config)


def _route(call: HTTPCall, methods: Mapping[str, Route]) -> Route:
    """Return the route of the call's method; raise MethodNotAllowed if there is none. HEAD is answered as GET."""
    method = call.scope["method"]
    route = methods.get("GET" if method == "HEAD" else method)
    if route is None:
        allowed = {*methods, *(("HEAD",) if "GET" in methods else ())}
        raise MethodNotAllowed(f"{call.path} is not for {method[:20]}", field=", ".join(sorted(allowed)))
    return route


def _is_probe(path: str) -> bool:
    return any(path == route or path.startswith(f"{route}/") for route in PROBES)


def _note(call: HTTPCall, seconds: float, spans: Spans | None, trace_id: str, failed: str) -> None:
    """Write a line to the access log. It holds nothing that was asked or answered, and no query."""
    level = logging.DEBUG if _is_probe(call.path) else logging.INFO
    if not access.isEnabledFor(level):
        return
    facts = {} if spans is None else _facts(call, seconds, spans, trace_id, failed)
    parts = [f"{shown(call.scope['method'])} {shown(call.path)} {call.status or LEFT}", f"{1000 * seconds:.0f} ms"]
    if call.tokens is not None:
        parts.append("{}+{} tokens".format(*call.tokens))
    if call.ended:
        parts.append(f"ended early: {call.ended}")
    parts.append(f"request {call.id}" + (f" ({call.name})" if call.name is not None else ""))
    access.log(level, "%s", ", ".join([*parts, f"tenant {call.tenant}"]), extra={FACTS: facts})


def _facts(call: HTTPCall, seconds: float, spans: Spans, trace_id: str, failed: str) -> dict[str, Any]:
    """Return the log line's own fields. A tenant is its name, never its key."""
    found: dict[str, Any] = {
        "request_id": call.id,
        "client_request_id": call.name,
        "trace_id": trace_id or None,
        "tenant": call.tenant,
        "model": call.model or None,
        "method": shown(call.scope["method"]),
        "path": shown(call.path),
        "status": call.status or LEFT,
        "error": failed or call.ended or None,
        "duration_ms": round(1000 * seconds, 1),
    }
    if call.tokens is not None:
        found |= {"prompt_tokens": call.tokens[0], "completion_tokens": call.tokens[1]}
    found |= {f"{name}_ms": round(1000 * spent, 1) for name, spent in spans.seconds.items()}
    return {name: value for name, value in found.items() if value is not None}


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": message["type"] + ".complete"})
        if message["type"] == "lifespan.shutdown":
            return
