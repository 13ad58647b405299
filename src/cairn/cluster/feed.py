"""Feeds: announcements that every replica writes and every replica reads, such as which chunks are in the store.

    feed/TOPIC/HOUR/MILLISECONDS-WRITER-NUMBER

An entry is made once and never changed. A reader lists the current hour and the one before, and at its start and every
`FULL_SECONDS` all of them. So a writer whose clock is wrong is heard later, and nothing depends on clocks but that.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator

from cairn.cluster.blobs import Blobs
from cairn.cluster.keys import ClusterKeys
from cairn.system.interfaces import Clock, Rng

log = logging.getLogger(__name__)

FULL_SECONDS = 600.0
BEHIND = 1
"""Hours before the current one that every look reads."""
OLDEST_HOURS = 24 * 30
"""Hours after which an entry is no longer read, and may be removed."""


class Feed:
    """One topic. One thread calls."""

    def __init__(self, blobs: Blobs, keys: ClusterKeys, topic: str, clock: Clock, rng: Rng) -> None:
        self._blobs, self._keys, self._clock = blobs, keys, clock
        self._folder = f"feed/{topic}"
        self._writer = f"{rng.bits64():016x}"
        self._number = 0
        self._seen: dict[int, set[str]] = {}
        """Names of entries that were read, by their hour."""
        self._full = -math.inf
        self.refused = 0
        """Entries that failed their check."""

    def publish(self, content: bytes) -> None:
        """Write an entry. Raise OSError if the store fails."""
        now = self._clock.time_ns() // 1_000_000
        self._number += 1
        name = f"{self._folder}/{now // 3_600_000:08x}/{now:012x}-{self._writer}-{self._number:06x}"
        self._blobs.create(name, self._keys.seal(name, content))

    def news(self) -> Iterator[bytes]:
        """Yield the entries of other writers that are new. Raise OSError if the store fails; nothing is lost then."""
        hour = self._clock.time_ns() // 3_600_000_000_000
        now = self._clock.now()
        if full := now - self._full >= FULL_SECONDS:
            names = self._blobs.list(self._folder)
        else:
            names = [name for at in range(hour - BEHIND, hour + 2) for name in self._blobs.list(self._of(at))]
        for name in names:
            yield from self._entry(name, hour)
        if full:
            self._full = now
            listed = set(names)
            self._seen = {at: kept for at, seen in self._seen.items() if (kept := seen & listed)}

    def _entry(self, name: str, hour: int) -> Iterator[bytes]:
        parts = name.split("/")
        try:
            at, writer = int(parts[-2], 16), parts[-1].split("-")[1]
        except (ValueError, IndexError):
            return
        seen = self._seen.setdefault(at, set())
        if name in seen or writer == self._writer or hour - at > OLDEST_HOURS:
            return
        data = self._blobs.read(name)
        if data is not None:
            content = self._keys.open(name, data)
            if content is None:
                self.refused += 1
                log.warning("an entry of the shared store's feed was changed, or sealed under an unknown key: %s", name)
            else:
                yield content
        seen.add(name)

    def _of(self, hour: int) -> str:
        return f"{self._folder}/{hour:08x}"
