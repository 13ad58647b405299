"""Which model answers a call: the one that its body names, whatever the dialect, or its path, or what it is about.

A route that uses a model holds a lease on it until the call is answered: the model stays loaded so long. Routes that
use none hold none, so a swap or an unload does not wait for them. With one model no body is read before its route does.
"""

from __future__ import annotations

import codecs
import contextlib
import math
import re
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from cairn.api.chat.sessions import AgentAttribution
from cairn.api.http.call import HTTPCall
from cairn.api.http.call_table import parse_id
from cairn.api.native.agent_schemas import query
from cairn.frontend.service import Service
from cairn.router.models import Models
from cairn.router.served_model import ServedModel
from cairn.types.errors import InvalidRequest

KINDS = {
    "/v1/embeddings": "embed",
    "/embed": "embed",
    "/embedding": "embed",
    "/api/embed": "embed",
    "/api/embeddings": "embed",
    "/v1/rerank": "rerank",
    "/v2/rerank": "rerank",
    "/v1/reranking": "rerank",
    "/v1/score": "rerank",
}
"""Which kind of model a route is for, where its body names none; all others are for chats."""
TURNS = re.compile(r"/v1/agents/([^/]+)/(turns|resume|prefetch)")
"""Routes of an agent that need its model to be loaded."""
WORK = re.compile(r"/v1/(teams|workflows/runs)/([^/]+)/(rounds|votes|resume)")
"""Routes that need the model of a team or a run to be loaded."""
WITHOUT_MODEL = re.compile(
    r"/v1/(?:teams/[^/]+/(?:messages|tool_results|fork|rollback|interrupt)|workflows/(?:check|runs/[^/]+/interrupt)"
    r"|collections(?:/[^/]+(?:/documents|/search))?|files|vector_stores(?:/.+)?"
    r"|(?:models|admin|cache|conversations|agents)/.+|conversations)"
    r"|/api/(?:pull|delete|copy|show)"
)
"""Routes for POST that use no model, or, as those of collections do, find theirs themselves."""
AGENTS = re.compile(r"/v1/agents/([^/]+)(?:/[a-z]+)?")
REQUESTS = re.compile(r"/v1/(?:requests|responses)/(?!(?:input_tokens|compact)\Z)([^/]+)(?:/[a-z_]+)?")
"""A request or a stored response, by its id."""
READ_OF_MODEL = ("/props", "/slots")
"""Routes for GET that describe a model. All others for GET use none: some, as /v1/events, are followed for hours."""
OLLAMA = "/api/"
"""What the paths of Ollama's API begin with. Its names have no case."""
DURATION = re.compile(r"([-+]?)((?:[0-9.]{1,36}(?:ns|us|\u00b5s|\u03bcs|ms|s|m|h)){1,8}|[0-9.]{1,18})")
"""A duration as Go writes one, such as 1h30m0s, or a number of seconds."""
PART = re.compile(r"([0-9.]+)([a-z\u00b5\u03bc]*)")
UNITS = {
    "ns": 1e-9,
    "us": 1e-6,
    "\u00b5s": 1e-6,
    "\u03bcs": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "m": 60.0,
    "h": 3600.0,
    "": 1.0,
}


class _Named(msgspec.Struct):
    """What is looked at of a body before its route reads it: the rest is passed over."""

    model: Any = None
    keep_alive: Any = None


_decode = msgspec.json.Decoder(_Named).decode


