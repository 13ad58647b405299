"""Following the KV events of replicas into the index. A replica that tells none is used all the same."""

from __future__ import annotations

import asyncio
import logging
import re

import msgspec

from cairn.cluster.kv_events import EVENT, TEXTS_EVENT, AllBlocksCleared, KVEventBatch, TextBlocks
from cairn.cluster.router.delivered import EVENT_END
from cairn.cluster.router.replicas import Replica, Replicas
from cairn.cluster.router.upstream import UpstreamConnection, UpstreamLost, request_bytes
from cairn.types.errors import trace

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""Seconds between two looks at which replicas are up, and before a stream that ended is begun again."""
SILENT_SECONDS = 60.0
"""Silence after which a stream counts as lost: servers send something every few seconds."""
HEAD_SECONDS = 10.0
"""Longest wait for the head of the events' answer, which a server sends at once."""
REFUSED_SECONDS = 60.0
"""How long a replica that refuses to tell its events is left alone."""
MOST_BYTES = 4 << 20
"""Longest event; a server sends far shorter ones."""

_PLACE = re.compile(rb"[0-9a-zA-Z-]{1,64}")
"""An event's id, which stands in the path of the next request."""
_batches = msgspec.json.Decoder(KVEventBatch)
_texts = msgspec.json.Decoder(TextBlocks)


class KvFollowers:
    """One reader of events for each replica that is up."""

    def __init__(self, replicas: Replicas, admin_key: str = "") -> None:
        """Follow `replicas`; their events want the servers' `admin_key`, if they have one."""
        self._replicas, self._index = replicas, replicas.index
        self._headers = [(b"authorization", b"Bearer " + admin_key.encode())] if admin_key else []
        self._tasks: dict[Replica, asyncio.Task[None]] = {}
        self._looking: asyncio.Task[None] | None = None
        self._refused: set[Replica] = set()
        self._troubled: set[Replica] = set()
        """Replicas whose events failed in a way that nobody foresaw, which the log has."""

    def start(self) -> None:
        """Begin to follow, if requests go by KV."""
        if self._replicas.by_kv:
            self._looking = asyncio.create_task(self._look())

    async def close(self) -> None:
        """End all readers."""
        tasks = [*self._tasks.values(), *([self._looking] if self._looking is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _look(self) -> None:
        while True:
            for replica in tuple(self._replicas.all):
                task = self._tasks.get(replica)
                if replica.up and (task is None or task.done()):
                    self._tasks[replica] = asyncio.create_task(self.follow(replica))
            for gone in self._tasks.keys() - set(self._replicas.all):
                self._tasks.pop(gone).cancel()
                self._refused.discard(gone)
                self._troubled.discard(gone)
            await asyncio.sleep(LOOK_SECONDS)

    async def follow(self, replica: Replica) -> None:
        """Read the events of a replica until they end; wait a while where it refuses."""
        connection = None
        held = replica.held
        try:
            connection = await replica.pool.take(new=True)
            target = b"/v1/cache/events" + (b"?after=" + held.position.encode() if held.position else b"")
            async with asyncio.timeout(HEAD_SECONDS):
                await connection.send(request_bytes("GET", target, replica.host, self._headers, b""))
            kind = dict(connection.headers).get(b"content-type", b"")
            if connection.status != 200 or not kind.startswith(b"text/event-stream"):
                self._note_refusal(replica, connection.status)
                await asyncio.sleep(REFUSED_SECONDS)
                return
            self._refused.discard(replica)
            held.follows = True
            await self._read(replica, connection)
        except (UpstreamLost, TimeoutError, msgspec.MsgspecError, ValueError) as error:
            log.debug("the KV events of %s ended: %s", replica.url, error)
        except Exception as error:  # of this replica alone, and begun again
            if replica not in self._troubled:
                self._troubled.add(replica)
                log.error("the KV events of %s cannot be read: %s", replica.url, trace(error))
        finally:
            held.follows = False
            if connection is not None:
                connection.abort()

    async def _read(self, replica: Replica, connection: UpstreamConnection) -> None:
        rest = b""
        while True:
            async with asyncio.timeout(SILENT_SECONDS):
                data = await connection.read()
            if not (data and replica.held.follows):  # else it went away, and these are its last words
                return
            *events, rest = (rest + data).split(EVENT_END)
            for event in events:
                self.take(replica, event)
            if len(rest) > MOST_BYTES:
                raise ValueError(f"an event is longer than {MOST_BYTES:,} bytes")

    def take(self, replica: Replica, event: bytes) -> None:
        """Take one event of a replica. Raise MsgspecError for one that cannot be read."""
        lines = dict(line.split(b": ", 1) for line in event.split(b"\n") if b": " in line)
        name, data = lines.get(b"event", b"").decode("latin-1"), lines.get(b"data", b"")
        if name == EVENT:
            batch = _batches.decode(data)
            self._index.snapshots += any(isinstance(one, AllBlocksCleared) for one in batch.events[:1])
            replica.held.apply(batch.events)
        elif name == TEXTS_EVENT:
            self._index.learn(_texts.decode(data).texts)
        if (place := lines.get(b"id")) is not None and _PLACE.fullmatch(place):
            replica.held.position = place.decode()

    def _note_refusal(self, replica: Replica, status: int) -> None:
        if replica not in self._refused:
            self._refused.add(replica)
            log.warning(
                "%s does not tell which KV it holds (%d): give the router the servers' --admin-key; until then it goes "
                "by what it sent there",
                replica.url,
                status,
            )
