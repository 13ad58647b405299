"""The choice of the model that answers a call: by the name in its body, or by its path.

A route that uses a model holds a lease on it until the call is answered: the model stays loaded that long. Other routes
hold none, so a swap or an unload does not wait for them. With a single model no body is read before its route reads it.
"""

from __future__ import annotations

import codecs
import contextlib
import math
import re
import time
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import msgspec

from cairn.api.chat.attribution import AgentAttribution
from cairn.api.http.body import check_origin, is_json
from cairn.api.http.call import HTTPCall, query, shown
from cairn.api.http.event_log import parse_id
from cairn.frontend.adapter_services import AdaptedService
from cairn.frontend.service import Service
from cairn.served_models.loaded_models import Models
from cairn.served_models.served_model import ServedModel
from cairn.types.errors import Conflict, InvalidRequest, Unavailable, UnknownModel
from cairn.types.request import MAX_APPLIED

AGENTS = "/v1/agents"
PLACES = {"team": "/v1/teams", "run": "/v1/workflows/runs"}
"""Prefixes of routes whose path names a team or a run, whose journal knows its model."""
REQUESTS = ("/v1/requests/{id}", "/v1/responses/{id}")
"""Routes of a request or a stored response."""
OLLAMA = "/api/"
"""The prefix of Ollama's routes. Its model names ignore case."""
WITH_LORA = ("/v1/chat/completions", "/v1/completions", "/completion", "/infill")
"""Routes whose bodies have the field `lora`, beside agents' turns."""
URL_RETRY = 2.0
"""Seconds after which a client may ask again about a model that is being loaded or unloaded."""
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
    """The fields that are read of a body before its route reads it."""

    model: Any = None
    keep_alive: Any = None
    lora: Any = None


class ModelChoice(NamedTuple):
    """The model of a call, and what the call says of its adapters."""

    model: ServedModel
    name: str | None = None
    """The name that means it, which may end in an adapter's."""
    keep: float | None = None
    """Seconds that the client wants the model kept; None if it does not say."""
    lora: Any = None
    """Adapters by their ids, not checked; None if the call has none."""
    bare: bool = False
    """Whether the model is meant without adapters, whatever scales were set."""
    view: AdaptedService | None = None
    """The model with the adapters that are meant, if no name tells them."""


_decode = msgspec.json.Decoder(_Named).decode


class ModelRouter:
    """Chooses the model of a call."""

    __slots__ = ("_attribution", "_models")

    def __init__(self, models: Models, attribution: AgentAttribution) -> None:
        self._models, self._attribution = models, attribution

    @contextlib.asynccontextmanager
    async def chosen(self, call: HTTPCall, how: str) -> AsyncIterator[Service]:
        """Yield the service of the call's model, which is loaded first if it is not.

        `how` is the `model` of its route; with "url" nothing is loaded. Raises UnknownModel for a name that no model
        has, Unavailable if the model cannot be loaded in time, Conflict if it is not loaded for "url", and Forbidden
        for a web page that may not call.
        """
        if not how:
            service = self._about(call) or self._models.services.first
            call.identity, call.model = service.spec.identity, service.name
            yield service
            return
        if how == "url":
            service = self._named_by_url(call)
            call.identity, call.model = service.spec.identity, service.name
            yield service
            return
        if not is_json(call):  # a web page that may not call must not have a model loaded or unloaded either
            check_origin(call)
        choice = await self._choose(call, how) if self._peeks else ModelChoice(self._models.models[0])
        model = choice.model
        began, there = time.monotonic(), model.loaded is not None
        async with self._models.using(model) as base:
            call.load_seconds = 0.0 if there else time.monotonic() - began
            service = _with_adapters(model, base, choice)
            call.identity, call.model = service.spec.identity, service.name
            try:
                yield service
            finally:
                if choice.keep is not None:
                    self._models.keep(model, choice.keep)

    @property
    def _peeks(self) -> bool:
        """Whether a body has to be read before its route reads it."""
        return self._models.several or self._models.has_adapters

    async def _choose(self, call: HTTPCall, how: str) -> ModelChoice:
        """Choose among several models, or a model's adapters."""
        named = await self._named(call)
        if how == "agent":
            return self._of_agent(call, call.path_part(AGENTS), named)
        if how in PLACES:
            return self._of_work(call, how, call.path_part(PLACES[how]), named)
        name = _text(named.model)
        of_ollama = call.path.startswith(OLLAMA)
        if name is not None and of_ollama:
            name = self._models.canonical(name)
        model = self._models.find(name, how)
        keep = seconds_of(named.keep_alive) if of_ollama and named.keep_alive is not None else None
        return ModelChoice(model, name, keep, named.lora if call.path in WITH_LORA else None)

    def _named_by_url(self, call: HTTPCall) -> Service:
        """Return the service of the model that the URL names, which must be loaded.

        Any web page can send a GET, and so must not load or unload a model, nor keep it from being unloaded: the call
        holds no lease. Raises UnknownModel, Conflict if it is not loaded, Unavailable while it is being loaded or
        unloaded.
        """
        name = _asked(call)
        model = self._models.find(name)
        loaded = model.loaded
        if loaded is not None and not loaded.closing:
            return _with_adapters(model, loaded.service, ModelChoice(model, name))
        if model.state in ("loading", "unloading"):
            raise Unavailable(f"{model.name} is {model.state}; ask again shortly", retry_after=URL_RETRY)
        raise Conflict(
            f"{model.name} is not loaded, and {call.path} loads no model: a chat with it does, or POST "
            "/v1/admin/models/load",
            field="model",
        )

    def _of_agent(self, call: HTTPCall, id: str, named: _Named) -> ModelChoice:
        """Return the model that a turn names, else the one that answered the agent's last turn."""
        name = _text(named.model)
        if name is None and named.lora is None and self._attribution.agents is not None:
            identity, made_for = self._attribution.agents.model_of(call.tenant, id)
            if (found := self._models.by_identity(identity)) is not None:
                return ModelChoice(found, bare=True)
            for model, loaded in self._models.loaded():
                if (view := loaded.adapters.of(identity)) is not None:
                    return ModelChoice(model, view.name, view=view if loaded.adapters.is_loaded(view.applied) else None)
            if self._models.has(made_for) or self._models.adapted(made_for) is not None:
                return ModelChoice(self._models.find(made_for), made_for)
        return ModelChoice(self._models.find(name), name, lora=named.lora)

    def _of_work(self, call: HTTPCall, room: str, id: str, named: _Named) -> ModelChoice:
        """Return the model that the body names, else the one that the team or run was made with."""
        if (name := _text(named.model)) is None and self._attribution.agents is not None:
            name = self._attribution.agents.journals.model_of(room, call.tenant, id)
        return ModelChoice(self._models.find(name), name)

    def _about(self, call: HTTPCall) -> Service | None:
        """Return the service that a request or an agent's context belongs to, if it is loaded."""
        if call.route.startswith(REQUESTS):
            number = parse_id(call.path.split("/")[3])
            return None if number is None else self._models.with_request(number)
        if call.route.startswith(AGENTS + "/{id}") and self._attribution.agents is not None:
            identity, _ = self._attribution.agents.model_of(call.tenant, call.path_part(AGENTS))
            return self._models.services.of(identity)
        return None

    async def _named(self, call: HTTPCall) -> _Named:
        """Return the names in the body. A body that is no JSON object names nothing: its route refuses it."""
        body = await call.peek()
        try:
            return _decode(body.removeprefix(codecs.BOM_UTF8))
        except (msgspec.MsgspecError, RecursionError, ValueError):
            return _Named()


