"""KV in a shared store: a `Store` below all others, which every replica writes and reads.

A thread of its own seals and writes chunks, announces them in a feed, and follows the feeds of other replicas, so no
lookup ever asks the store: the index is in memory. What is announced and cannot be read, or fails a check, is a miss.

Nothing is evicted here. Objects go when their context is deleted, and by age: `cairn cluster prune`, or a rule of the
bucket.
"""

from __future__ import annotations

import logging
import math
import struct
import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from cairn.cluster.blobs import Blobs
from cairn.cluster.feed import Feed
from cairn.cluster.guard import ObjectFailed
from cairn.cluster.keys import SEALED_BYTES, ClusterKeys
from cairn.kv.tiers.store import HEAD_BYTES, OVERHEAD, Chunk, Standing, spared
from cairn.system.interfaces import Clock
from cairn.types.errors import trace
from cairn.types.stats import TierStats

log = logging.getLogger(__name__)

MOST_CHUNKS = 1 << 18
"""Chunks of the index; the oldest are forgotten, and found again when they are announced again."""
QUEUE_BYTES = 256 << 20
"""Most bytes that wait for a slow store. Beyond it chunks are refused."""
BATCH = 64
"""Most chunks written before they are announced."""
LOOK_SECONDS = 0.4
"""Seconds between two looks at the feeds of other replicas."""
RETRY_SECONDS = 1.0
CLOSE_SECONDS = 4.0
"""Most seconds that the end may wait for chunks to be written."""


class _Place(NamedTuple):
    """What the index knows of a chunk."""

    parent: bytes
    heads: tuple[bytes, ...]
    size: int


class _ChunkHeader(msgspec.Struct, frozen=True, array_like=True):
    """Everything of a chunk but its pages."""

    key: bytes
    parent: bytes
    tokens: tuple[int, ...]
    depth: int
    group: int
    heads: tuple[bytes, ...]


class _News(msgspec.Struct, frozen=True, array_like=True):
    """An announcement: chunks that are in the store, and keys that were dropped."""

    chunks: list[tuple[bytes, bytes, tuple[bytes, ...], int]] = []
    dropped: list[bytes] = []


