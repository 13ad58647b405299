"""Generation for members: turns of their agents, and questions answered aside.

A turn cut off by a crash is found again: the agent's head is then a turn that the team's journal lacks, with the very
messages that are about to be sent. It is used if it is complete, and resumed otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from cairn.agents.agents import Agents
from cairn.agents.running_turn import RunningTurn
from cairn.agents.turns import Gate, TurnParams
from cairn.agents.types import TurnInfo
from cairn.cluster.chain import Running
from cairn.frontend.request_options import SamplingOptions
from cairn.frontend.service import Service
from cairn.text.chat.messages import MessageBuilder
from cairn.text.grammar.grammar import Wanted
from cairn.types.errors import Conflict, GenerationFailed, NotFound, NotLoaded, Overloaded
from cairn.types.outputs import Delta, Done

PATIENCE = 60
"""Tries of a turn whose queue is full."""

T = TypeVar("T")
Heard = Callable[[Delta], object]


class Spoken(msgspec.Struct, frozen=True, kw_only=True):
    """A member's answer and its token counts."""

    content: str
    turn: int = 0
    finish_reason: str = "stop"
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


class Caller(NamedTuple):
    """The client that members generate for."""

    tenant: str
    share: str = ""
    """Key of the fair share that the work counts against."""
    service: Service | None = None
    """The model that answers; None for the first loaded."""


class Voice(Protocol):
    """Generates members' answers; tests script one."""

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
        """Generate the agent's turn after turn `before`. `gate` is awaited first; `heard` gets the deltas."""
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
        """Generate an answer that does not become part of the agent's context."""
        ...


class AgentVoice:
    """A voice over the agents of this server."""

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
        """Implement `Voice.speak`."""
        head = await self._head(caller.tenant, agent, before)
        if head is not None and list(head.messages) == list(messages):
            if head.state == "finished":
                return _told(head, heard)
            if head.state == "interrupted":
                await gate()
                with contextlib.suppress(Conflict):  # another model answers now, or no room: generate anew
                    return await self._hear(await self._resume(caller, agent), heard)
        await self._stand_at(caller.tenant, agent, before)

        async def begin() -> RunningTurn:
            params = self._params(caller, options, wanted, gate)
            return await self._agents.turn(caller.tenant, agent, messages, params)

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
        """Implement `Voice.ask`."""
        await self._stand_at(caller.tenant, agent, before)

        async def begin() -> Spoken:
            params = self._params(caller, options, wanted, gate)
            stream = await self._agents.aside(caller.tenant, agent, messages, params)
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

    def _params(self, caller: Caller, options: SamplingOptions, wanted: Wanted, gate: Gate) -> TurnParams:
        """Return the settings of a turn; with a budget of 0 reasoning is off, if the template has a switch for it."""
        service = self._service(caller)
        without = options.reasoning_budget == 0 and service.chat.mentions("enable_thinking")
        return TurnParams(
            request=service.next_id(),
            share=caller.share,
            options=options,
            template_args={"enable_thinking": False} if without else None,
            wanted=wanted,
            service=caller.service,
            gate=gate,
        )

    async def _head(self, tenant: str, agent: str, before: int) -> TurnInfo | None:
        """Return the turn at the agent's head if it follows turn `before`."""
        number = self._agents.get(tenant, agent).head
        if number <= before:
            return None
        (head,) = await self._agents.turns(tenant, agent, after=number - 1, limit=1)
        return head if head.parent == before else None

    async def _stand_at(self, tenant: str, agent: str, before: int) -> None:
        """Roll the agent back to turn `before`. Raise Conflict if that turn is gone."""
        if self._agents.get(tenant, agent).head == before:
            return
        try:
            await self._agents.rollback(tenant, agent, turn=before)
        except NotFound:
            raise Conflict(
                f"agent {agent} has lost turn {before}, which its team needs; roll the team back to round 0"
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
    """Return a finished turn as an answer and send its content to `heard`."""
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
    """Retry while the queue is full - a team may be larger than it - or the model is being loaded.

    Also while a server that has just died counts as alive: it runs the turn that is to be resumed.
    """
    for _ in range(PATIENCE - 1):
        try:
            return await begin()
        except (NotLoaded, Overloaded, Running) as error:
            await asyncio.sleep(min(error.retry_after or 1.0, 5.0))
    return await begin()
