"""A running turn: its tokens are logged as they are sampled, its end before the last event."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Protocol

import msgspec

from cairn.agents.log.index import RecordKind
from cairn.agents.log.records import EndRecord, Failure, TokensRecord, pack
from cairn.agents.log.segment import Record
from cairn.agents.log.writer_thread import Writer
from cairn.agents.turn_tree import Agent, Turn
from cairn.frontend.service import Service
from cairn.frontend.stream import RequestStream, merge
from cairn.kv.pool.blocks import common_length
from cairn.system.interfaces import Clock
from cairn.text.chat.messages import MessageBuilder, reasoning_tokens
from cairn.text.output.stream import TextStream
from cairn.types.errors import CairnError, Cancelled, GenerationFailed, Unavailable
from cairn.types.outputs import REPETITION, Delta, Done, Event, FinishReason, Timing, Usage
from cairn.types.request import Request
from cairn.types.stats import CacheReport

PIECE_TOKENS = 16
PIECE_SECONDS = 0.25
"""Tokens are logged when there are PIECE_TOKENS of them, or when the first of them is this old."""
STOP_SECONDS = 2.0
"""How long `stop` waits for the end of a turn."""
GOOD = frozenset({FinishReason.STOP, FinishReason.LENGTH, FinishReason.TOOL_CALLS})


class Keeper(Protocol):
    """What a running turn needs from its owner."""

    writer: Writer
    clock: Clock

    def now(self) -> float:
        """Return the seconds since 1970, by the clock from which agents' ages are computed."""
        ...

    def ended(
        self, agent: Agent, done: Done | None, end: EndRecord, context: Callable[[], Sequence[int]]
    ) -> Sequence[Record]:
        """Handle the end of a turn, which is set in memory; return the records to write with it.

        `context` returns the ids that the next turn continues from.
        """
        ...

    def write_later(self, *records: Record) -> None:
        """Write these records as soon as the disk takes them."""
        ...

    async def share_end(self, agent: Agent, turn: Turn, end: EndRecord) -> None:
        """Acknowledge the end of a turn in the shared store, if there is one. Raise Unavailable if that fails."""
        ...

    def share_end_later(self, agent: Agent, turn: Turn, end: EndRecord) -> None:
        """Write the end of a turn that nobody waits for to the shared store, if there is one."""
        ...

    async def sync(self, *records: Record) -> None:
        """Write all pending records and then these; return when they are durable."""
        ...


