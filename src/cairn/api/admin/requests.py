"""Routes beside generation: models, requests, metrics, what applies where a request says nothing, and stored KV."""

from __future__ import annotations

import datetime
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from cairn import __version__
from cairn.api.chat.generation import check_model
from cairn.api.chat.parse import parse
from cairn.api.http.call import HTTPCall
from cairn.api.http.call_table import CallTable
from cairn.api.http.json_body import read_nothing
from cairn.api.http.resumable import EventLogs, parse_after
from cairn.api.native.agent_schemas import NoBody
from cairn.config.config import Config
from cairn.frontend.request_state import RequestStatus
from cairn.frontend.requests import sampling_defaults, sampling_params
from cairn.frontend.sampling_extras import ORDERS
from cairn.frontend.service import Service
from cairn.router import model_health
from cairn.router.models import Models
from cairn.router.served_model import ServedModel
from cairn.system.metrics import CONTENT_TYPE, ServerMetrics
from cairn.types.errors import NotFound
from cairn.types.stats import Swept

ANTHROPIC = b"anthropic-version"
"""Header of Anthropic's clients, which want another shape."""
MODALITIES = ["text"]
"""What models here read."""
Endpoint = Callable[[HTTPCall, Service], Awaitable[None]]


class Admin:
    """The routes beside generation."""

    def __init__(self, config: Config, calls: CallTable, logs: EventLogs) -> None:
        self._config = config
        self._calls = calls
        self._logs = logs
        self._started = int(time.time())
        self.registry: Models
        """Set before the first call."""

    def routes(self, path: str) -> dict[str, Endpoint] | None:
        """The methods of a path with a name in it, or None."""
        kind, _, rest = path.removeprefix("/v1/").partition("/")
        if not path.startswith("/v1/") or not rest:
            return None
        if kind == "models":
            return {"GET": self.model}
        if kind == "requests" and rest.endswith("/cancel") and "/" not in rest.removesuffix("/cancel"):
            return {"POST": self.cancel}
        if kind == "requests" and rest.endswith("/events") and "/" not in rest.removesuffix("/events"):
            return {"GET": self.events}
        if kind == "requests" and "/" not in rest:
            return {"GET": self.request}
        return None

    async def models(self, call: HTTPCall, service: Service) -> None:
        """GET /v1/models."""
        anthropic = call.header(ANTHROPIC) is not None
        data = [self._shown(model, anthropic) for model in self.registry.models]
        if anthropic:
            ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]}
            await call.json({"data": data, "has_more": False, **ends})
            return
        await call.json({"object": "list", "data": data})

    async def model(self, call: HTTPCall, service: Service) -> None:
        """GET /v1/models/{id}; an id may hold slashes."""
        name = call.path.removeprefix("/v1/models/")
        if not self.registry.several:
            check_model(name, service, strict=True)
        await call.json(self._shown(self.registry.find(name), call.header(ANTHROPIC) is not None))

    async def request(self, call: HTTPCall, service: Service) -> None:
        """GET /v1/requests/{id}: the state, and of each choice the tokens and the text so far."""
        number = self._number(call, call.path.removeprefix("/v1/requests/"))
        if (work := self._work(call, service, number)) is not None:
            await call.json(work)
            return
        await call.json(self._report(number, self._known(call, service, number)))

    async def cancel(self, call: HTTPCall, service: Service) -> None:
        """POST /v1/requests/{id}/cancel: end it; one that has ended already stays as it is. No body, or {}."""
        parse(NoBody, await read_nothing(call, self._config), self._config)
        number = self._number(call, call.path.removeprefix("/v1/requests/").removesuffix("/cancel"))
        if self._work(call, service, number) is not None:
            cancelled = self._logs.cancel(number)
            await call.json((self._work(call, service, number) or {}) | {"cancelled": cancelled})
            return
        self._known(call, service, number)
        ended = [(self.registry.with_request(id) or service).abort(id) for id in self._calls.ids(number)]
        report = self._report(number, self._known(call, service, number))
        await call.json(report | {"cancelled": any(ended)})

    async def events(self, call: HTTPCall, service: Service) -> None:
        """GET /v1/requests/{id}/events?after=N: the events of a resumable request, live until its end."""
        number = self._number(call, call.path.removeprefix("/v1/requests/").removesuffix("/events"))
        after = parse_after(call)
        follower = self._logs.find(number, call.salt, self._config.heartbeat)
        await follower.run(call, after)

    async def metrics(self, call: HTTPCall, service: Service) -> None:
        """GET /metrics, in Prometheus' text format."""
        every = [loaded.service.metrics for _, loaded in self.registry.loaded()]
        text = ServerMetrics(
            self._config.metrics_prefix, lambda: every, partial(model_health.metrics, self.registry)
        ).render()
        await call.respond(200, text, [(b"content-type", CONTENT_TYPE.encode())])

    def _shown(self, model: ServedModel, anthropic: bool) -> dict[str, Any]:
        """A model as the list has it. What is not known of one that was never loaded is left out, or null."""
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
            **({"error": model.failure} if model.state == "failed" else {}),
        }

    def _number(self, call: HTTPCall, text: str) -> int:
        number = self._calls.find(text, call.salt)
        if number is None:
            raise _unknown()
        return number

    def _work(self, call: HTTPCall, service: Service, number: int) -> dict[str, Any] | None:
        """A call that is work of several requests - rounds of a team, a run of a workflow; None for any other."""
        ids = self._calls.ids(number)
        if any((self.registry.with_request(id) or service).status(id) is not None for id in ids):
            return None
        state = self._logs.state(number, call.salt)
        return None if state is None else {"id": f"{number:016x}", "object": "request", "state": state, "choices": []}

    def _known(self, call: HTTPCall, service: Service, number: int) -> dict[int, RequestStatus]:
        """The status of each choice that is remembered, by its index; NotFound also for another tenant's request."""
        ids = self._calls.ids(number)
        found = enumerate((self.registry.with_request(id) or service).status(id) for id in ids)
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
"""What llama-server calls a model's state."""


