"""GET /v1/cache/events: which KV this server holds, in vLLM's KV events. Nothing is done while nobody follows.

    kv      a `KVEventBatch`. The first one of a reader that missed events begins with `AllBlocksCleared`, and all
            blocks follow
    texts   a `TextBlocks`: which block ends where the text of a request ends, for routers that have no tokenizer

Events are numbered. A reader that comes back with Last-Event-ID, or `?after=`, gets those that it missed. Where they
are no longer kept, and for a new reader, all blocks are sent again, to everybody. The events are of all tenants, so
the route needs the admin key; no event has a token or a text.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict, deque
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from cairn.api.chat.state import ServerState
from cairn.api.http.call import HTTPCall, encode, query
from cairn.api.http.routes import Route
from cairn.api.http.sse import HEARTBEAT, stream_events
from cairn.cluster.kv_events import (
    EVENT,
    TEXTS_EVENT,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEvent,
    KVEventBatch,
    TextBlocks,
)
from cairn.cluster.text_prefixes import TextPrefixes, text_prefixes
from cairn.frontend.service import Service
from cairn.frontend.text_blocks import text_blocks
from cairn.frontend.waker import Waker
from cairn.types.errors import CairnError, InvalidRequest, Overloaded, trace
from cairn.types.request import Request
from cairn.types.stats import BlockChange

log = logging.getLogger("cairn.api")

TICK = 0.5
"""Seconds between two questions to the workers."""
GRACE = 10.0
"""Seconds that blocks are followed after the last reader left, so that it can come back."""
KEPT_BYTES = 16 << 20
"""Bytes of events that are kept for readers: those of about 300,000 blocks."""
MOST_TEXTS = 1 << 16
"""Texts whose block is remembered, for new readers."""
PIECE = 512
"""Changes, or texts, in one event."""
AGAIN = 2.0
"""Seconds between two times that all blocks are sent, at least."""
MOST_READERS = 8
MOST_SILENCE = 15.0
"""Seconds after which something is sent, if only a comment: a router takes a longer silence for a lost connection."""
INLINE = 4096
"""Tokens of a prompt whose blocks are looked for on the event loop; those of longer ones on a thread."""
INLINE_BYTES = 1 << 18
"""Bytes of a body whose text is digested on the event loop, in half a millisecond; longer ones on a thread."""

T = TypeVar("T")


class _Numbered(NamedTuple):
    number: int
    data: bytes


class BlockFeed:
    """The numbered events, and the texts of recent requests."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self.readers: dict[Waker, None] = {}
        self.epoch = f"{state.rng.bits64():016x}"
        """Unique to this feed: numbers of another one are not valid here."""
        self.last = 0
        self.snapshots = self.snapshot_from = 0
        """How often all blocks were sent, and the number of the event before the last such events."""
        self.snapshot_due = True
        """Whether all blocks are to be sent again."""
        self._events: deque[_Numbered] = deque()
        self._bytes = 0
        self._texts: OrderedDict[int, tuple[int, int]] = OrderedDict()
        """Text -> its block and tokens."""
        self._news: list[tuple[int, int, int]] = []
        self._services: list[Service] = []
        """Those whose blocks were sent."""
        self._snapshot_time = self._left = float("-inf")
        self._digesting: set[asyncio.Task[Any]] = set()

    # ------------------------------------------------------------------------------------------------- events

    async def run(self) -> None:
        """Ask the workers now and then, until nobody has followed for a while or the server ends."""
        clock = self._state.clock
        self._left = clock.now()
        try:
            while not self._state.draining:
                now = clock.now()
                if self.readers:
                    self._left = now
                elif now - self._left > GRACE:
                    break
                before = self.last
                await self._ask_workers(now)
                for reader in self.readers if self.last > before else ():
                    reader.wake()
                await asyncio.sleep(TICK)
        finally:
            for service in self._services:
                with contextlib.suppress(CairnError):
                    await service.unfollow_blocks()
            self._services = []
            self._events.clear()  # the next reader gets all blocks again
            self._bytes = 0

    async def _ask_workers(self, now: float) -> None:
        """Add events for what changed since the last look; for everything, where that is wanted and due."""
        models = self._state.models
        services = [] if models is None else [one for one in models.services if one.spec.kind == "chat"]
        whole = self.snapshot_due or services != self._services
        if whole and now - self._snapshot_time < AGAIN:
            return
        answers = []
        for service in services:
            with contextlib.suppress(CairnError):  # its worker is being replaced: the next one tells all
                answers.append((service, await service.block_changes(whole=whole)))
        if not whole and (len(answers) < len(services) or any(one.whole for _, one in answers)):
            self.snapshot_due = True  # a worker that was replaced has other blocks, and nothing says which are gone
            return
        changes = [change for _, one in answers for change in one.changes]
        if whole:
            self.snapshot_due = len(answers) < len(services)
            self._services, self._snapshot_time = services, now
            self._news = [(text, *of) for text, of in self._texts.items()]
        first = self.last
        await self._add_changes(changes, services, cleared=whole)
        news, self._news = self._news, []
        for at in range(0, len(news), PIECE):
            self._add(TEXTS_EVENT, TextBlocks(news[at : at + PIECE]))
        if whole:
            self.snapshots, self.snapshot_from = self.snapshots + 1, first

    async def _add_changes(self, changes: Sequence[BlockChange], services: Sequence[Service], *, cleared: bool) -> None:
        """Add events for changes. Of more than are kept for readers the last ones are left out."""
        size = services[0].info.layout.block_tokens if services else 0
        seconds = self._state.clock.time_ns() / 1e9
        first: list[KVEvent] = [AllBlocksCleared()] if cleared else []
        added = 0
        for at in range(0, max(len(changes), len(first)), PIECE):
            events = [_event(one, size) for one in changes[at : at + PIECE]]
            added += self._add(EVENT, KVEventBatch(seconds, first + events))
            first = []
            if added > KEPT_BYTES // 2:
                log.warning("the KV events leave out blocks: %d of %d changes were sent, the limit", at, len(changes))
                return
            await asyncio.sleep(0)

    def _add(self, name: str, value: KVEventBatch | TextBlocks) -> int:
        """Add an event and return its bytes."""
        self.last += 1
        data = b"id: %b-%d\nevent: %b\ndata: %b\n\n" % (self.epoch.encode(), self.last, name.encode(), encode(value))
        self._events.append(_Numbered(self.last, data))
        self._bytes += len(data)
        while self._bytes > KEPT_BYTES and len(self._events) > 1:
            self._bytes -= len(self._events.popleft().data)
        return len(data)

    # -------------------------------------------------------------------------------------------------------- reading

    def place(self, given: str) -> int | None:
        """Return the number in the id of an event of this feed; None for anything else."""
        epoch, _, number = given.partition("-")
        if epoch != self.epoch or not (number.isascii() and number.isdigit() and len(number) <= 18):
            return None
        return int(number)

    def keeps(self, number: int) -> bool:
        """Return whether every event after this one is still kept."""
        first = self._events[0].number if self._events else self.last + 1
        return first - 1 <= number <= self.last

    def read(self, after: int) -> bytes:
        """Return the events after this one."""
        return b"".join([one.data for one in self._events if one.number > after]) if after < self.last else b""

    # ---------------------------------------------------------------------------------------------------------- texts

    def add_text(self, call: HTTPCall, body: bytes) -> None:
        """Digest the text of a call's body, for when its prompt is known."""
        headers = dict(call.scope["headers"])
        if len(body) > INLINE_BYTES:
            coming = self._start(asyncio.to_thread(text_prefixes, call.path, headers, body))
            call.on_prompt = partial(self._add_long, coming)
        elif (prefixes := text_prefixes(call.path, headers, body)).digests:
            call.on_prompt = partial(self._add_blocks, prefixes)

    def _add_blocks(self, prefixes: TextPrefixes, service: Service, request: Request) -> None:
        """Note which blocks the beginnings of a prompt's text have."""
        if len(request.prompt) <= INLINE:
            self._note(text_blocks(service, request, prefixes))
        else:
            self._start(self._add_later(prefixes, service, request))

    def _add_long(self, coming: asyncio.Task[TextPrefixes], service: Service, request: Request) -> None:
        async def add() -> None:
            await self._add_later(await coming, service, request)

        self._start(add())

    async def _add_later(self, prefixes: TextPrefixes, service: Service, request: Request) -> None:
        self._note(await asyncio.to_thread(text_blocks, service, request, prefixes))

    def _start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._digesting.add(task)
        task.add_done_callback(self._digesting.discard)
        return task

    def _note(self, found: Sequence[tuple[int, int, int]]) -> None:
        for text, block, tokens in found:
            if self._texts.get(text) != (block, tokens):
                self._texts[text] = block, tokens
                self._news.append((text, block, tokens))
            self._texts.move_to_end(text)
        while len(self._texts) > MOST_TEXTS:
            self._texts.popitem(last=False)
        del self._news[:-MOST_TEXTS]