class RunningTurn:
    """A turn from its start to its end. Its owner reads `batches` to the end, or calls `close`."""

    def __init__(
        self,
        keeper: Keeper,
        service: Service,
        agent: Agent,
        turn: Turn,
        request: Request,
        stream: RequestStream | None,
        first: Sequence[Event],
    ) -> None:
        """Create a running turn.

        `first`: events of an earlier run of the turn; without a `stream` they are the whole answer.
        """
        self.agent, self.turn, self.request = agent, turn, request
        self.over = asyncio.Event()
        self.discarded = False
        """Whether the agent is being deleted, so that nothing more is written."""
        self.warnings: Sequence[str] = ()
        """Constraints on the answer that are not enforced (`Prompt.warnings`)."""
        self._keeper, self._service, self._stream, self._first = keeper, service, stream, first
        self._content = turn.held
        self._said = MessageBuilder()
        self._reasoning = 0
        self._failure: Failure | None = None
        self._pending: list[Delta] = []
        self._since = 0.0

    @property
    def cache(self) -> CacheReport | None:
        """Source of the prompt's KV, once the prompt was computed."""
        return None if self._stream is None else self._stream.cache

    def cancel(self) -> None:
        """Interrupt the turn: its reader gets `Cancelled`, then `over` is set."""
        self._service.abort(self.request.id)

    async def stop(self) -> None:
        """Cancel the turn and wait until it has ended, for up to STOP_SECONDS."""
        self.cancel()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.over.wait(), STOP_SECONDS)

    async def close(self) -> None:
        """End the turn without a reader."""
        if self._stream is not None:
            self._stream.close()
        if not self.over.is_set():
            await self._end(None)

    async def batches(self, *, beats: bool = False) -> AsyncGenerator[list[Event], None]:
        """Yield the events in batches; `Done` comes once the turn's end is durable.

        With `beats`, an empty batch says that nothing came for PIECE_SECONDS. A resumed turn begins with the events of
        its earlier run. Raise the error that ended the generation, Unavailable if the end cannot be written, and
        GenerationFailed if no record can hold the answer. In every case the answer so far is kept; in the last, only
        its tokens.
        """
        done: Done | None = None
        try:
            async with contextlib.aclosing(self._events()) as batches:
                async for events in batches:
                    done = next((event for event in events if isinstance(event, Done)), None)
                    if done is not None:
                        await self._end(done)
                    if events or beats:
                        yield events
        except CairnError as error:
            if not isinstance(error, Cancelled) and self._failure is None:
                self._failure = Failure(error.code, str(error), error.status)
            raise
        finally:
            if not self.over.is_set():
                await self._end(None)

    async def _events(self) -> AsyncGenerator[list[Event], None]:
        for event in self._first:
            if isinstance(event, Delta):
                self._said.add(event)
                self._reasoning += reasoning_tokens(event)
        if self._first:
            yield list(self._first)
        stream = self._stream
        if stream is None:
            return
        async with contextlib.aclosing(
            merge(lambda _: stream, [self.request], heartbeat=lambda: PIECE_SECONDS)
        ) as batches:
            async for batch in batches:
                events = [self._take(event) for _, event in batch]
                self._log(self._keeper.clock.now())
                yield events

    def _take(self, event: Event) -> Event:
        """Record an event. The usage in `Done` is made to count the tokens of earlier runs too."""
        if isinstance(event, Done):
            usage = msgspec.structs.replace(event.usage, completion_tokens=len(self._content.tokens))
            return msgspec.structs.replace(event, usage=usage)
        self._said.add(event)
        self._reasoning += reasoning_tokens(event)
        if not self._pending:
            self._since = self._keeper.clock.now()
        self._pending.append(event)
        self._content.extend(event.tokens)
        return event

    def _log(self, now: float) -> None:
        """Send tokens to the log's thread once there are enough of them."""
        tokens = [token for delta in self._pending for token in delta.tokens]
        if self.discarded or not tokens or (len(tokens) < PIECE_TOKENS and now - self._since < PIECE_SECONDS):
            return
        text = "".join(delta.text for delta in self._pending)
        reasoning = "".join(delta.reasoning for delta in self._pending)
        self._pending = []
        writer = self._keeper.writer
        at = len(self._content.tokens) - len(tokens)
        piece = TokensRecord(ids=pack(tokens), at=at, text=text, reasoning=reasoning)
        with contextlib.suppress(Unavailable):  # the log is closed; the end will report it
            writer.append(writer.record(RecordKind.TOKENS, piece, self.turn.key))

    async def _end(self, done: Done | None) -> None:
        """Write the end of the turn; wait for that only if the answer is complete."""
        good = done is not None and done.reason in GOOD
        failure = None
        try:  # build the record before anything changes
            end, record = self._build_end(done, self._said.kept() if self._said else None, good=good)
        except UnicodeError:  # half a surrogate pair, which UTF-8 cannot hold
            named = f"turn {self.turn.number} of agent {self.agent.id}"
            if good:
                failure = GenerationFailed(f"the answer of {named} holds half a surrogate pair and cannot be kept")
            good = False
            end, record = self._build_end(done, None, good=False)
        self.turn.end(end)
        self.agent.running = None
        self.over.set()
        if self.discarded:
            return
        if good:
            await self._keeper.share_end(self.agent, self.turn, end)
        else:
            self._keeper.share_end_later(self.agent, self.turn, end)
        more = self._keeper.ended(self.agent, done, end, lambda: self._content.known([*self.request.prompt]))
        if good:
            self._keeper.write_later(record, *more)
            await self._keeper.sync()
            self.turn.release()
        else:
            with contextlib.suppress(Unavailable):
                self._keeper.writer.append(record, *more)
        if failure is not None:
            raise failure

    def _build_end(self, done: Done | None, message: dict[str, Any] | None, *, good: bool) -> tuple[EndRecord, Record]:
        """Return the end with its record. Raise UnicodeError if the message cannot be encoded."""
        end = EndRecord(
            state="finished" if good else "interrupted",
            ids=pack(self._content.tokens),
            message=message,
            reason=done.reason.value if done is not None else "",
            detail=done.detail if done is not None else "",
            timing=done.timing if done is not None else Timing(),
            failure=None if good else self._failure,
            reasoning=self._reasoning,
            cache=_logged(done.cache) if done is not None else CacheReport(),
            ended=self._keeper.now(),
            **self._kept_tokens(message if good else None),
        )
        return end, self._keeper.writer.record(RecordKind.END, end, self.turn.key)

    def _kept_tokens(self, message: dict[str, Any] | None) -> dict[str, Any]:
        """Return how many of the tokens the next turn's context holds, and the ids that follow them."""
        if message is None:
            return {}
        tokens = list(self._content.tokens)
        sampled = self._service.chat.remember(self.agent.tenant, self.request.prompt, tokens, message)
        if sampled is None:
            return {}
        ids = list(sampled.ids[sampled.opened :])
        same = common_length(ids, tokens)
        return {"keep": same, "more": pack(ids[same:])}


class RepeatedTurn(RunningTurn):
    """A finished turn whose answer is sent again. Nothing is computed or written."""

    def __init__(
        self, keeper: Keeper, service: Service, agent: Agent, turn: Turn, request: Request, first: Sequence[Event]
    ) -> None:
        self.agent, self.turn, self.request = agent, turn, request
        self.over, self.discarded, self.warnings = asyncio.Event(), False, ()
        self.over.set()
        self._keeper, self._service, self._stream, self._first = keeper, service, None, first

    async def batches(self, *, beats: bool = False) -> AsyncGenerator[list[Event], None]:
        """Yield the whole answer."""
        yield list(self._first)


def _logged(cache: CacheReport) -> CacheReport:
    """Return the report without texts: they may be another agent's, which must not outlive that one."""
    if cache.miss is None:
        return cache
    return msgspec.structs.replace(cache, miss=msgspec.structs.replace(cache.miss, differs=None))


def said_before(service: Service, request: Request, tokens: Sequence[int]) -> tuple[list[Event], FinishReason | None]:
    """Return the events of an interrupted turn's tokens, and the finish reason if they are already complete."""
    text = TextStream(service.tokenizer, request)
    events: list[Event] = [*text.push(tokens)] if tokens else []
    sampling = request.sampling
    reason = None
    if text.stopped or (tokens and tokens[-1] in sampling.stop_token_ids and len(tokens) > sampling.min_tokens):
        reason = FinishReason.LENGTH if text.looped else FinishReason.STOP
    elif len(tokens) >= sampling.max_tokens:
        reason = FinishReason.LENGTH
    if reason is not None:
        deltas, reason = text.finish(reason)
        usage = Usage(prompt_tokens=len(request.prompt), completion_tokens=text.completion_tokens)
        detail = REPETITION if text.looped else ""
        events += [*deltas, Done(reason=reason, usage=usage, cache=CacheReport(), detail=detail)]
    return events, reason
