"""One exchange: a call, what generates for it, and the dialect in which it is answered. One loop runs all of them.

source ──batches of events──> `chunks`, the loop ──bytes──> the connection, which ends the exchange when it closes
                                    │   ▲                or an event log, which connections follow and come back to
                                    └───┘ `Adapter`: how a dialect says it
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from cairn.api.chat.attribution import Attribution
from cairn.api.http.call import Headers, HTTPCall, Watch, internal
from cairn.api.http.event_log import CallTable, EventLogs, Follower, is_resumable
from cairn.api.http.sse import EVENT_STREAM
from cairn.config.config import Config
from cairn.frontend.miss_explainer import PromptOrigin
from cairn.frontend.service import Service
from cairn.frontend.stream import RequestStream, merge
from cairn.text.chat.messages import MessageBuilder, reasoning_tokens
from cairn.types.errors import (
    CairnError,
    Cancelled,
    DeadlineExceeded,
    GenerationFailed,
    InvalidRequest,
    Overloaded,
)
from cairn.types.outputs import Delta, Done, Event, FinishReason, TokenKind, TokenLogprob, logprobs_of
from cairn.types.request import Request

Batches = AsyncGenerator[Sequence[tuple[int, Event]], None]
"""Batches of (choice, event) pairs. The first is empty: it says that the requests were admitted."""
Source = Callable[["Silence | None"], Batches]
"""Starts an answer and returns its batches. With a `Silence` it yields an empty batch, at the latest, when a heartbeat
is due."""
UNREAD = (
    "the answer has something that begins like a tool call but cannot be read as one: it is returned as the model "
    "wrote it, in the content or as the arguments of the call"
)


class Silence:
    """The time for which a stream has sent nothing.

    Clients end streams that are silent for minutes. Tokens that are not sent, such as hidden reasoning or a call that
    is held back, do not count.
    """

    __slots__ = ("_loop", "_since", "most")

    def __init__(self, most: float) -> None:
        """Allow at most `most` seconds of silence."""
        self.most = most
        self._loop = asyncio.get_running_loop()
        self._since = self._loop.time()

    @property
    def left(self) -> float:
        """Seconds until a heartbeat is due."""
        return max(0.0, self._since + self.most - self._loop.time())

    def broken(self) -> None:
        """Record that something is sent."""
        self._since = self._loop.time()


class Adapter(Protocol):
    """The format of one dialect: an answer as whole events, or as one object.

    `begin` comes first, then `delta` and `finish` of every choice, then `end`. `error` may take the place of any of
    them but the first; `heartbeat` may come between them.
    """

    def begin(self) -> bytes:
        """Return the first events of a stream."""
        ...

    def delta(self, index: int, delta: Delta, /) -> bytes:
        """Return the events of one delta of a choice."""
        ...

    def finish(self, index: int, done: Done, reason: str, /) -> bytes:
        """Return the events that end a choice."""
        ...

    def end(self) -> bytes:
        """Return the last events of a stream, when all choices have ended."""
        ...

    def error(self, error: CairnError, /) -> bytes:
        """Return the events that end a stream which failed after it began."""
        ...

    def heartbeat(self) -> bytes:
        """Return bytes that keep an idle stream awake."""
        ...

    def whole(self) -> Any:
        """Return the answer in one piece as a JSON value, when all choices have ended."""
        ...


class ChoiceStream:
    """The state of one choice."""

    __slots__ = (
        "done",
        "ending",
        "kinds",
        "logprobs",
        "prompt_logprobs",
        "reasoning_tokens",
        "request",
        "said",
        "stream",
        "tokens",
    )

    def __init__(self, request: Request) -> None:
        self.request = request
        self.said = MessageBuilder()
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.kinds = bytearray()
        """A `TokenKind` for each entry of `logprobs`."""
        self.prompt_logprobs: list[TokenLogprob] = []
        self.done: Done | None = None
        self.stream: RequestStream | None = None
        """The request's stream, once it is started."""
        self.reasoning_tokens = 0
        """Number of reasoning tokens, tags included."""
        self.ending = False
        """Whether the current batch holds its end."""

    @property
    def computed(self) -> Sequence[int]:
        """All tokens generated so far, including those that a slow client has not read yet."""
        return self.tokens if self.stream is None else self.stream.tokens

    @property
    def reason(self) -> str:
        """The finish_reason, once it has ended."""
        assert self.done is not None
        return self.done.reason.value

    @property
    def detail(self) -> dict[str, str]:
        """The field `finish_detail`, if the end has one: more than its finish_reason says."""
        return {"finish_detail": self.done.detail} if self.done is not None and self.done.detail else {}

    def scores(self, kind: TokenKind) -> Sequence[TokenLogprob]:
        """Return the log-probabilities of the content, or of the reasoning."""
        return logprobs_of(kind, self.kinds, self.logprobs)

    def stop_text(self, decode: Callable[[Sequence[int]], str]) -> str | None:
        """Return the stop text that ended the choice; None if none did."""
        assert self.done is not None
        ended = self.tokens and self.tokens[-1] in self.request.sampling.stop_token_ids
        if self.done.reason is not FinishReason.STOP or not self.request.stop or ended:
            return None
        # The last token completed it. Reasoning, which no stop text ends, may have had others before.
        text, before = decode(self.tokens), len(decode(self.tokens[:-1]))
        places = [(text.find(one, max(0, before - len(one) + 1)), one) for one in self.request.stop]
        ends = [(place + len(one), one) for place, one in places if place >= 0]
        if ends:
            return min(ends)[1]
        ends = [(text.rfind(one) + len(one), one) for one in self.request.stop if one in text]
        return max(ends)[1] if ends else None

    def add(self, delta: Delta, *, keep_logprobs: bool) -> None:
        """Add a piece. Log-probabilities are large, so a stream sends them at once and does not keep them."""
        if keep_logprobs:
            self.logprobs += delta.logprobs
            self.kinds += delta.kinds
        self.said.add(delta)
        self.tokens += delta.tokens
        self.reasoning_tokens += reasoning_tokens(delta)
        self.prompt_logprobs += delta.prompt_logprobs

    def end(self, done: Done) -> str:
        """Record the end and return its finish_reason. Raise if the choice did not end well."""
        match done.reason:
            case FinishReason.CANCELLED:
                raise Cancelled("the request was cancelled")
            case FinishReason.DEADLINE:
                raise DeadlineExceeded("the request reached its time limit")
            case FinishReason.ERROR:
                raise GenerationFailed("the generation failed")
        self.done = done
        return done.reason.value