def context_of(model: ServedModel) -> int | None:
    """The longest context that a model serves, or would; None where its files were not read yet."""
    if model.loaded is not None:
        return model.loaded.service.info.context
    return None if model.spec is None else min(model.spec.context, model.config.context or model.spec.context)


class Props:
    """GET /props: what is served and what applies where a request says nothing, by llama-server's names.

    Names: llama.cpp's tools/server/README.md, "GET /props". What has no meaning here is left out. Nothing is changed by
    this route, so there is no POST.
    """

    def __init__(self, config: Config) -> None:
        self._config = config

    async def show(self, call: HTTPCall, service: Service) -> None:
        """GET /props."""
        spec, tokenizer, context = service.spec, service.tokenizer, service.info.context
        ends = [tokenizer.token_bytes(token).decode("utf-8", "replace") for token in spec.eos_ids]
        await call.json(
            {
                "default_generation_settings": {
                    "n_ctx": context,
                    "params": self._defaults(service),
                    "sources": {name: applied.source for name, applied in sampling_defaults(spec).items()},
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
        """What a request gets that gives no option: the same function that completes requests says so."""
        order = self._config.sampler_order
        params = sampling_params(service.spec, prompt_tokens=1, context=service.info.context, sampler_order=order)
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
    """Stored KV: what there is of it, and orders to the stores, which take no body, or an empty object.

    They are admin routes: they are about all tenants at once, and all models that are loaded.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self.registry: Models
        """Set before the first call."""

    def routes(self) -> dict[str, dict[str, Endpoint]]:
        """Every route, by path and method."""
        return {
            "/v1/cache": {"GET": self.stats},
            "/v1/cache/flush": {"POST": self.flush},
            "/v1/cache/scrub": {"POST": self.scrub},
            "/v1/cache/prune": {"POST": self.prune},
        }

    async def stats(self, call: HTTPCall, service: Service) -> None:
        """GET /v1/cache: the stores below the pool, at most about a second old; null where there is no such store. Of
        several models each has its own in `models`."""
        body: dict[str, Any] = {"object": "cache", "model": service.name, **msgspec.to_builtins(service.kv())}
        if self.registry.several:
            body["models"] = {one.name: msgspec.to_builtins(one.kv()) for one in self.registry.services}
        await call.json(body)

    async def flush(self, call: HTTPCall, service: Service) -> None:
        """POST /v1/cache/flush: answers when all KV that was to be stored is durable; 503 if a part was given up."""
        await self._nothing(call)
        for one in self._every(service):
            await one.flush()
        await self.stats(call, service)

    async def scrub(self, call: HTTPCall, service: Service) -> None:
        """POST /v1/cache/scrub: read and check every stored chunk; damaged ones go."""
        await self._nothing(call)
        await call.json(_swept("scrub", [await one.scrub() for one in self._every(service)]))

    async def prune(self, call: HTTPCall, service: Service) -> None:
        """POST /v1/cache/prune: remove what nobody used for the time to live."""
        await self._nothing(call)
        await call.json(_swept("prune", [await one.prune() for one in self._every(service)]))

    def _every(self, service: Service) -> list[Service]:
        """The models that keep KV; the one there is says itself that it keeps none."""
        return [one for one in self.registry.services if one.spec.kind == "chat"] or [service]

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
