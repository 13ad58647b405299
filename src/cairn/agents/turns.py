"""The start of turns, and the continuation of interrupted ones."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from cairn.agents.agent_service import AgentService, conflict
from cairn.agents.archive import Archive, Unreadable, answerable, typed_read_errors
from cairn.agents.content import Branch, Content, digest
from cairn.agents.kv import BATCH
from cairn.agents.log.index import RecordKind
from cairn.agents.log.records import EndRecord, TurnRecord, check, pack
from cairn.agents.log.segment import Record
from cairn.agents.running_turn import RepeatedTurn, RunningTurn, said_before
from cairn.agents.turn_tree import Agent, Turn
from cairn.frontend.miss_explainer import PromptOrigin, describe_prompt
from cairn.frontend.request_options import PLAIN, RequestParams, SamplingOptions
from cairn.frontend.service import Service
from cairn.frontend.stream import RequestStream
from cairn.served_models.services import Services
from cairn.system.interfaces import Clock
from cairn.text.chat.messages import said_of
from cairn.text.chat.prompt import Prompt
from cairn.text.grammar.grammar import ANYTHING, Wanted
from cairn.types.errors import Conflict, InvalidRequest, Unavailable
from cairn.types.outputs import Done, Event, FinishReason, Usage
from cairn.types.request import Request, SamplingParams
from cairn.types.stats import CacheReport

Gate = Callable[[], Awaitable[None]]
"""Awaited between a prompt and its answer, so that several turns begin in one step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnParams:
    """The settings of one turn, or of one question that the agent does not remember."""

    request: int
    """Id of its request."""
    share: str = ""
    """Fairness key of its request."""
    options: SamplingOptions = PLAIN
    template_args: Mapping[str, Any] | None = None
    wanted: Wanted = ANYTHING
    """Constraints on the answer."""
    service: Service | None = None
    """The model that answers, on a server with several; None: the agent's own."""
    gate: Gate | None = None
    """Awaited once the prompt is complete."""