@dataclass(slots=True)
class Exchange:
    """The generation and formatting of one call's answer. It may outlive the call's connection."""

    choices: Sequence[ChoiceStream]
    adapter: Adapter
    source: Source
    cancel: Callable[[], object]
    """Cancels the requests."""
    keep: Callable[[ChoiceStream], None]
    """Stores a choice; called with each that has ended well."""
    attribution: Attribution | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    """The dialect's names of request fields, by our own names, if they differ."""
    numbered: bool = False
    """Whether heartbeats are numbered events, which an event log keeps."""
    media: Headers = field(default_factory=lambda: EVENT_STREAM)
    """Headers of a stream. Only server-sent events can be kept in an event log."""
    outlives: bool = False
    """Whether it goes on for the grace time after its connection closed, even if the client did not ask for that."""
    unattended: bool = False
    """Whether it goes on to its end without a reader."""
    warnings: Sequence[str] = ()
    """Constraints on the answer that are not enforced: sentences that begin with the name of a field."""
    warn: Callable[[str], None] = lambda sentence: None
    """Sends a warning beside the answer."""

    async def chunks(
        self, heartbeat: float | None = None, *, stream: bool, log: bool = False
    ) -> AsyncGenerator[bytes, None]:
        """Yield the answer's bytes as they are generated.

        The first piece is empty and says that the requests were admitted: later failures are part of the answer.
        `stream`: the client reads events, else the whole answer at the end. `log`: yield events in any case.
        """
        say = stream or log
        silence = None if heartbeat is None else Silence(heartbeat)
        with rename_fields(self.names), self._attributed():
            async with contextlib.aclosing(self.source(silence)) as found:
                await anext(found)
                yield b""
                data = self.adapter.begin() if say else b""
                try:
                    async for batch in found:
                        news = self._say(batch, say, keep_logprobs=not stream)
                        over = self.over
                        if say and not news and not over and silence is not None and not silence.left:
                            news = self.adapter.heartbeat()
                        data += news
                        if data and silence is not None:
                            silence.broken()
                        if over and self.attribution is not None:
                            await self.attribution.written()
                        if say and over:
                            data += self.adapter.end()
                        if data and say:
                            yield data
                        data = b""
                except CairnError:
                    if data and say:  # a failure before the first token counts as begun too
                        yield data
                    raise

    def _say(self, batch: Sequence[tuple[int, Event]], say: bool, *, keep_logprobs: bool) -> bytes:
        """Apply a batch to its choices; return its events, empty unless `say`."""
        data = b""
        for index, event in batch:
            self.choices[index].ending |= isinstance(event, Done)
        for index, event in batch:
            choice = self.choices[index]
            if isinstance(event, Done):
                reason = choice.end(event)
                if event.unread_call:
                    self.warn(UNREAD)
                if event.moved:
                    self.warn(event.moved)
                if say:
                    data += self.adapter.finish(index, event, reason)
                self.keep(choice)
            else:
                choice.add(event, keep_logprobs=keep_logprobs)
                if say:
                    data += self.adapter.delta(index, event)
        return data

    @property
    def over(self) -> bool:
        """Whether all choices have ended."""
        for choice in self.choices:  # noqa: SIM110 - asked for each event: three times as fast as all()
            if choice.done is None:
                return False
        return True

    @property
    def tokens(self) -> tuple[int, int]:
        """Tokens of all prompts, each counted once, and of all answers, whichever way they ended."""
        prompts = sum(len(choice.request.prompt) for choice in self.choices if choice.request.choice == 0)
        return prompts, sum(len(choice.computed) for choice in self.choices)

    @contextlib.contextmanager
    def _attributed(self) -> Iterator[None]:
        """Mark the agent as in use while choices are generated.

        Choices that are cut off are recorded too: their KV belongs to the agent.
        """
        computed = True
        try:
            with self.attribution.using() if self.attribution is not None else contextlib.nullcontext():
                yield
        except Overloaded:
            computed = False
            raise
        finally:
            for choice in self.choices:
                if self.attribution is not None and choice.stream is not None and choice.done is None and computed:
                    self.attribution.cut(choice.request, choice.computed)


