"""Routes beside generation: models, requests, metrics, defaults, and stored KV."""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from cairn import __version__
from cairn.api.chat.generation import check_model
from cairn.api.chat.parse import parse
from cairn.api.chat.state import ServerState
from cairn.api.http.body import read_nothing
from cairn.api.http.call import HTTPCall
from cairn.api.http.event_log import parse_after
from cairn.api.http.routes import Route
from cairn.api.native.agent_schemas import NoBody
from cairn.frontend.request_state import RequestStatus
from cairn.frontend.requests import sampling_params
from cairn.frontend.sampling_defaults import sampling_defaults
from cairn.frontend.sampling_extras import ORDERS
from cairn.frontend.service import Service
from cairn.served_models import model_health
from cairn.served_models.served_model import LoadedModel, ServedModel
from cairn.system.metrics import CONTENT_TYPE, ServerMetrics
from cairn.types.errors import NotFound
from cairn.types.stats import Swept

ANTHROPIC = b"anthropic-version"
"""Header of Anthropic's clients, which expect their own shape."""
REQUESTS = "/v1/requests"
MODALITIES = ["text"]
"""Input types of the models here."""


class Admin:
    """The routes beside generation."""

    def __init__(self, state: ServerState) -> None:
        self._state, self._config = state, state.config
        self._calls = state.calls
        self._logs = state.logs
        self._started = int(time.time())

    def routes(self) -> list[Route]:
        """Return the table of these routes."""
        return [
            Route("GET", "/v1/models", self.models),
            Route("GET", "/v1/models/{id:*}", self.model),
            Route("GET", "/v1/requests/{id}", self.request),
            Route("POST", "/v1/requests/{id}/cancel", self.cancel, NoBody),
            Route("GET", "/v1/requests/{id}/events", self.events, query=("after",), stream=True),
            Route("GET", "/metrics", self.metrics, access="admin"),
        ]

    async def models(self, call: HTTPCall, service: Service) -> None:
        """List the models that are served."""
        anthropic = call.header(ANTHROPIC) is not None
        data = [self._shown(model, anthropic) for model in self._state.registry.models]
        for model in self._state.registry.models:
            shown = self._shown(model, anthropic)
            for adapter in sorted(model.adapter_names):
                data.append(_as_adapted(shown, f"{model.name}:{adapter}", anthropic=anthropic))
        if anthropic:
            ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]}
            await call.json({"data": data, "has_more": False, **ends})
            return
        await call.json({"object": "list", "data": data})

    async def model(self, call: HTTPCall, service: Service) -> None:
        """Return one model. Its id may hold slashes."""
        name = call.path.removeprefix("/v1/models/")
        registry, anthropic = self._state.registry, call.header(ANTHROPIC) is not None
        if (base := registry.adapted(name)) is not None and not registry.has(name):
            own = f"{base.name}:{name.rpartition(':')[2]}"
            await call.json(_as_adapted(self._shown(base, anthropic), own, anthropic=anthropic))
            return
        if not registry.several:
            check_model(name, service, strict=True)
        await call.json(self._shown(registry.find(name), anthropic))

    async def request(self, call: HTTPCall, service: Service) -> None:
        """Return the state of a request, with the tokens and the text of each choice so far."""
        number = self._number(call, call.path_part(REQUESTS))
        if (work := self._work(call, service, number)) is not None:
            await call.json(work)
            return
        await call.json(self._report(number, self._known(call, service, number)))

    async def cancel(self, call: HTTPCall, service: Service) -> None:
        """End a request. One that has ended already stays as it is."""
        parse(NoBody, await read_nothing(call, self._config), self._config)
        number = self._number(call, call.path_part(REQUESTS))
        if self._work(call, service, number) is not None:
            cancelled = self._logs.cancel(number)
            await call.json((self._work(call, service, number) or {}) | {"cancelled": cancelled})
            return
        self._known(call, service, number)
        ended = [(self._state.registry.with_request(id) or service).abort(id) for id in self._calls.ids(number)]
        report = self._report(number, self._known(call, service, number))
        await call.json(report | {"cancelled": any(ended)})

    async def events(self, call: HTTPCall, service: Service) -> None:
        """Stream the events of a resumable request until its end. It begins after event number `after`."""
        number = self._number(call, call.path_part(REQUESTS))
        after = parse_after(call)
        follower = self._logs.find(number, call.salt, self._config.heartbeat)
        await follower.run(call, after)

    async def metrics(self, call: HTTPCall, service: Service) -> None:
        """Return figures in Prometheus' text format."""
        every = [loaded.service.metrics for _, loaded in self._state.registry.loaded()]
        text = ServerMetrics(
            self._config.metrics_prefix, lambda: every, partial(model_health.metrics, self._state.registry)
        ).render()
        await call.respond(200, text, [(b"content-type", CONTENT_TYPE.encode())])

    def _shown(self, model: ServedModel, anthropic: bool) -> dict[str, Any]:
        """Return a model as the list shows it. What is unknown of one that was never loaded is left out, or null."""
        context = context_of(model)
        if anthropic:
            return {
                "type": "model",
                "id": model.name,
                "display_name": model.name,
                "created_at": datetime.datetime.fromtimestamp(self._started, datetime.UTC).isoformat(),
                "lifecycle": "active",
                "max_input_tokens": context,
                "max_tokens": context,
                "input_modalities": MODALITIES,
            }
        longest = model.spec.longest_text if model.spec is not None else None
        return {
            "id": model.name,
            "object": "model",
            "created": self._started,
            "owned_by": "cairn",
            "max_model_len": None if context is None else min(context, longest or context),
            "input_modalities": MODALITIES,
            "kind": model.kind or None,
            "state": model.state,
            "status": {"value": _STATUS[model.state]},
            **({"aliases": list(model.config.alias)} if model.config.alias else {}),
            **({"memory_bytes": model.held} if model.held else {}),
            **({"device": _device(model.loaded)} if model.loaded is not None else {}),
            **({"error": model.failure} if model.state == "failed" else {}),
        }

    def _number(self, call: HTTPCall, text: str) -> int:
        number = self._calls.find(text, call.salt)
        if number is None:
            raise _unknown()
        return number

    def _work(self, call: HTTPCall, service: Service, number: int) -> dict[str, Any] | None:
        """Return work made of several requests (rounds of a team, a run of a workflow); None for a single request."""
        ids = self._calls.ids(number)
        if any((self._state.registry.with_request(id) or service).status(id) is not None for id in ids):
            return None
        state = self._logs.state(number, call.salt)
        return None if state is None else {"id": f"{number:016x}", "object": "request", "state": state, "choices": []}

    def _known(self, call: HTTPCall, service: Service, number: int) -> dict[int, RequestStatus]:
        """Return the status of each remembered choice by index. Raises NotFound also for another tenant's request."""
        ids = self._calls.ids(number)
        found = enumerate((self._state.registry.with_request(id) or service).status(id) for id in ids)
        known = {at: status for at, status in found if status is not None and status.salt == call.salt}
        if not known:
            raise _unknown()
        return known

    def _report(self, number: int, known: dict[int, RequestStatus]) -> dict[str, Any]:
        statuses = known.values()
        states = [status.state for status in statuses]
        order = ("failed", "running", "waiting", "cancelled", "finished")
        return {
            "id": f"{number:016x}",
            "object": "request",
            "state": next(state for state in order if state in states),
            "prompt_tokens": sum(status.prompt_tokens for status in statuses if not status.choice),
            "completion_tokens": sum(status.completion_tokens for status in statuses),
            "choices": [
                {
                    "index": index,
                    "state": status.state,
                    "completion_tokens": status.completion_tokens,
                    "text": status.text,
                    "reasoning_content": status.reasoning,
                    "finish_reason": status.reason,
                    "error": status.error or None,
                }
                for index, status in known.items()
            ],
        }


