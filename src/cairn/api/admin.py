"""Everything but generation: models, tokens, requests, health, metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from cairn.api.agent_schemas import NoBody
from cairn.api.checks import check_messages, check_template_args
from cairn.api.limits import read_json, read_nothing
from cairn.api.openai import check_length, check_model, encode_text
from cairn.api.parse import parse
from cairn.api.registry import Registry, parse_id
from cairn.api.reply import Call
from cairn.api.resumable import Tapes, parse_after
from cairn.api.schemas import (
    DetokenizeBody,
    TokenizeBody,
    contents,
    plain_messages,
    plain_tools,
)
from cairn.config import Config
from cairn.errors import InvalidRequest, NotFound
from cairn.metrics import CONTENT_TYPE
from cairn.service.flight import RequestStatus
from cairn.service.service import SHUTTING_DOWN, Service
from cairn.text.tokenizer import INLINE

Endpoint = Callable[[Call, Service], Awaitable[None]]


class Admin:
    """The routes beside generation."""

    def __init__(self, config: Config, registry: Registry, tapes: Tapes) -> None:
        self._config = config
        self._registry = registry
        self._tapes = tapes
        self._started = int(time.time())

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

    async def models(self, call: Call, service: Service) -> None:
        """GET /v1/models."""
        await call.json({"object": "list", "data": [self._model(service)]})

    async def model(self, call: Call, service: Service) -> None:
        """GET /v1/models/{id}; an id may hold slashes."""
        check_model(call.path.removeprefix("/v1/models/"), service)
        await call.json(self._model(service))

    async def tokenize(self, call: Call, service: Service) -> None:
        """POST /tokenize: {"prompt"} or {"messages"} -> {"tokens", "count", "max_model_len"}."""
        body = parse(TokenizeBody, await read_json(call, self._config), self._config)
        if body.model is not None:
            check_model(body.model, service)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("give either prompt or messages", field="prompt")
        if body.prompt is not None:
            if body.tools is not None or body.chat_template_kwargs is not None:
                raise InvalidRequest("tools and chat_template_kwargs go with messages, not with prompt", field="prompt")
            tokens = await encode_text(service, body.prompt, special=body.parse_special is not False)
        else:
            if body.parse_special is not None:
                raise InvalidRequest("parse_special goes with prompt, not with messages", field="parse_special")
            messages = body.messages or []
            check_messages(messages, body.tools, self._config)
            check_template_args(body.chat_template_kwargs)
            tools = plain_tools(body.tools)
            await check_length(service, contents(messages, tools), "messages")
            prompt = await service.chat.prompt(
                plain_messages(messages),
                tools,
                tenant=call.tenant,
                template_args=body.chat_template_kwargs,
            )
            tokens = list(prompt.tokens)
        await call.json({"tokens": tokens, "count": len(tokens), "max_model_len": service.info.context})

    async def detokenize(self, call: Call, service: Service) -> None:
        """POST /detokenize: {"tokens"} -> {"prompt"}, control tokens included: as a raw prompt it has these tokens."""
        body = parse(DetokenizeBody, await read_json(call, self._config), self._config)
        if body.model is not None:
            check_model(body.model, service)
        vocab = service.spec.vocab
        for token in body.tokens:
            if not 0 <= token < vocab:
                raise InvalidRequest(f"tokens holds {token}; ids go from 0 to {vocab - 1}", field="tokens")
        if len(body.tokens) <= INLINE:
            text = service.tokenizer.spell(body.tokens)
        else:
            text = await asyncio.to_thread(service.tokenizer.spell, body.tokens)
        await call.json({"prompt": text})

    async def request(self, call: Call, service: Service) -> None:
        """GET /v1/requests/{id}: the state, and of each choice the tokens and the text so far."""
        number = self._number(call.path.removeprefix("/v1/requests/"))
        await call.json(self._report(number, self._known(call, service, number)))

    async def cancel(self, call: Call, service: Service) -> None:
        """POST /v1/requests/{id}/cancel: end it; one that has ended already stays as it is. No body, or {}."""
        parse(NoBody, await read_nothing(call, self._config), self._config)
        number = self._number(call.path.removeprefix("/v1/requests/").removesuffix("/cancel"))
        self._known(call, service, number)
        ended = [service.abort(id) for id in self._registry.ids(number)]
        report = self._report(number, self._known(call, service, number))
        await call.json(report | {"cancelled": any(ended)})

    async def events(self, call: Call, service: Service) -> None:
        """GET /v1/requests/{id}/events?after=N: the events of a resumable request, live until its end."""
        number = self._number(call.path.removeprefix("/v1/requests/").removesuffix("/events"))
        after = parse_after(call)
        follower = self._tapes.find(number, call.salt, self._config.heartbeat)
        await follower.run(call, after)

    async def metrics(self, call: Call, service: Service) -> None:
        """GET /metrics, in Prometheus' text format."""
        await call.respond(200, service.metrics.render(), [(b"content-type", CONTENT_TYPE.encode())])

    async def ready(
        self,
        call: Call,
        service: Service | None,
        draining: bool,
        more: Sequence[str] = (),
        folders: Sequence[str] = (),
    ) -> None:
        """GET /health/ready: 200, or 503 with the reasons; `troubles` (and `more`) fail no requests.

        Nobody needs a key to read it, so the `folders` are not named; the log names them.
        """
        reasons = ["the model is still being loaded"] if service is None else service.unready()
        if draining and SHUTTING_DOWN not in reasons:
            reasons = [*reasons, SHUTTING_DOWN]
        troubles = [*(service.troubles() if service is not None else ()), *more]
        for folder in folders:
            troubles = [trouble.replace(folder, "its folder") for trouble in troubles]
        body = {"status": "not ready" if reasons else "ready", "reasons": reasons, "troubles": troubles}
        await call.json(body, 503 if reasons else 200)

    def _model(self, service: Service) -> dict[str, Any]:
        return {
            "id": service.name,
            "object": "model",
            "created": self._started,
            "owned_by": "cairn",
            "max_model_len": service.info.context,
        }

    def _number(self, text: str) -> int:
        number = parse_id(text)
        if number is None:
            raise _unknown()
        return number

    def _known(self, call: Call, service: Service, number: int) -> dict[int, RequestStatus]:
        """The status of each choice that is remembered, by its index; NotFound also for another tenant's request."""
        found = enumerate(service.status(id) for id in self._registry.ids(number))
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
