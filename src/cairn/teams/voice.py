"""How members speak: the turns of their agents, and questions that they answer aside.

A turn that a crash cut off is found again: the agent's head is then a turn that the team's journal does not know, with
the very messages that are to be said. It is taken as it is where it is whole, and resumed where it is not.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from cairn.agents.agents import Agents
from cairn.agents.running_turn import RunningTurn
from cairn.agents.turns import Gate
from cairn.agents.types import TurnInfo
from cairn.frontend.requests import SamplingOptions
from cairn.frontend.service import Service
from cairn.text.chat.message_builder import MessageBuilder
from cairn.text.grammar.grammar import Wanted
from cairn.types.errors import Conflict, GenerationFailed, NotFound, NotLoaded, Overloaded
from cairn.types.outputs import Delta, Done

PATIENCE = 60
"""How often a turn that found the queue full is tried."""

T = TypeVar("T")
Heard = Callable[[Delta], object]


class Spoken(msgspec.Struct, frozen=True, kw_only=True):
    """What a member has said."""

    content: str
    turn: int = 0
    finish_reason: str = "stop"
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


class Caller(NamedTuple):
    """Who asked for what is generated."""

    tenant: str
    share: str = ""
    """Whose share of the server it takes."""
    service: Service | None = None
    """Of the model that answers; None: the first that is loaded."""


class Voice(Protocol):
    """What lets members speak; tests have one of their own."""

    async def speak(
        self,
        caller: Caller,
        agent: str,
        before: int,
        messages: Sequence[dict[str, Any]],
        options: SamplingOptions,
        wanted: Wanted,
        gate: Gate,
        heard: Heard,
    ) -> Spoken:
        """The next turn of an agent, whose last that counts is number `before`. `heard` gets it as it comes; `gate` is
        waited for before it begins."""
        ...

    async def ask(
        self,
        caller: Caller,
        agent: str,
        before: int,
        messages: Sequence[dict[str, Any]],
        options: SamplingOptions,
        wanted: Wanted,
        gate: Gate,
    ) -> Spoken:
        """The answer to a question that the agent will not remember."""
        ...


class AgentVoice:
    """Members speak through the agents of this server."""

    def __init__(self, agents: Agents) -> None:
        self._agents = agents

    async def speak(
        self,
        caller: Caller,
        agent: str,
        before: int,
        messages: Sequence[dict[str, Any]],
        options: SamplingOptions,
        wanted: Wanted,
        gate: Gate,
        heard: Heard,
    ) -> Spoken:
        """As `Voice.speak`."""
        head = await self._head(caller.tenant, agent, before)
        if head is not None and list(head.messages) == list(messages):
            if head.state == "finished":
                return _told(head, heard)
            if head.state == "interrupted":
                await gate()
                with contextlib.suppress(Conflict):  # another model, or no room: it is said anew
                    return await self._hear(await self._resume(caller, agent), heard)
        await self._stand_at(caller.tenant, agent, before)

        async def begin() -> RunningTurn:
            return await self._agents.turn(
                caller.tenant,
                agent,
                messages,
                options,
                request=self._service(caller).next_id(),
                share=caller.share,
                template_args=self._args(caller, options),
                wanted=wanted,
                service=caller.service,
                gate=gate,
            )

        return await self._hear(await _patiently(begin), heard)

    async def ask(
        self,
        caller: Caller,
        agent: str,
        before: int,
        messages: Sequence[dict[str, Any]],
        options: SamplingOptions,
        wanted: Wanted,
        gate: Gate,
    ) -> Spoken:
        """As `Voice.ask`."""
        await self._stand_at(caller.tenant, agent, before)

        async def begin() -> Spoken:
            stream = await self._agents.aside(
                caller.tenant,
                agent,
                messages,
                options,
                request=self._service(caller).next_id(),
                share=caller.share,
                template_args=self._args(caller, options),
                wanted=wanted,
                service=caller.service,
                gate=gate,
            )
            said, done = MessageBuilder(), None
            async with contextlib.aclosing(stream):
                async for event in stream:
                    if isinstance(event, Delta):
                        said.add(event)
                    else:
                        done = event
            return _spoken(said, done)

        return await _patiently(begin)

    def _service(self, caller: Caller) -> Service:
        return caller.service or self._agents.services.first

    def _args(self, caller: Caller, options: SamplingOptions) -> Mapping[str, Any] | None:
        """Where nothing is to be thought of, the template does not ask for it, if it can do without."""
        without = options.reasoning_budget == 0 and self._service(caller).chat.knows("enable_thinking")
        return {"enable_thinking": False} if without else None

    async def _head(self, tenant: str, agent: str, before: int) -> TurnInfo | None:
        """The turn at the agent's head where that follows number `before`."""
        number = self._agents.get(tenant, agent).head
        if number <= before:
            return None
        (head,) = await self._agents.turns(tenant, agent, after=number - 1, limit=1)
        return head if head.parent == before else None

    async def _stand_at(self, tenant: str, agent: str, before: int) -> None:
        """Let the agent stand behind its last turn that counts. Conflict where it has that turn no more."""
        if self._agents.get(tenant, agent).head == before:
            return
        try:
            await self._agents.rollback(tenant, agent, turn=before)
        except NotFound:
            raise Conflict(
                f"agent {agent} has no turn {before} any more, where its team stands; roll the team back to round 0"
            ) from None

    async def _resume(self, caller: Caller, agent: str) -> RunningTurn:
        async def begin() -> RunningTurn:
            request = self._service(caller).next_id()
            return await self._agents.resume(caller.tenant, agent, request=request, share=caller.share)

        return await _patiently(begin)

    async def _hear(self, running: RunningTurn, heard: Heard) -> Spoken:
        said, done = MessageBuilder(), None
        async with contextlib.aclosing(running.batches()) as found:
            async for events in found:
                for event in events:
                    if isinstance(event, Delta):
                        said.add(event)
                        heard(event)
                    else:
                        done = event
        return msgspec.structs.replace(_spoken(said, done), turn=running.turn.number)


def _spoken(said: MessageBuilder, done: Done | None) -> Spoken:
    if done is None:
        raise GenerationFailed("a member's answer ended without a conclusion")
    usage = done.usage
    return Spoken(
        content=said.text,
        finish_reason=done.reason.value,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
    )


def _told(turn: TurnInfo, heard: Heard) -> Spoken:
    """What a whole turn said."""
    content = (turn.answer or {}).get("content") or ""
    heard(Delta(text=content))
    return Spoken(
        content=content,
        turn=turn.number,
        finish_reason=turn.finish_reason,
        prompt_tokens=turn.prompt_tokens,
        cached_tokens=turn.cached_tokens,
        completion_tokens=turn.completion_tokens,
    )


async def _patiently(begin: Callable[[], Awaitable[T]]) -> T:
    """Try again while the queue is full, since a team may be larger than it, and while its model is loaded."""
    for _ in range(PATIENCE - 1):
        try:
            return await begin()
        except (NotLoaded, Overloaded) as error:
            await asyncio.sleep(min(error.retry_after or 1.0, 5.0))
    return await begin()