def _unknown() -> NotFound:
    return NotFound("there is no such request, or it ended more than ten minutes ago", field="id")


_STATUS = {
    "loaded": "loaded",
    "loading": "loading",
    "unloading": "loading",
    "on disk": "unloaded",
    "failed": "failed",
}
"""llama-server's names of a model's states."""


def _device(loaded: LoadedModel) -> dict[str, str]:
    """Return the device that computes a model, by name and in words."""
    info = loaded.service.info
    return {"name": info.device, "description": info.device_text}


def context_of(model: ServedModel) -> int | None:
    """Return the longest context that a model serves, or would; None if its files were not read yet."""
    if model.loaded is not None:
        return model.loaded.service.info.context
    return None if model.spec is None else min(model.spec.context, model.config.context or model.spec.context)


class Props:
    """GET /props: what is served, and the defaults of requests, by llama-server's names.

    Names: llama.cpp's tools/server/README.md, "GET /props". What has no meaning here is left out. Nothing is changed by
    this route, so there is no POST.
    """

    def __init__(self, state: ServerState) -> None:
        self._config = state.config

    def routes(self) -> list[Route]:
        """Return the table of these routes."""
        return [
            Route("GET", "/props", self.show, model="url"),
        ]

    async def show(self, call: HTTPCall, service: Service) -> None:
        """Return what is served, and what applies if a request gives no option."""
        spec, tokenizer, context = service.spec, service.tokenizer, service.info.context
        defaults = sampling_defaults(spec, thinking=service.chat.thinks)
        ends = [tokenizer.token_bytes(token).decode("utf-8", "replace") for token in spec.eos_ids]
        await call.json(
            {
                "default_generation_settings": {
                    "n_ctx": context,
                    "params": self._defaults(service),
                    "sources": {name: one.source for name, one in defaults.items()},
                },
                "total_slots": min(self._config.max_running, service.info.max_rows),
                "model_path": self._config.model,
                "model_alias": service.name,
                "modalities": {"vision": False, "audio": False},
                "chat_template": service.chat.template,
                "bos_token": tokenizer.special_tokens.get("bos_token", ""),
                "eos_token": ends[0] if ends else tokenizer.special_tokens.get("eos_token", ""),
                "eos_tokens": ends,
                "build_info": f"cairn {__version__}",
            }
        )

    def _defaults(self, service: Service) -> dict[str, Any]:
        """Return what a request without options gets, by the function that completes requests."""
        order = self._config.sampler_order
        params = sampling_params(
            service.spec,
            prompt_tokens=1,
            context=service.info.context,
            thinking=service.chat.thinks,
            sampler_order=order,
        )
        return {
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "repeat_penalty": params.repetition_penalty,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "samplers": list(ORDERS[order]),
            "n_predict": -1,
            "max_tokens": -1,
            "stop": [],
            "stream": False,
        }


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


def _as_adapted(shown: dict[str, Any], name: str, *, anthropic: bool) -> dict[str, Any]:
    """Return a model's entry as that of the model with an adapter."""
    if anthropic:
        return shown | {"id": name, "display_name": name}
    return {key: value for key, value in shown.items() if key != "aliases"} | {"id": name, "parent": shown["id"]}