class Turns:
    """Starter of turns, which also handles their end."""

    def __init__(self, services: Services, agents: AgentService, archive: Archive, clock: Clock) -> None:
        self._services, self.writer, self.clock = services, agents.writer, clock
        self.write_later, self.sync, self.now = agents.pending.write_later, agents.pending.sync, agents.pending.now
        self._agents, self._archive = agents, archive
        self._starting: set[tuple[int, str]] = set()
        """Key of the agent and Idempotency-Key of each turn that is being started."""

    async def share_end(self, agent: Agent, turn: Turn, end: EndRecord) -> None:
        """See `Keeper`."""
        if (shared := self._agents.sharing(agent)) is not None:
            await shared.ended(agent, turn, end)

    def share_end_later(self, agent: Agent, turn: Turn, end: EndRecord) -> None:
        """See `Keeper`."""
        if (shared := self._agents.sharing(agent)) is not None:
            shared.ended_later(agent, turn, end)

    async def start(
        self,
        service: Service,
        agent: Agent,
        messages: Sequence[dict[str, Any]],
        params: TurnParams,
        *,
        fork_on_conflict: bool,
        once: str,
    ) -> RunningTurn:
        """Begin a turn with new messages, answered by `service`; or repeat the one that was begun with the key `once`.

        Raise Conflict if the head is not free, or while a turn with that key is being started.
        """
        start = partial(self._start, service, agent, messages, params, fork_on_conflict=fork_on_conflict, once=once)
        if not once:
            return await start()
        taken = agent.key, once
        if taken in self._starting:
            raise Conflict(f"a turn of agent {agent.id} with this Idempotency-Key is starting", field="Idempotency-Key")
        self._starting.add(taken)
        try:
            # With `fork_on_conflict` the first of them may have gone to a fork.
            for one in (agent, *(self._agents.registry.forks(agent) if fork_on_conflict else ())):
                with typed_read_errors(self._agents.registry, one):
                    again = await self.again(one, messages, once, params.request, params.share)
                if again is not None:
                    return again
            return await start()
        finally:
            self._starting.discard(taken)

    async def _start(
        self,
        service: Service,
        agent: Agent,
        messages: Sequence[dict[str, Any]],
        params: TurnParams,
        *,
        fork_on_conflict: bool,
        once: str,
    ) -> RunningTurn:
        self._agents.check_there(agent)
        forked = False
        if agent.busy or agent.head.state != "finished":
            if not fork_on_conflict:
                raise conflict(agent)
            whole = next(turn for turn in agent.head.path() if turn.state == "finished")
            agent, forked = await self._agents.fork(agent, whole, None), True
        agent.starting = True
        try:
            return await self._begin(service, agent, messages, params, once)
        except BaseException:
            if forked:
                with contextlib.suppress(Unavailable):
                    await self._agents.remove(agent)
            raise
        finally:
            agent.starting = False

    async def _begin(
        self, service: Service, agent: Agent, messages: Sequence[dict[str, Any]], params: TurnParams, once: str
    ) -> RunningTurn:
        check(messages, "messages")
        request, prompt, prefix, origin = await self._request(service, agent, messages, params)
        began = msgspec.structs.replace(self._record(service, agent, messages, prefix, request), once=once)
        # A request that cannot be served is refused here, before anything is written. The answer is computed while the
        # message is synced, and none of it is sent before.
        stream = service.generate(request, origin)
        try:
            turn = await self._agents.begin(agent, began)
        except BaseException:
            stream.close()
            raise
        if self._services.several and agent.record.model != service.name:
            agent.record = msgspec.structs.replace(agent.record, model=service.name)
            self.write_later(self._agents.pending.note(agent))
        running = self._run(service, agent, turn, request, stream, [])
        running.warnings = prompt.warnings
        return running

    async def aside(
        self, service: Service, agent: Agent, messages: Sequence[dict[str, Any]], params: TurnParams
    ) -> RequestStream:
        """Answer messages after the agent's context, which stays as it is. Raise Conflict if the head is not free."""
        if agent.busy or agent.head.state != "finished":
            raise conflict(agent)
        request, _, _, origin = await self._request(service, agent, messages, params)
        return service.generate(msgspec.structs.replace(request, durable=False, stored=False), origin)

    async def _request(
        self, service: Service, agent: Agent, messages: Sequence[dict[str, Any]], params: TurnParams
    ) -> tuple[Request, Prompt, int, PromptOrigin]:
        """Return the request for the messages once the gate lets it pass, and what `_prompt` returns."""
        prompt, prefix, origin = await self._prompt(service, agent, messages, params)
        (request,) = service.make_requests(
            prompt.tokens,
            params.options,
            RequestParams(
                output=prompt.output, grammar=prompt.grammar, salt=agent.salt, share=params.share, durable=True
            ),
            ids=lambda: params.request,
        )
        if params.gate is not None:
            await params.gate()
        return request, prompt, prefix, origin

    async def _prompt(
        self, service: Service, agent: Agent, messages: Sequence[dict[str, Any]], params: TurnParams
    ) -> tuple[Prompt, int, PromptOrigin]:
        """Return the next turn's prompt, how many of its ids are the head's context, and its origin.

        The origin helps to explain missing KV.
        """
        chat, head = service.chat, agent.head
        branch = await self._archive.branch(head)
        history, tools = branch.messages(), list(branch.beginning.tools) or None
        share, template_args = params.share, params.template_args
        wanted = _with_strict(params.wanted, branch.beginning.strict)
        whole = [*history, *messages]
        changed = bool(head.number) and head.identity != service.spec.identity
        origin = describe_prompt(whole, why="model changed" if changed else None)
        before = branch.context() if head.number and not changed else None
        if before is not None:
            # KV that was not computed by this server and its kernels cannot have been evicted here.
            if branch.last.began.engine == service.info.identity:
                messages_before = origin.messages[: len(history)]
                service.recent.note(agent.salt, before, len(before), messages_before, adapters=service.applied)
            extended = await chat.extend(
                before, history, messages, tools, share=share, template_args=template_args, wanted=wanted
            )
            if extended is not None:
                return extended, len(before), origin
        elif not changed:
            await self._recall(service, agent, branch)
        prompt = await chat.prompt(
            whole, tools, tenant=agent.tenant, share=share, template_args=template_args, wanted=wanted
        )
        return prompt, 0, origin

    async def _recall(self, service: Service, agent: Agent, branch: Branch) -> None:
        """Register a branch's answers for exact replay: its context cannot be extended, so all is rendered anew."""
        for looked, (content, prompt) in enumerate(branch.prompts(), 1):
            if content.ended is not None and content.ended.keep >= 0 and content.answer is not None:
                service.chat.remember(agent.tenant, prompt, content.tokens, content.answer)
            if looked % BATCH == 0:
                await asyncio.sleep(0)

    def _record(
        self, service: Service, agent: Agent, messages: Sequence[dict[str, Any]], prefix: int, request: Request
    ) -> TurnRecord:
        """Return the record with all that the turn needs to be continued after a restart."""
        return TurnRecord(
            agent=agent.key,
            number=agent.next_number(),
            parent=agent.head.key,
            messages=tuple(messages),
            prefix=prefix,
            ids=pack(request.prompt[prefix:]),
            digest=digest(request.prompt),
            identity=service.variant.identity,
            base=service.variant.base if service.applied else b"",
            adapters=service.applied,
            engine=service.info.identity,
            sampling=request.sampling,
            stop=request.stop,
            output=request.output,
            grammar="" if request.grammar is None else request.grammar.text,
            reasoning_budget=request.reasoning_budget,
            began=self.now(),
            request=request.id,
        )

    async def resume(self, agent: Agent, number: int, share: str) -> RunningTurn:
        """Continue the interrupted turn at the head as the request `number`. Raise Conflict if that is impossible.

        `share`: fairness key of the request.
        """
        if agent.busy:
            raise conflict(agent)
        service = self._services.of(agent.head.identity) or self._services.first
        agent.starting, shared, resumed = True, self._agents.sharing(agent), False
        try:
            async with self._interrupted_branch(agent) as branch:
                request = self._resumed_request(service, agent, branch, number, share)
                began = branch.last.began
                grammar = await service.chat.same_grammar(began.grammar, began.output, share=share)
                request = msgspec.structs.replace(request, grammar=grammar)
                if shared is not None:
                    await shared.resumed(agent)
                    resumed = True
        except BaseException:
            if resumed and shared is not None:  # else the other servers would wait for its end
                shared.not_resumed(agent)
            raise
        finally:
            agent.starting = False
        turn = agent.head
        tokens = tuple(turn.held.tokens)
        first, reason = said_before(service, request, tokens)
        stream = None
        if reason is None:
            try:
                stream = service.generate(msgspec.structs.replace(request, generated=tokens))
            except BaseException:
                if shared is not None:  # else the other servers would wait for its end
                    shared.not_resumed(agent)
                raise
        return self._run(service, agent, turn, request, stream, first)

    async def again(
        self, agent: Agent, messages: Sequence[dict[str, Any]], once: str, number: int, share: str
    ) -> RunningTurn | None:
        """Return the turn at the head again if its Idempotency-Key is `once`; else None.

        A finished turn is only sent again, an interrupted one is resumed. Raise Conflict while it runs, InvalidRequest
        if it had other messages.
        """
        turn = agent.head
        if not turn.number or turn.once != hash(once):
            return None
        (content,) = await self._archive.contents([turn])
        began = content.began
        if began.once != once or agent.head is not turn or agent not in self._agents.registry:
            return None
        if began.messages != tuple(messages):
            raise InvalidRequest(
                "this Idempotency-Key was sent with other messages; give each turn a key of its own",
                field="Idempotency-Key",
            )
        if agent.busy or agent.head.state != "finished":
            return await self.resume(agent, number, share)
        service = self._services.of(turn.identity)
        branch = await self._archive.branch(turn)
        prompt, tokens, ended = branch.prompt(), tuple(content.tokens), content.ended
        request = Request(
            id=number,
            prompt=tuple(prompt),
            sampling=began.sampling or SamplingParams(max_tokens=max(1, len(tokens))),
            stop=began.stop,
            output=began.output,
            salt=agent.salt,
            share=share,
        )
        deltas: list[Event]
        if service is None:  # its ids mean other words to the models that are loaded now
            deltas = [*said_of(content.answer).parts()]
        else:
            events, _ = said_before(service, request, tokens)
            deltas = [event for event in events if not isinstance(event, Done)]
        usage = Usage(prompt_tokens=len(prompt), completion_tokens=len(tokens))
        done = Done(
            reason=FinishReason(ended.reason) if ended is not None and ended.reason else FinishReason.STOP,
            usage=usage,
            cache=ended.cache if ended is not None else CacheReport(),
        )
        return RepeatedTurn(self, service or self._services.first, agent, turn, request, [*deltas, done])

    @contextlib.asynccontextmanager
    async def _interrupted_branch(self, agent: Agent) -> AsyncIterator[Branch]:
        """Yield the branch of the head. If the log has lost its answer, the turn counts as interrupted without one.

        Once the caller's block succeeds, that is logged: the log may still hold pieces of the lost answer, which a
        later start would put before the new ones.
        """
        turn = agent.head
        try:
            branch = await self._archive.branch(turn)
        except Unreadable as error:
            if error.content is None or not answerable(self._agents.registry, agent, error):
                raise
            lost = Content(error.content.began)
        else:
            yield branch
            return
        turn.state, turn.content = "interrupted", lost
        try:
            yield await self._archive.branch(turn)
            end = EndRecord(state="interrupted", ids=b"", ended=self.now())
            await self.sync(self.writer.record(RecordKind.END, end, turn.key))
        except BaseException:
            turn.state, turn.content = "finished", None
            raise

    def _resumed_request(self, service: Service, agent: Agent, branch: Branch, number: int, share: str) -> Request:
        """Return the request that the turn at the head began with, limited to what this server has room for.

        Log-probabilities are off if some of the answer exists: the log has none for it, and those of the rest would be
        read as those of the first tokens.
        """
        turn = agent.head
        began, named = branch.last.began, f"turn {turn.number} of agent {agent.id}"
        back = f"roll back to turn {turn.parent_number}"
        if turn.state != "interrupted":
            raise Conflict(f"{named} is {turn.state}; only an interrupted one is resumed")
        if began.sampling is None:
            raise Conflict(f"{named} was imported, and files hold no sampling parameters to resume it with; {back}")
        prompt = branch.prompt()
        if began.identity != service.spec.identity:
            raise Conflict(f"{named} was begun with another model; {back}")
        if began.engine not in (b"", service.info.identity):
            raise Conflict(
                f"{named} was begun with other kernels, weights, kv_dtype or kv_codec, which may answer differently; "
                f"{back}"
            )
        if digest(prompt) != began.digest:
            raise Conflict(f"damage to the log has lost a turn before {named}; {back}")
        holds = min(service.info.context, service.info.pool_tokens)
        least = len(prompt) + max(1, len(branch.last.tokens))
        if least > holds:
            raise Conflict(
                f"{named} needs {least} tokens of context at least, and this server has room for {holds}; {back}"
            )
        limit = min(began.sampling.max_tokens, holds - len(prompt))
        sampling = msgspec.structs.replace(began.sampling, max_tokens=limit)
        if branch.last.tokens:
            sampling = msgspec.structs.replace(sampling, logprobs=False, top_logprobs=0)
        return Request(
            id=number,
            prompt=tuple(prompt),
            sampling=sampling,
            stop=began.stop,
            output=began.output,
            reasoning_budget=began.reasoning_budget,
            salt=agent.salt,
            adapters=service.applied,
            share=share,
            durable=True,
        )

    def _run(
        self,
        service: Service,
        agent: Agent,
        turn: Turn,
        request: Request,
        stream: RequestStream | None,
        first: Sequence[Event],
    ) -> RunningTurn:
        turn.state = "running"
        agent.running = RunningTurn(self, service, agent, turn, request, stream, first)
        return agent.running

    def ended(
        self, agent: Agent, done: Done | None, end: EndRecord, context: Callable[[], Sequence[int]]
    ) -> Sequence[Record]:
        """Handle the end of a turn: count it and return the records to write with it."""
        agent.used = end.ended
        if end.state == "finished":
            self._agents.kv.turn_ended(agent, context, in_call=end.reason == FinishReason.TOOL_CALLS.value)
            if agent.record.pinned:
                self._agents.kv.pin_later(agent)
        return self._agents.pending.count(agent, done) if done is not None else ()


def _with_strict(wanted: Wanted, names: tuple[str, ...]) -> Wanted:
    """Return `wanted` with the agent's strict tools added to those of the turn."""
    strict = tuple(dict.fromkeys((*wanted.choice.strict, *names)))
    return msgspec.structs.replace(wanted, choice=msgspec.structs.replace(wanted.choice, strict=strict))