def _event(change: BlockChange, block_tokens: int) -> KVEvent:
    if change.stored:
        return BlockStored(list(change.blocks), change.parent, [], block_tokens, medium=change.medium)
    return BlockRemoved(list(change.blocks), change.medium)


class BlockEvents:
    """The route of KV events."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._feed = BlockFeed(state)
        self._task: asyncio.Task[None] | None = None

    def routes(self) -> list[Route]:
        """Return the table of these routes."""
        return [
            Route("GET", "/v1/cache/events", self.follow, query=("after",), access="admin", stream=True),
        ]

    def attend(self, call: HTTPCall) -> None:
        """Note the text of a call, if anybody follows."""
        if self._task is not None:
            call.on_body = self._feed.add_text

    async def follow(self, call: HTTPCall, service: Service) -> None:
        """Stream which KV blocks this server has, in vLLM's words. It begins with all, or after the event `after`."""
        feed = self._feed
        if len(feed.readers) >= MOST_READERS:
            raise Overloaded(f"{MOST_READERS} connections follow the KV already, the limit", retry_after=10.0)
        seen = (call.header(b"last-event-id") or b"").decode("latin-1")
        given = seen or dict(query(call)).get("after", "")
        if len(given) > 64:
            raise InvalidRequest("after is longer than 64 characters; give the id of an event", field="after")
        waker = Waker()
        feed.readers[waker] = None
        try:
            await stream_events(call, partial(self._send, call, waker, feed.place(given)))
        finally:
            del feed.readers[waker]

    async def _send(self, call: HTTPCall, waker: Waker, at: int | None) -> None:
        self._start()
        feed, seen = self._feed, self._feed.snapshots
        while self._task is not None:
            if at is not None and not feed.keeps(at):
                at, seen = None, feed.snapshots
            if at is None and feed.snapshots > seen:
                at = feed.snapshot_from
            feed.snapshot_due |= at is None
            if at is not None and (data := feed.read(at)):
                at = feed.last
                await call.write(data)
            elif not await waker.sleep(min(self._state.config.heartbeat, MOST_SILENCE)):
                await call.write(HEARTBEAT)

    def _start(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            await self._feed.run()
        except Exception as error:
            log.error("the KV of this server cannot be followed: %s", trace(error))
        finally:
            self._task = None
            for reader in self._feed.readers:
                reader.wake()