class ModelRouter:
    """Gives each call its model."""

    def __init__(self, models: Models, attribution: AgentAttribution) -> None:
        self._models, self._attribution = models, attribution

    @contextlib.asynccontextmanager
    async def chosen(self, call: HTTPCall) -> AsyncIterator[Service]:
        """While the call is answered: the service of its model, which is loaded first where it has to be.

        UnknownModel for a name that no model has, Unavailable where it cannot be loaded in time.
        """
        if not uses_model(call.path, call.scope["method"]):
            service = self._about(call) or self._models.services.first
            call.identity, call.model = service.spec.identity, service.name
            yield service
            return
        model, keep = (await self._choose(call)) if self._models.several else (self._models.models[0], None)
        began, there = time.monotonic(), model.loaded is not None
        async with self._models.using(model) as service:
            call.load_seconds = 0.0 if there else time.monotonic() - began
            call.identity, call.model = service.spec.identity, service.name
            try:
                yield service
            finally:
                if keep is not None:
                    self._models.keep(model, keep)

    async def _choose(self, call: HTTPCall) -> tuple[ServedModel, float | None]:
        """Choose among several models; also how many seconds the client wants the model kept, None if unsaid."""
        path = call.path
        if path in READ_OF_MODEL:
            return self._models.find(_asked(call)), None
        named = await self._named(call)
        if (turn := TURNS.fullmatch(path)) is not None:
            return self._of_agent(call, turn[1], named), None
        if (work := WORK.fullmatch(path)) is not None:
            return self._of_work(call, work[1], work[2], named), None
        name = _text(named.model)
        if name is not None and path.startswith(OLLAMA):
            name = self._models.canonical(name)
        model = self._models.find(name, KINDS.get(path, "chat"))
        keep = seconds_of(named.keep_alive) if path.startswith(OLLAMA) and named.keep_alive is not None else None
        return model, keep

    def _of_agent(self, call: HTTPCall, id: str, named: _Named) -> ServedModel:
        """The model that a turn names, else the one that answered the agent's last."""
        if (name := _text(named.model)) is None and self._attribution.agents is not None:
            identity, made_for = self._attribution.agents.model_of(call.tenant, id)
            if (found := self._models.by_identity(identity)) is not None:
                return found
            if self._models.has(made_for):
                return self._models.find(made_for)
        return self._models.find(name)

    def _of_work(self, call: HTTPCall, route: str, id: str, named: _Named) -> ServedModel:
        """The model that a round, a vote or a run names, else the one that the team or run was made with."""
        if (name := _text(named.model)) is None and self._attribution.agents is not None:
            room = "team" if route == "teams" else "run"
            name = self._attribution.agents.journals.model_of(room, call.tenant, id)
        return self._models.find(name)

    def _about(self, call: HTTPCall) -> Service | None:
        """The service that a request, or an agent's context, belongs to, if it is loaded."""
        if (request := REQUESTS.fullmatch(call.path)) is not None:
            number = parse_id(request[1])
            return None if number is None else self._models.with_request(number)
        agent = AGENTS.fullmatch(call.path)
        if agent is not None and self._attribution.agents is not None:
            identity, _ = self._attribution.agents.model_of(call.tenant, agent[1])
            return self._models.services.of(identity)
        return None

    async def _named(self, call: HTTPCall) -> _Named:
        """What the body names. One that is no JSON object names nothing: its route refuses it."""
        body = await call.peek()
        try:
            return _decode(body.removeprefix(codecs.BOM_UTF8))
        except (msgspec.MsgspecError, RecursionError, ValueError):
            return _Named()


def uses_model(path: str, method: str) -> bool:
    """Return whether a route needs its model loaded while it answers."""
    if method != "POST":
        return path in READ_OF_MODEL
    if TURNS.fullmatch(path) is not None or WORK.fullmatch(path) is not None:
        return True
    return REQUESTS.fullmatch(path) is None and WITHOUT_MODEL.fullmatch(path) is None


def seconds_of(given: Any) -> float:
    """Return the seconds that Ollama's keep_alive says: a number of them, or a duration of Go's such as "1h30m".

    Infinite where it is negative. InvalidRequest for anything else.
    """
    if isinstance(given, int | float) and not isinstance(given, bool):
        return float(given) if given >= 0 else math.inf
    try:
        found = DURATION.fullmatch(given) if isinstance(given, str) else None
        if found is None:
            raise ValueError
        seconds = sum(float(part[1]) * UNITS[part[2]] for part in PART.finditer(found[2]))
    except ValueError:
        raise InvalidRequest(
            'keep_alive must be a number of seconds, or a duration such as "10m" or "1h30m0s"', field="keep_alive"
        ) from None
    return math.inf if found[1] == "-" and seconds else seconds


def _text(name: Any) -> str | None:
    """A model's name as a body has it; what is none is refused by its route."""
    return name if isinstance(name, str) and name else None


def _asked(call: HTTPCall) -> str | None:
    return next((value for name, value in query(call) if name == "model" and value), None)