class Exchanges:
    """Runs the exchanges of one server."""

    def __init__(self, config: Config, calls: CallTable, logs: EventLogs) -> None:
        self._heartbeat = config.heartbeat
        self._calls = calls
        self._logs = logs

    async def run(self, call: HTTPCall, exchange: Exchange, *, stream: bool) -> None:
        """Answer a call, as a stream of events or in one piece."""
        exchange.warn = call.warn
        _warn_unenforced(call, exchange)
        logged = exchange.outlives or is_resumable(call, stream)
        if logged and exchange.media is not EVENT_STREAM:
            raise InvalidRequest(
                "X-Cairn-Resumable goes with server-sent events, which this route does not send",
                field="X-Cairn-Resumable",
            )
        numbers = [choice.request.id for choice in exchange.choices]
        self._calls.open(call.number, numbers, name=call.name, salt=call.salt)
        if logged:
            await self._follow(call, exchange, stream)
            return
        try:
            async with Watch(call) as watch:
                if stream:
                    await self._stream(call, exchange, watch)
                else:
                    await self._whole(call, exchange, watch)
            if watch.left:
                call.ended = "client_left"
        finally:
            self._calls.close(call.number)
            call.tokens = exchange.tokens

    def begin(self, call: HTTPCall, exchange: Exchange) -> None:
        """Generate onto an event log that the connection does not read."""
        _warn_unenforced(call, exchange)
        self._calls.open(call.number, [one.request.id for one in exchange.choices], name=call.name, salt=call.salt)
        self._log(call, exchange, stream=False).leave()

    def _log(self, call: HTTPCall, exchange: Exchange, *, stream: bool) -> Follower:
        number = call.number
        over = partial(self._calls.close, number)
        beat = self._heartbeat if exchange.numbered else None
        events = _closing(exchange.chunks(beat, stream=stream, log=True), over)
        return self._logs.start(
            call, events, exchange.cancel, self._heartbeat, exchange.adapter.error, exchange.unattended
        )

    async def _follow(self, call: HTTPCall, exchange: Exchange, stream: bool) -> None:
        """Generate onto an event log, with the connection as its first reader."""
        follower = self._log(call, exchange, stream=stream)
        try:
            await (follower.run(call) if stream else follower.wait(call))
        finally:
            call.tokens = exchange.tokens
        if not stream:
            await call.json(exchange.adapter.whole())

    async def _whole(self, call: HTTPCall, exchange: Exchange, watch: Watch) -> None:
        async with contextlib.aclosing(exchange.chunks(stream=False)) as chunks:
            async for _ in chunks:
                pass
        whole = exchange.adapter.whole()
        watch.stop()
        await call.json(whole)

    async def _stream(self, call: HTTPCall, exchange: Exchange, watch: Watch) -> None:
        try:
            async with contextlib.aclosing(exchange.chunks(self._heartbeat, stream=True)) as chunks:
                async for data in chunks:
                    if not call.started:
                        await call.begin(exchange.media)
                        continue
                    if exchange.over:
                        watch.stop()
                        await call.write(data, more=False)
                        return
                    await call.write(data)
        except Exception as error:
            if not call.started:
                raise
            watch.stop()
            known = error if isinstance(error, CairnError) else internal(call.id)
            call.ended = known.code
            await call.write(exchange.adapter.error(known), more=False)
            if known is not error:
                raise