def _with_adapters(model: ServedModel, base: Service, choice: ModelChoice) -> Service:
    """Return the service that answers the call: the model, or the model with adapters.

    Raise UnknownModel for an adapter that a model with adapters does not have.
    """
    loaded = model.loaded
    if loaded is None or choice.bare or not (loaded.adapters.known or choice.lora):
        return base
    if (scales := _scales(choice.lora)) is not None:
        return loaded.adapters.scaled(scales, "lora")
    if choice.view is not None and choice.view.base is base:
        return choice.view
    name = choice.name or ""
    if (found := loaded.adapters.named(name)) is not None:
        return found
    before, colon, last = name.rpartition(":")
    if colon and last != "latest" and before in base.names and name not in base.names:
        known = ", ".join(sorted(loaded.adapters.known))
        raise UnknownModel(f"{base.name} has no adapter {shown(last)!r}; loaded are: {known}", field="model")
    return loaded.adapters.usual()


def _scales(lora: Any) -> dict[int, float] | None:
    """Return the scales of a body's `lora` by id; None for none, and for what the route will refuse."""
    if not isinstance(lora, list):
        return None
    found: dict[int, float] = {}
    for one in lora[: MAX_APPLIED + 1]:
        id, scale = (one.get("id"), one.get("scale")) if isinstance(one, dict) else (None, None)
        if not isinstance(id, int) or not isinstance(scale, int | float) or isinstance(id, bool):
            return None
        try:
            found[id] = float(scale)
        except OverflowError:
            return None
    return found


def seconds_of(given: Any) -> float:
    """Return the seconds of Ollama's keep_alive: a number, or a duration of Go's such as "1h30m".

    Infinite if it is negative. Raises InvalidRequest for anything else.
    """
    try:
        if isinstance(given, int | float) and not isinstance(given, bool):
            return float(given) if given >= 0 else math.inf
        found = DURATION.fullmatch(given) if isinstance(given, str) else None
        if found is None:
            raise ValueError
        seconds = sum(float(part[1]) * UNITS[part[2]] for part in PART.finditer(found[2]))
    except (ValueError, OverflowError):
        raise InvalidRequest(
            'keep_alive must be a number of seconds, or a duration such as "10m" or "1h30m0s"', field="keep_alive"
        ) from None
    return math.inf if found[1] == "-" and seconds else seconds


def _text(name: Any) -> str | None:
    """Return a model's name from a body; None if it is no text, which its route refuses."""
    return name if isinstance(name, str) and name else None


def _asked(call: HTTPCall) -> str | None:
    return next((value for name, value in query(call) if name == "model" and value), None)
