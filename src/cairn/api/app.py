"""The ASGI application: one layer of access before every route, one place where errors become answers.

Routes (POST bodies are JSON):

    POST /v1/chat/completions   POST /v1/completions         openai/chat.py; these and models also without /v1
    POST /v1/messages           POST /v1/messages/count_tokens    anthropic/messages.py
    /v1/responses, /v1/conversations and below               openai/responses.py, openai/conversations.py
    POST /api/chat              POST /api/generate           ollama/chat.py
    POST /api/embed             POST /api/embeddings         ollama/ollama_embeddings.py
    /api/tags, show, ps, version, pull, delete, copy         ollama/models.py
    GET  /v1/models             GET  /v1/models/{id}         admin/requests.py
    /v1/admin and below, POST /v1/models/load, unload        admin/models.py; where admin_port says so only there
    POST /v1/embeddings|rerank|score, /embed, /embedding      openai/embeddings.py; the first three also without /v1
    POST /tokenize              POST /detokenize             openai/tokenize.py
    POST /completion, /infill, /apply-template, GET /slots, /lora-adapters   llamacpp/completion.py; also input_tokens
    GET  /v1/requests/{id}      POST /v1/requests/{id}/cancel
    GET  /v1/requests/{id}/events                            http/resumable.py
    /v1/agents and below                                     native/agents.py
    /v1/teams and below, /v1/workflows and below             native/teams.py, native/workflows.py
    /v1/collections and below                                native/collections.py
    /v1/files, /v1/vector_stores and below                   openai/files.py, openai/vector_stores.py
    GET  /v1/cache              POST /v1/cache/flush|scrub|prune    admin/requests.py
    GET  /health and below, /livez, /readyz, /version        admin/health.py
    GET  /  GET /web/{file}     GET  /docs  /openapi.json    page.py, openapi.py
    GET  /v1/events             GET  /v1/savings             native/live_events.py
    GET  /props                                              admin/requests.py
    GET  /metrics

Of several models `chat/model_choice.py` chooses the one that answers a call, before its route sees it; `http/limits.py`
says whether the tenant may ask at all.

Whether a path is a route is told before a key is asked for, and by its form alone; any other is a 404
(http/not_found.py).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any

from cairn.api.admin import health
from cairn.api.admin.models import ModelAdmin
from cairn.api.admin.reload import Reload
from cairn.api.admin.requests import Admin, Props, StoredRoutes
from cairn.api.anthropic.messages import Anthropic
from cairn.api.chat.exchange import Exchanges
from cairn.api.chat.model_choice import ModelRouter
from cairn.api.chat.sessions import AgentAttribution
from cairn.api.http.auth import Access, has_tenants, is_admin, preflight, salts
from cairn.api.http.call import BodyBudget, Disconnected, HTTPCall, Receive, Scope, Send, shown, unforeseen
from cairn.api.http.event_log import CallTable, EventLogs
from cairn.api.http.limits import Quotas, RateLimits, deadline_of
from cairn.api.http.not_found import body_of, canonical, no_route
from cairn.api.llamacpp.completion import Llama
from cairn.api.native.agents import AgentRoutes
from cairn.api.native.collections import CollectionRoutes
from cairn.api.native.folders import agents_folder, named
from cairn.api.native.library import Library
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
from cairn.config.config import Config, limits_of
from cairn.frontend.service import Service
from cairn.router.models import Models
from cairn.system.deadline import DEADLINE
from cairn.system.interfaces import Rng
from cairn.system.posix import FACTS, SystemClock, SystemRng
from cairn.system.spans import PRESENT, Spans
from cairn.types.errors import CairnError, MethodNotAllowed, Unavailable, trace

log = logging.getLogger("cairn.api")
access = logging.getLogger("cairn.access")

Endpoint = Callable[[HTTPCall, Service], Awaitable[None]]
PROBES = ("/health", "/metrics", "/livez", "/readyz")
"""Routes, with all below them, that machines ask every few seconds: what they ask is logged only for debugging."""
ADMIN_SIDE = "cairn.admin"
"""Marks the scope of a call that came by the listener for admin routes."""
LEFT = 499
"""The status in the log of a request whose client left before it was answered."""
STARTING_RETRY = 2.0
"""Seconds after which a client may ask again while the model loads."""


class App:
    """The application of one server. `models` are None until the first is loaded; `draining` refuses new work."""

    def __init__(self, models: Models | None, config: Config, rng: Rng | None = None) -> None:
        self.models: Models | None = None
        self.config = config
        self.draining = False
        self._rng = rng or SystemRng()
        self.options = Reload(config)
        self._access, self._clock = Access(config), SystemClock()
        self.tracing = Tracing.of(config, self._clock)
        total = config.max_bodies_mib << 20
        self.bodies = BodyBudget(total, total // 2 if has_tenants(config) else total)
        calls = CallTable(SystemClock())
        self.attribution = AgentAttribution()
        self._folders = named(config, os.environ)
        logs = EventLogs(config.reconnect_grace, config.max_resumable_mib << 20, calls)
        exchanges = Exchanges(config, calls, logs)
        openai = OpenAI(config, exchanges, self.attribution)
        anthropic = Anthropic(config, exchanges, self.attribution)
        ollama = Ollama(config, exchanges, self.attribution)
        admin = self._admin = Admin(config, calls, logs)
        self._ollama_models = OllamaModels(config)
        tokens = TokenRoutes(config)
        self._rates = RateLimits(config, self._clock)
        self._quotas = Quotas(self._clock, limits_of(config), self._kept_by)
        self._model_admin, self._stored = ModelAdmin(self.options), StoredRoutes(config)
        self._health = health.routes() | Page(config, self.described).routes()
        self._agent_routes = AgentRoutes(
            config, exchanges, self.attribution, self._quotas, agents_folder(config, os.environ)
        )
        self._team_routes = TeamRoutes(config, logs, self.attribution)
        self._workflow_routes = WorkflowRoutes(config, logs, self.attribution)
        self._library = Library(config, self.attribution, self._quotas, agents_folder(config, os.environ))
        self._responses = Responses(config, exchanges, logs, self.attribution, self._library)
        self._documents = (
            CollectionRoutes(config, logs, self._library),
            FileRoutes(config, self._library),
            VectorStoreRoutes(config, self._library),
        )
        self._exact: dict[str, dict[str, Endpoint]] = {
            "/v1/chat/completions": {"POST": openai.chat},
            "/v1/completions": {"POST": openai.complete},
            "/v1/messages": {"POST": anthropic.messages},
            "/v1/messages/count_tokens": {"POST": anthropic.count_tokens},
            "/api/chat": {"POST": ollama.chat},
            "/api/generate": {"POST": ollama.generate},
            **Llama(config, exchanges, self.attribution).routes(),
            **OllamaEmbeddings(config).routes(),
            **self._ollama_models.routes(),
            "/v1/models": {"GET": admin.models},
            "/v1/events": {"GET": self._changes().follow},
            "/v1/savings": {"GET": SavingsRoutes(self.attribution).show},
            "/tokenize": {"POST": tokens.tokenize},
            "/detokenize": {"POST": tokens.detokenize},
            "/props": {"GET": Props(config).show},
            "/metrics": {"GET": admin.metrics},
            **Embeddings(config).routes(),
            **self._stored.routes(),
            **self._model_admin.routes(),
        }
        self.options.watch(self._configure)
        if models is not None:
            self.open(models)

    def _configure(self, config: Config) -> None:
        """These options hold from now on, as far as they can change."""
        self.config = config
        self._access.configure(config)
        total = config.max_bodies_mib << 20
        self.bodies.share = total // 2 if has_tenants(config) else total
        self._rates.configure(config)
        self._quotas.limits = limits_of(config)
        if (agents := self.attribution.agents) is not None:
            agents.bound(limits_of(config), salts(config))

    def open(self, models: Models) -> None:
        """From now on requests are served, by these."""
        self.models, self._router = models, ModelRouter(models, self.attribution)
        models.loader.tell(self._rates.used)
        every = (self._admin, self._model_admin, self._ollama_models, self._stored, self._library)
        for routes in every:
            routes.registry = models

    @property
    def service(self) -> Service | None:
        """The one that answers where nothing says which; None before there is any."""
        return None if self.models is None else self.models.services.first

    @service.setter
    def service(self, service: Service) -> None:
        """The only model of the server."""
        self.open(Models.of(service, self.config))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI 3. Only HTTP is served; a lifespan is acknowledged and does nothing."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            raise RuntimeError(f"a {scope['type']} connection is not served")
        number = self._rng.bits64() if self.service is None else self.service.next_id()
        call = HTTPCall(scope, receive, send, number, self.bodies, self.config.max_body_mib << 20)
        began, failed = time.monotonic(), ""
        traced = self.tracing.begin(call) if self.tracing is not None and not _is_probe(call.path) else None
        spans = traced.spans if traced is not None else Spans() if self.config.log_format == "json" else None
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
        self._access.cors(call)
        if self._access.is_preflight(call):
            await call.respond(200, b"", preflight(call))
            return
        self._access.check_host(call)
        call.path = canonical(call.path)
        answering = self._health.get(call.path)
        if answering is None and (self._methods(call.path) is None or not self._is_here(call)):
            host = (call.header(b"host") or b"").decode("latin-1")
            raise no_route(call.path, host, self._served)
        self._access.check(call)
        if answering is not None:
            _allow(call, {"GET", "HEAD"})
            await answering(call, self._state())
            return
        endpoint = self._route(call)
        if self.models is None:
            raise Unavailable("the model is still being loaded; ask again shortly", retry_after=STARTING_RETRY)
        if self.draining and call.scope["method"] == "POST" and not call.path.endswith("/cancel"):
            raise Unavailable("the server is shutting down", retry_after=max(1.0, self.config.shutdown_grace))
        DEADLINE.set(deadline_of(call, self._clock))  # of this call's task, and of those that it starts
        with self._rates.counted(call):
            async with self._quotas.arriving(call), self._router.chosen(call) as service:
                await endpoint(call, service)

    def _state(self) -> health.ServerHealth:
        kept = self._library.troubles()
        troubles, refuses = [*self.attribution.troubles(), *kept], self.attribution.refuses or bool(kept)
        return health.ServerHealth(self.models, self.draining, troubles, self._folders, refuses=refuses)

    def _is_here(self, call: HTTPCall) -> bool:
        """Whether a route answers on the listener that a call came by: admin routes have one of their own, if any."""
        if self.config.admin_port is None:
            return True
        return is_admin(call.path) == (ADMIN_SIDE in call.scope)

    async def _kept_by(self, tenant: str) -> int:
        """Bytes on the disk that are a tenant's."""
        agents = self.attribution.agents
        kept = 0 if agents is None else await agents.bytes_of(tenant)
        return kept + await self._library.bytes_of(tenant)

    def _changes(self) -> ChangeFeeds:
        return ChangeFeeds(
            self.config,
            self._access,
            self.attribution,
            self._rng,
            lambda: list(self.models.services) if self.models is not None else [],
            lambda: self.draining,
        )

    def described(self, path: str) -> dict[str, str]:
        """What each method of a route does, as its docstring says; nothing for what is no route."""
        if path in self._health:
            return {"GET": self._health[path].__doc__ or ""}
        return {method: endpoint.__doc__ or "" for method, endpoint in (self._methods(path) or {}).items()}

    @property
    def fixed_paths(self) -> list[str]:
        """Every route without an id in its path."""
        return [*self._health, *self._exact]

    def _methods(self, path: str) -> dict[str, Endpoint] | None:
        """The methods of a route, or None for what is none."""
        return self._exact.get(path) or self._admin.routes(path) or self._more(path)

    def _more(self, path: str) -> dict[str, Endpoint] | None:
        """The methods of routes that have an id in their path."""
        rooms = (self._agent_routes, self._team_routes, self._workflow_routes, *self._documents, self._responses)
        return next((found for room in rooms if (found := room.routes(path)) is not None), None)

    def _served(self, path: str) -> bool:
        return path in self._health or self._methods(path) is not None

    def _route(self, call: HTTPCall) -> Endpoint:
        methods = self._methods(call.path) or {}
        method = call.scope["method"]
        _allow(call, {*methods, *(("HEAD",) if "GET" in methods else ())})
        return methods["GET" if method == "HEAD" else method]

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
        """ASGI 3."""
        await self._app({**scope, ADMIN_SIDE: True}, receive, send)


def build_app(service: Service | None, config: Config) -> App:
    """The ASGI application for a service; with None it answers 503 until `app.open` gives it models."""
    return App(None if service is None else Models.of(service, config), config)


def _allow(call: HTTPCall, methods: set[str]) -> None:
    method = call.scope["method"]
    if method not in methods:
        raise MethodNotAllowed(f"{call.path} is not for {method[:20]}", field=", ".join(sorted(methods)))


def _is_probe(path: str) -> bool:
    return any(path == route or path.startswith(f"{route}/") for route in PROBES)


def _note(call: HTTPCall, seconds: float, spans: Spans | None, trace_id: str, failed: str) -> None:
    """A line in the access log. Nothing that was asked or answered stands in it, and no query."""
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
    """What a line has as fields of its own. A tenant is its name, never its key."""
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