async def _closing(chunks: AsyncGenerator[bytes, None], over: Callable[[], None]) -> AsyncGenerator[bytes, None]:
    """Yield the same chunks, then call `over`."""
    try:
        async with contextlib.aclosing(chunks):
            async for data in chunks:
                yield data
    finally:
        over()


def generating(service: Service, choices: Sequence[ChoiceStream], origin: PromptOrigin) -> Source:
    """Return the source of an answer by `service`. Each choice gets its stream once its request is started."""
    of = {choice.request.id: choice for choice in choices}

    def start(request: Request) -> RequestStream:
        of[request.id].stream = stream = service.generate(request, origin)
        return stream

    def batches(silence: Silence | None) -> Batches:
        left = None if silence is None else lambda: silence.left
        return merge(start, [choice.request for choice in choices], heartbeat=left, announce=True)

    return batches


@contextlib.contextmanager
def rename_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Rename the field of an InvalidRequest raised inside: `names` maps our names to the dialect's."""
    try:
        yield
    except InvalidRequest as error:
        name = renamed_field(error.field or "", names)
        if name is None:
            raise
        text = str(error) if error.field == "prompt" else str(error).replace(str(error.field), name)
        raise error.named(text, name) from None


def renamed_field(field: str, names: Mapping[str, str]) -> str | None:
    """Return a field's name in the dialect, by the longest prefix in `names`; None if it has no other name there."""
    known, rest = field, ""
    while known not in names and "." in known:
        known, _, inner = known.rpartition(".")
        rest = f".{inner}{rest}"
    return names[known] + rest if known in names else None


def _warn_unenforced(call: HTTPCall, exchange: Exchange) -> None:
    """Warn of constraints that are not enforced, with the client's names of the fields."""
    for sentence in exchange.warnings:
        field, sign, said = sentence.partition(":")
        call.warn(f"{renamed_field(field, exchange.names) or field}{sign}{said}")
