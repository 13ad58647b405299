"""The routes of an agent's turns: its history, one more turn, and resuming an interrupted one.

Every turn is generated onto an event log, so it goes on for a grace time after its connection closed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from cairn.agents.running_turn import RunningTurn
from cairn.agents.turns import TurnParams
from cairn.agents.types import TurnInfo
from cairn.api.chat.answers import ChatAnswer
from cairn.api.chat.attribution import HEADER
from cairn.api.chat.exchange import Adapter, Batches, ChoiceStream, Exchange, Silence, rename_fields
from cairn.api.chat.generation import chat_names, check_length, check_lora, check_model, with_prediction
from cairn.api.chat.message_schemas import contents, plain_messages
from cairn.api.chat.openai_chunks import cache_object
from cairn.api.chat.parse import parse, read
from cairn.api.chat.state import ServerState
from cairn.api.chat.timings import AnswerTimes
from cairn.api.http.body import read_nothing
from cairn.api.http.call import HTTPCall
from cairn.api.http.routes import Route
from cairn.api.native.agent_schemas import PATH, ResumeBody, TurnBody, check_account, check_own, check_turn, page_of
from cairn.frontend.service import Service
from cairn.text.chat.messages import plain
from cairn.types.errors import InvalidRequest

ONCE = b"idempotency-key"
MOST_ONCE = 128


class TurnRoutes:
    """The routes of turns."""

    def __init__(self, state: ServerState) -> None:
        self._config = state.config
        self._exchanges = state.exchanges
        self._attribution = state.attribution

    def routes(self) -> list[Route]:
        """Return the table of these routes."""
        return [
            Route("GET", "/v1/agents/{id}/turns", self.turns, query=("limit", "after")),
            Route("POST", "/v1/agents/{id}/turns", self.turn, TurnBody, model="agent", keeps=True),
            Route("POST", "/v1/agents/{id}/resume", self.resume, ResumeBody, model="agent", keeps=True),
        ]

    async def turns(self, call: HTTPCall, service: Service) -> None:
        """List the turns of an agent by number, abandoned branches included.

        All of them, or `limit` of them `after` a number.
        """
        limit, text = page_of(call, "the number of a turn")
        if text and not (text.isascii() and text.isdigit() and len(text) <= 18):
            raise InvalidRequest("after must be the number of a turn", field="after")
        wanted = None if limit is None else limit + 1
        found = await self._attribution.open().turns(
            call.tenant, call.path_part(PATH), after=int(text or 0), limit=wanted
        )
        data = [turn_object(turn) for turn in found[:limit]]
        more = len(found) > len(data)
        next = data[-1]["number"] if more else None
        await call.json({"object": "list", "data": data, "has_more": more, "next": next})

    async def turn(self, call: HTTPCall, service: Service) -> None:
        """Send new messages to an agent. The answer is that of /v1/chat/completions."""
        agents, id = self._attribution.open(), call.path_part(PATH)
        body = await read(TurnBody, call, self._config)
        check_own(agents.get(call.tenant, id))
        check_turn(body, self._config)
        check_lora(body, service)
        header = call.header(HEADER)
        check_account(body, None if header is None else header.decode("latin-1"), id)
        check_model(body.model, service)
        service.check_generates()
        await check_length(call, service, contents(body.messages), "messages")
        with rename_fields(chat_names(body.max_tokens)):
            options = await with_prediction(call, service, body, body.chat_options())
            running = await agents.turn(
                call.tenant,
                id,
                plain_messages(body.messages),
                TurnParams(
                    request=call.number,
                    share=call.share,
                    options=options,
                    template_args=body.template_args(service.chat.mentions),
                    wanted=body.wanted(),
                    service=service,
                ),
                fork_on_conflict=bool(body.fork_on_conflict),
                once=once_of(call),
            )
        await self._answer(call, service, running, body, body.include_usage)

    async def resume(self, call: HTTPCall, service: Service) -> None:
        """Continue an interrupted turn, and return its whole answer.

        `logprobs` is null if a part of it was generated before: those of then are not kept.
        """
        agents, id = self._attribution.open(), call.path_part(PATH)
        body = parse(ResumeBody, await read_nothing(call, self._config), self._config, call)
        check_own(agents.get(call.tenant, id))
        running = await agents.resume(call.tenant, id, request=call.number, share=call.share)
        await self._answer(call, service, running, body, True)

    async def _answer(
        self, call: HTTPCall, service: Service, running: RunningTurn, body: TurnBody | ResumeBody, usage: bool
    ) -> None:
        call.headers += [
            (b"x-cairn-agent", running.agent.id.encode()),
            (b"x-cairn-turn", b"%d" % running.turn.number),
        ]
        choices = [ChoiceStream(running.request)]
        answer = TurnAnswer(call, service, choices, usage, running, _answer_times(body, choices, running))
        await self._exchanges.run(call, turn_exchange(running, choices, answer), stream=bool(body.stream))


def once_of(call: HTTPCall) -> str:
    """Return the client's Idempotency-Key; empty for none. Raise InvalidRequest for one that is no key."""
    value = call.header(ONCE)
    if value is None:
        return ""
    if not 0 < len(value) <= MOST_ONCE or not value.isascii() or not value.decode("latin-1").isprintable():
        raise InvalidRequest(
            f"Idempotency-Key must be 1 to {MOST_ONCE} printable characters of ASCII", field="Idempotency-Key"
        )
    return value.decode("latin-1")


class TurnAnswer(ChatAnswer):
    """Adapter of turns: a chat completion that, sent whole, also names the agent and the turn."""

    def __init__(
        self,
        call: HTTPCall,
        service: Service,
        choices: Sequence[ChoiceStream],
        include_usage: bool,
        running: RunningTurn,
        pace: AnswerTimes,
    ) -> None:
        super().__init__(call, service, choices, include_usage, pace)
        self._named = {"agent": running.agent.id, "turn": running.turn.number}

    def whole(self) -> dict[str, Any]:
        """Return the answer in one piece."""
        return super().whole() | self._named


def _answer_times(body: TurnBody | ResumeBody, choices: Sequence[ChoiceStream], running: RunningTurn) -> AnswerTimes:
    """Return the timings of a turn; off for a resumed one, whose first part was generated earlier."""
    if isinstance(body, ResumeBody):
        return AnswerTimes(choices, timings=False, progress=False)
    return AnswerTimes(
        choices, timings=body.timings_per_token, progress=body.return_progress, cache=lambda _: running.cache
    )


def turn_exchange(
    running: RunningTurn,
    choices: Sequence[ChoiceStream],
    adapter: Adapter,
    keep: Callable[[ChoiceStream], None] = lambda choice: None,
) -> Exchange:
    """Return the exchange of a turn, which keeps its own tokens. `keep` stores what else belongs to the turn."""
    return Exchange(
        choices=choices,
        adapter=adapter,
        source=partial(_batches, running),
        cancel=running.cancel,
        keep=keep,
        outlives=True,
        warnings=running.warnings,
    )


async def _batches(running: RunningTurn, silence: Silence | None) -> Batches:
    yield []  # the turn has begun
    async with contextlib.aclosing(running.batches(beats=silence is not None)) as found:
        async for events in found:
            yield [(0, event) for event in events]


def turn_object(turn: TurnInfo) -> dict[str, Any]:
    """Return a turn as clients see it; `cairn` as in the usage of an answer."""
    found: dict[str, Any] = msgspec.to_builtins(turn)
    del found["cache"]
    if turn.answer is not None:
        found["answer"] = plain(turn.answer)
    return {"object": "agent.turn", **found, "cairn": cache_object(turn.cache)}
