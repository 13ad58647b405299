"""Answers to `KVQuery` frames: where a context's KV is, and operations on it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from cairn.kv.pool.cache import Cache
from cairn.kv.tiers.store import DurableStore
from cairn.kv.tiers.tiers import Tiers
from cairn.types.stats import ImportedKv, Placed, Swept
from cairn.worker import wire

NOTHING = Swept()


class KVQueries:
    """Answers queries on the worker's thread, some of them later: when a store has finished."""

    def __init__(self, channel: wire.Channel, cache: Cache, tiers: Tiers | None) -> None:
        self._channel = channel
        self._cache = cache
        self._tiers = tiers
        self.owed = 0
        """Queries without an answer yet."""

    def take(self, ask: wire.KVQuery) -> None:
        """Start the operation that a query asks for; without stores, most only report what the pool has."""
        self.owed += 1
        if ask.what == "evict" and self._tiers is None and not ask.model:
            self._cache.forget(self._cache.context(ask.salt), ask.tokens, ask.keep)
        if self._tiers is None or ask.what == "where":
            self._say_where(ask)
        elif ask.what in ("flush", "share"):
            self._store(ask, self._tiers)
        elif ask.what == "pin":
            self._tiers.pin(ask.owner, ask.tokens, ask.salt, lambda: self._say_pinned(ask))
        elif ask.what == "paths":
            paths = self._tiers.paths(ask.tokens, ask.salt)
            self._send(wire.KVAnswer(ask.id, paths=tuple(map(str, paths))))
        elif ask.what == "import_kv":
            self._tiers.import_kv(Path(ask.path), ask.tokens, ask.salt, partial(self._say_taken, ask))
        elif ask.what == "mark":
            self._tiers.mark(ask.tokens, ask.salt, ask.keep, ask.standing)
            self._send(wire.KVAnswer(ask.id))
        elif ask.what == "prefetch":
            self._tiers.prefetch(ask.tokens, ask.salt, lambda: self._say_where(ask))
        elif ask.what == "evict" and ask.model:
            erased = partial(self._say_erased, ask)
            self._tiers.erase_of_model(ask.model, ask.tokens, ask.salt, ask.keep, ask.searched, erased)
        elif ask.what == "evict":
            self._tiers.evict(ask.tokens, ask.salt, ask.keep, ask.disk, lambda: self._say_evicted(ask))
        else:
            job = _scrub if ask.what == "scrub" else _prune
            if not self._tiers.sweep(job, lambda swept: self._say_swept(ask, swept)):
                self._send(wire.KVAnswer(ask.id))

    def _store(self, ask: wire.KVQuery, tiers: Tiers) -> None:
        if ask.what == "share":
            tiers.share(lambda: self._say(ask))
        else:
            tiers.flush(lambda dropped: self._say(ask, trouble=_given_up(dropped)))

    def _say_where(self, ask: wire.KVQuery) -> None:
        if self._tiers is not None:
            placed = self._tiers.where(ask.tokens, ask.salt)
        else:
            placed = Placed(pool=self._cache.found(self._cache.context(ask.salt), ask.tokens))
        self._send(wire.KVAnswer(ask.id, placed=placed))

    def _say_pinned(self, ask: wire.KVQuery) -> None:
        assert self._tiers is not None
        if self._tiers.unsaved(ask.owner):
            what = "pinned" if ask.tokens else "no longer pinned"
            self._say(ask, trouble=f"the disk does not accept the record of what is {what}; Cairn keeps trying")
        elif ask.tokens:
            self._say_where(ask)
        else:
            self._say(ask)

    def _say_evicted(self, ask: wire.KVQuery) -> None:
        assert self._tiers is not None
        if ask.disk and self._tiers.lingers(ask.tokens, ask.salt, ask.keep):
            self._say(ask, trouble="the KV of this context could not be removed from the disk; Cairn keeps trying")
        else:
            self._say_where(ask)

    def _say_erased(self, ask: wire.KVQuery, gone: bool) -> None:
        self._say(ask, trouble="" if gone else "the KV of a model that is not loaded could not be erased from the disk")

    def _say_taken(self, ask: wire.KVQuery, taken: ImportedKv) -> None:
        self._send(wire.KVAnswer(ask.id, taken=taken))

    def _say_swept(self, ask: wire.KVQuery, swept: Swept | None) -> None:
        if swept is None:
            self._say(ask, trouble="the KV store could not be scanned; see the log")
        else:
            self._say(ask, swept)

    def _say(self, ask: wire.KVQuery, swept: Swept = NOTHING, trouble: str = "") -> None:
        """Answer with the stores' statistics after the operation."""
        kv = None if self._tiers is None else self._tiers.stats()
        self._send(wire.KVAnswer(ask.id, swept=swept, trouble=trouble, kv=kv))

    def _send(self, answer: wire.KVAnswer) -> None:
        self.owed -= 1
        self._channel.send(answer)


def _scrub(store: DurableStore) -> Swept:
    before = store.stats().bytes
    scrubbed = store.scrub()
    bytes = max(0, before - store.stats().bytes)
    return Swept(checked=scrubbed.checked, removed=scrubbed.damaged, bytes=bytes, unreadable=scrubbed.unreadable)


def _prune(store: DurableStore) -> Swept:
    before = store.stats()
    removed = store.prune()
    return Swept(checked=before.chunks, removed=removed, bytes=max(0, before.bytes - store.stats().bytes))


def _given_up(dropped: int) -> str:
    return f"{dropped} chunks of KV were given up before they were stored" if dropped else ""
