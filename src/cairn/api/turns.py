"""The routes of an agent's turns: what it was told and answered, one more turn, and an interrupted one again.

Every turn is generated onto a tape, so it runs on for a time of grace after its connection closed.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec

from cairn.agents.info import TurnInfo
from cairn.agents.running import RunningTurn
from cairn.api.agent_schemas import ResumeBody, TurnBody, check_account, check_turn, id_of, page_of
from cairn.api.answers import ChatAnswer, Choice, said, tokens_of, usage_of
from cairn.api.limits import read_json, read_nothing
from cairn.api.openai import check_length, check_model, names_of, spelled
from cairn.api.parse import parse
from cairn.api.registry import Registry
from cairn.api.reply import Call
from cairn.api.resumable import Tapes
from cairn.api.schemas import contents, plain_messages
from cairn.api.sse import DONE
from cairn.api.ties import HEADER, Ties
from cairn.config import Config
from cairn.errors import InvalidRequest
from cairn.service.service import Service


class TurnRoutes:
    """The routes of turns."""

    def __init__(self, config: Config, registry: Registry, tapes: Tapes, ties: Ties) -> None:
        self._config = config
        self._registry = registry
        self._tapes = tapes
        self._ties = ties

    async def turns(self, call: Call, service: Service) -> None:
        """GET /v1/agents/{id}/turns, by number: all, or `limit` of them `after` a number."""
        limit, text = page_of(call, "the number of a turn")
        if text and not (text.isascii() and text.isdigit() and len(text) <= 18):
            raise InvalidRequest("after must be the number of a turn", field="after")
        wanted = None if limit is None else limit + 1
        found = await self._ties.open().turns(call.tenant, id_of(call), after=int(text or 0), limit=wanted)
        data = [turn_object(turn) for turn in found[:limit]]
        more = len(found) > len(data)
        next = data[-1]["number"] if more else None
        await call.json({"object": "list", "data": data, "has_more": more, "next": next})

    async def turn(self, call: Call, service: Service) -> None:
        """POST /v1/agents/{id}/turns: new messages in, the answer out as of /v1/chat/completions."""
        agents, id = self._ties.open(), id_of(call)
        body = parse(TurnBody, await read_json(call, self._config), self._config, call)
        agents.get(call.tenant, id)
        check_turn(body, self._config)
        header = call.header(HEADER)
        check_account(body, None if header is None else header.decode("latin-1"), id)
        check_model(body.model, service)
        service.check_generates()
        await check_length(call, service, contents(body.messages), "messages")
        with spelled(names_of(body.max_tokens)):
            running = await agents.turn(
                call.tenant,
                id,
                plain_messages(body.messages),
                body.chat_options(),
                request=call.number,
                share=call.share,
                fork_on_conflict=bool(body.fork_on_conflict),
                template_args=body.template_args(service.chat.knows),
                wanted=body.wanted(),
            )
        await self._answer(call, service, running, bool(body.stream), body.include_usage)

    async def resume(self, call: Call, service: Service) -> None:
        """POST /v1/agents/{id}/resume: the whole answer of the interrupted turn, said before or not.

        `logprobs` is null where a part of it was said before: what was computed then is not kept.
        """
        agents, id = self._ties.open(), id_of(call)
        body = parse(ResumeBody, await read_nothing(call, self._config), self._config, call)
        running = await agents.resume(call.tenant, id, request=call.number, share=call.share)
        await self._answer(call, service, running, bool(body.stream), True)

    async def _answer(self, call: Call, service: Service, running: RunningTurn, stream: bool, usage: bool) -> None:
        call.headers += [
            (b"x-cairn-agent", running.agent.id.encode()),
            (b"x-cairn-turn", b"%d" % running.turn.number),
        ]
        choice, number = Choice(running.request), call.number
        answer = TurnAnswer(call, service, [choice], usage)
        spoken = _Spoken(choice, answer, lambda: self._registry.close(number), keep_logprobs=not stream)
        events = spoken.events(running, usage)
        self._registry.open(call.number, [running.request.id], name=call.name, salt=call.salt)
        follower = self._tapes.start(call, events, running.cancel, self._config.heartbeat)
        try:
            await (follower.run(call) if stream else follower.wait(call))
        finally:
            call.tokens = tokens_of([choice])
        if stream:
            return
        whole = answer.whole(usage_of([choice]))
        whole |= {"agent": running.agent.id, "turn": running.turn.number}
        await call.json(whole)


class TurnAnswer(ChatAnswer):
    """How the answer of a turn looks: as a chat completion's. The turn keeps its own tokens."""

    def done(self, index: int) -> None:
        """Nothing more is kept."""


class _Spoken:
    """The chunks of one turn, for the tape."""

    def __init__(self, choice: Choice, answer: TurnAnswer, over: Callable[[], None], *, keep_logprobs: bool) -> None:
        """`over` is called when the turn is."""
        self._choice, self._answer, self._over, self._keep = choice, answer, over, keep_logprobs

    async def events(self, running: RunningTurn, usage: bool) -> AsyncGenerator[bytes, None]:
        """The chunks of the stream, whoever reads them; nothing at all first, since the turn has begun."""
        choice, answer = self._choice, self._answer
        try:
            yield b""
            async with contextlib.aclosing(running.batches()) as found:
                data = answer.begin()
                async for batch in found:
                    if self._keep:
                        choice.logprobs += [one for event in batch for one in getattr(event, "logprobs", ())]
                    data += said([(0, event) for event in batch], [choice], answer)
                    if data:
                        yield data
                    data = b""
        finally:
            self._over()
        yield answer.usage(usage_of([choice])) + DONE if usage else DONE


def turn_object(turn: TurnInfo) -> dict[str, Any]:
    """A turn on the wire."""
    return {"object": "agent.turn", **msgspec.to_builtins(turn)}
