"""The routes of one request: its state, its end, and its events from any place on."""

from __future__ import annotations

from typing import Any

from cairn.api.chat.parse import parse
from cairn.api.chat.state import ServerState
from cairn.api.http.body import read_nothing
from cairn.api.http.call import HTTPCall
from cairn.api.http.event_log import parse_after
from cairn.api.http.routes import Route
from cairn.api.native.agent_schemas import NoBody
from cairn.frontend.request_state import RequestStatus
from cairn.frontend.service import Service
from cairn.types.errors import NotFound

REQUESTS = "/v1/requests"


class RequestRoutes:
    """The routes of requests that run, or ended a short time ago."""

    def __init__(self, state: ServerState) -> None:
        self._state, self._config = state, state.config
        self._calls, self._logs = state.calls, state.logs

    def routes(self) -> list[Route]:
        """Return the table of these routes."""
        return [
            Route("GET", "/v1/requests/{id}", self.request),
            Route("POST", "/v1/requests/{id}/cancel", self.cancel, NoBody),
            Route("GET", "/v1/requests/{id}/events", self.events, query=("after",), stream=True),
        ]

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