class SharedChunks:
    """A `Store` in a shared store. Any thread may call; none of its callers waits for the store but `fetch`."""

    def __init__(self, blobs: Blobs, keys: ClusterKeys, feed: Feed, clock: Clock) -> None:
        self._blobs, self._keys, self._feed, self._clock = blobs, keys, feed, clock
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._places: OrderedDict[bytes, _Place] = OrderedDict()
        self._chunks_by_head: dict[bytes, set[bytes]] = {}
        """Keys of chunks by the heads of their blocks."""
        self._children: dict[bytes, set[bytes]] = {}
        self._waiting: OrderedDict[bytes, Chunk] = OrderedDict()
        """Chunks that are not in the store yet."""
        self._waiting_bytes = 0
        self._dropped: deque[bytes] = deque()
        """Keys whose objects are still to be removed."""
        self._stats = TierStats()
        self._trouble = ""
        self._closing = False
        self._looked = -math.inf
        self._decided: set[bytes] = set()
        """Keys of chunks of which newer announcements spoke than those that are being read. The thread's alone."""
        self._looked_for = 0
        """The newest call of `settle` for which the feeds were looked at."""
        self._asked = self._settled = 0
        """Calls of `settle`, and those that are answered."""
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread that writes and follows other replicas."""
        self._thread = threading.Thread(target=self._run, name="cairn-kv-shared", daemon=True)
        self._thread.start()

    # ---------------------------------------------------------------------------------------------- what is known

    def match_prefix(self, keys: Sequence[bytes]) -> int:
        """See `Store`."""
        with self._lock:
            return next((count for count, key in enumerate(keys) if key not in self._places), len(keys))

    def has(self, key: bytes) -> bool:
        """See `Store`."""
        with self._lock:
            return key in self._places

    def kept_bytes(self, group: int, size: int) -> int:
        """See `Store`."""
        return size + OVERHEAD + SEALED_BYTES

    def match_within(self, keys: Sequence[bytes]) -> tuple[int, bytes] | None:
        """See `Store`."""
        found: tuple[int, bytes] | None = None
        with self._lock:
            for count, key in enumerate(keys, 1):
                if not (having := self._chunks_by_head.get(key[:HEAD_BYTES])):
                    break
                found = count, max(having, key=lambda one: len(self._places[one].heads))
        return found

    def stats(self) -> TierStats:
        """See `Store`. Counts are of the objects that this replica knows."""
        with self._lock:
            return msgspec.structs.replace(self._stats, chunks=len(self._places), trouble=self._trouble)

    def durable(self) -> None:
        """Return None: it is not this replica's alone, so nothing is scrubbed, pruned or taken over here."""

    # ------------------------------------------------------------------------------------------------ what is asked

    def fetch(self, key: bytes, tokens: Sequence[int], buffer: memoryview | None = None) -> Chunk | None:
        """See `Store`. The memory of `buffer` is not used."""
        with self._lock:
            chunk = self._waiting.get(key)
            known = key in self._places
        if chunk is None:
            if not known:
                return None
            chunk = self._read(key)
        if chunk is None or chunk.tokens[: len(tokens)] != tuple(tokens):
            return None
        return chunk

    def _read(self, key: bytes) -> Chunk | None:
        """Return the chunk of a key; None in any doubt. What is gone or damaged is forgotten."""
        name = self.name(key)
        try:
            data = self._blobs.read(name)
        except OSError as error:
            self._failed(error)
            return None
        chunk = None if data is None else decode_chunk(self._keys.open(name, data))
        with self._lock:
            if data is not None:
                self._count(read=len(data))
            if chunk is None or chunk.key != key:
                self._forget(key)
                self._count(damaged=int(data is not None))
                if data is not None:
                    log.warning("a chunk of the shared store failed its check, and is not used: %s", name)
                return None
        return chunk

    def keep(self, chunks: Sequence[Chunk]) -> int:
        """See `Store`. Kept means queued: a chunk that the store never takes is a miss on other replicas."""
        with self._changed:
            for count, chunk in enumerate(chunks):
                if chunk.key in self._places or self._chunks_by_head.get(chunk.key[:HEAD_BYTES]):
                    continue
                size = len(memoryview(chunk.pages).cast("B"))
                if self._closing or self._waiting_bytes + size > QUEUE_BYTES:
                    left = chunks[count:]
                    self._count(refused=len(left) - len(spared(left)))
                    return count
                self._waiting[chunk.key] = chunk
                self._waiting_bytes += size
                self._enter(chunk.key, _Place(chunk.parent, chunk.heads, size))
                tails = [one for head in chunk.heads for one in self._chunks_by_head[head] if one[:HEAD_BYTES] == head]
                self._drop(tails)
            self._changed.notify()
            return len(chunks)

    def drop(self, keys: Sequence[bytes]) -> int:
        """See `Store`. Objects under these keys go in any case, other replicas' too, and their indexes follow."""
        with self._changed:
            count = self._drop(keys)
            self._dropped.extend(key for key in keys if key not in self._dropped)
            self._changed.notify()
            return count

    def _drop(self, keys: Iterable[bytes]) -> int:
        family, waiting = [], list(keys)
        while waiting:
            key = waiting.pop()
            family.append(key)
            waiting += self._children.get(key, ())
        gone = [key for key in dict.fromkeys(family) if key in self._places]
        for key in gone:
            self._forget(key)
            self._dropped.append(key)
        return len(gone)

    def pin(self, owner: str, keys: Sequence[bytes]) -> None:
        """Do nothing: this store evicts nothing."""

    def mark(self, keys: Sequence[bytes], standing: Standing) -> None:
        """Do nothing: this store evicts nothing."""

    def settle(self, seconds: float) -> bool:
        """Wait until what was kept is in the store and what others announced is known; return False after `seconds`."""
        with self._changed:
            self._asked += 1
            mine = self._asked
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._settled >= mine or self._closing, seconds)

    def close(self) -> None:
        """Write what is queued for up to CLOSE_SECONDS, then stop."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)

    # ---------------------------------------------------------------------------------------------------- the index

    def name(self, key: bytes) -> str:
        """Return the name of a chunk's object."""
        digest = self._keys.name(b"chunk", key)
        return f"kv/{digest[:2]}/{digest}"

    def _enter(self, key: bytes, place: _Place, *, old: bool = False) -> None:
        """Add a chunk to the index; with `old`, as older than all that are there, if there is room."""
        if key in self._places or (old and len(self._places) >= MOST_CHUNKS):
            return
        self._places[key] = place
        self._places.move_to_end(key, last=not old)
        self._children.setdefault(place.parent, set()).add(key)
        for head in (*place.heads, key[:HEAD_BYTES]):
            self._chunks_by_head.setdefault(head, set()).add(key)
        self._count(bytes=place.size)
        while len(self._places) > MOST_CHUNKS:
            self._forget(next(iter(self._places)))

    def _forget(self, key: bytes) -> None:
        place = self._places.pop(key, None)
        if place is None:
            return
        if (chunk := self._waiting.pop(key, None)) is not None:
            self._waiting_bytes -= len(memoryview(chunk.pages).cast("B"))
        for table, keys in (
            (self._chunks_by_head, (*place.heads, key[:HEAD_BYTES])),
            (self._children, (place.parent,)),
        ):
            for one in keys:
                table[one].discard(key)
                if not table[one]:
                    del table[one]
        self._count(bytes=-place.size)

    def _count(self, **changes: int) -> None:
        now = {name: getattr(self._stats, name) + change for name, change in changes.items()}
        self._stats = msgspec.structs.replace(self._stats, **now)

    # --------------------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        while True:
            with self._changed:
                idle = not self._waiting and not self._dropped and self._settled == self._asked
                if idle and not self._feed.behind and not self._closing:
                    self._changed.wait(LOOK_SECONDS)
                if self._closing and (not self._waiting or self._trouble):
                    return
            try:
                worked = self.work()
            except Exception as error:  # a bug of ours; the next chunk may still be written
                log.error("the shared store's thread failed: %s", trace(error))
                worked = False
            if not worked:
                with self._changed:
                    self._changed.wait(RETRY_SECONDS)

    def work(self) -> bool:
        """Write a batch, remove what was dropped, and look at the feeds if it is time; return False if that failed."""
        with self._lock:
            asked = self._asked
        try:
            self._remove()  # first: what was dropped may have been computed again meanwhile
            self._write()
            if asked > self._looked_for or self._clock.now() - self._looked >= LOOK_SECONDS:
                self._looked = self._clock.now()
                self._feed.look()
                self._looked_for = asked
            self._read_news()
            with self._changed:
                if not self._waiting and self._feed.current:
                    self._settled = asked
                    self._changed.notify_all()
        except OSError as error:
            self._failed(error)
            return False
        self._trouble = ""
        return True

    def _read_news(self) -> None:
        """Read some of what other replicas announced. Raise OSError if the store fails."""
        for content, old in self._feed.read():
            try:
                news = msgspec.msgpack.decode(content, type=_News)
            except (msgspec.DecodeError, ValueError):  # a replica of another version
                continue
            with self._lock:
                for key, parent, heads, size in news.chunks:
                    if not (old and (key in self._decided or key in self._dropped)):
                        self._enter(key, _Place(parent, heads, size), old=old)
                for key in () if old else news.dropped:  # whatever is in the index is newer than what is old
                    self._forget(key)
            if old or self._feed.behind:  # older announcements follow, which change nothing of what these say
                self._decided.update(key for key, *_ in news.chunks)
                self._decided.update(news.dropped)
        if len(self._decided) >= MOST_CHUNKS:
            self._feed.skip_backlog()
        if not self._feed.behind:
            self._decided.clear()

    def _write(self) -> None:
        with self._lock:
            batch = [chunk for _, chunk in zip(range(BATCH), self._waiting.values(), strict=False)]
        written = []
        try:
            for chunk in batch:
                name = self.name(chunk.key)
                data = self._keys.seal(name, encode_chunk(chunk))
                try:
                    self._blobs.create(name, data)  # one that another replica made is the same chunk
                except ObjectFailed as error:
                    log.warning("a chunk of KV is not stored: %s", error)
                    with self._lock:
                        self._forget(chunk.key)
                        self._count(refused=1)
                    continue
                written.append(chunk)
                with self._lock:
                    self._count(written=len(data))
        finally:
            if written:
                self._announce(written)

    def _announce(self, written: Sequence[Chunk]) -> None:
        with self._lock:
            places = [(chunk.key, self._places.get(chunk.key)) for chunk in written]
        known = [(key, place.parent, place.heads, place.size) for key, place in places if place is not None]
        self._feed.publish(msgspec.msgpack.encode(_News(chunks=known)))
        with self._lock:
            for chunk in written:
                if self._waiting.pop(chunk.key, None) is not None:
                    self._waiting_bytes -= len(memoryview(chunk.pages).cast("B"))

    def _remove(self) -> None:
        with self._lock:
            gone = list(self._dropped)[:BATCH]
        if not gone:
            return
        names = [self.name(key) for key in gone]
        try:
            self._blobs.delete(names)
        except ObjectFailed:
            self._remove_each(names)
        self._feed.publish(msgspec.msgpack.encode(_News(dropped=gone)))
        with self._lock:
            for _ in gone:
                self._dropped.popleft()
            if self._feed.behind:
                self._decided.update(gone)

    def _remove_each(self, names: Sequence[str]) -> None:
        failures: list[ObjectFailed] = []
        for name in names:
            try:
                self._blobs.delete([name])
            except ObjectFailed as error:
                failures.append(error)
        if failures:
            log.warning(
                "%d chunks of deleted KV stay in the shared store until it is pruned: %s", len(failures), failures[0]
            )

    def _failed(self, error: OSError) -> None:
        self._trouble = f"the shared store does not work: {error.strerror or error}"


def encode_chunk(chunk: Chunk) -> bytes:
    """Return a chunk as bytes: the length of its head, its head, its pages."""
    head = msgspec.msgpack.encode(
        _ChunkHeader(chunk.key, chunk.parent, chunk.tokens, chunk.depth, chunk.group, chunk.heads)
    )
    return b"".join((struct.pack("<I", len(head)), head, chunk.pages))


def decode_chunk(data: bytes | None) -> Chunk | None:
    """Return the chunk of these bytes; None if they are none."""
    if data is None or len(data) < 4:
        return None
    (size,) = struct.unpack_from("<I", data)
    try:
        head = msgspec.msgpack.decode(data[4 : 4 + size], type=_ChunkHeader)
    except (msgspec.DecodeError, ValueError):
        return None
    pages = memoryview(data)[4 + size :]
    return Chunk(head.key, head.parent, head.tokens, head.depth, pages, head.group, head.heads)
