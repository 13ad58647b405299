"""Feeds: announcements that every replica writes and every replica reads, such as which chunks are in the store.

    feed/TOPIC/HOUR/MILLISECONDS-WRITER-NUMBER

An entry is made once and never changed. A reader lists the current hour and the one before, and at its start and every
`FULL_SECONDS` all of them. So a writer whose clock is wrong is heard later, and nothing depends on clocks but that.

Entries are read in batches, so that the reader can do other work in between. What its first look finds, which may be
many, is the backlog: it is read newest first, after what is announced meanwhile.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from cairn.cluster.blobs import Blobs
from cairn.cluster.guard import ObjectFailed
from cairn.cluster.keys import ClusterKeys
from cairn.system.disk_threads import DiskThreads
from cairn.system.interfaces import Clock, Rng

log = logging.getLogger(__name__)

FULL_SECONDS = 600.0
BEHIND = 1
"""Hours before the current one that every look reads."""
OLDEST_HOURS = 24 * 30
"""Hours after which an entry is no longer read, and may be removed."""
BATCH = 64
"""Most entries that one call of `read` reads."""
AT_ONCE = 8
"""Entries that are read at once."""
MOST_SEEN = 1 << 18
"""Names of read entries that are kept, beside those of the hours that every look reads. Older entries are not read."""


class Announcement(NamedTuple):
    """The content of an entry."""

    content: bytes
    old: bool
    """Whether it is of the backlog: every entry that came before it here is newer."""


class Feed:
    """One topic. One thread calls."""

    def __init__(self, blobs: Blobs, keys: ClusterKeys, topic: str, clock: Clock, rng: Rng) -> None:
        self._blobs, self._keys, self._clock = blobs, keys, clock
        self._folder = f"feed/{topic}"
        self._writer = f"{rng.bits64():016x}"
        self._number = 0
        self._seen: dict[int, set[str]] = {}
        """Names of entries that were read or are about to be, by their hour."""
        self._oldest = 0
        """The hour before which no entry is read."""
        self._recent = ""
        """Beginning of the names of the oldest hour that the last look has read."""
        self._fresh: deque[str] = deque()
        """Names of entries to read, oldest first."""
        self._backlog: deque[str] = deque()
        """Names of entries to read after those, newest first."""
        self._full = -math.inf
        self._threads = DiskThreads(AT_ONCE)
        self.refused = 0
        """Entries that failed their check."""

    @property
    def behind(self) -> bool:
        """Whether entries are still to be read that a look has found."""
        return bool(self._fresh or self._backlog)

    @property
    def current(self) -> bool:
        """Whether all entries were read that a look finds in the hours which each look reads."""
        return not self._fresh and not (self._backlog and self._backlog[0] >= self._recent)

    def publish(self, content: bytes) -> None:
        """Write an entry. Raise OSError if the store fails."""
        now = self._clock.time_ns() // 1_000_000
        self._number += 1
        name = f"{self._folder}/{now // 3_600_000:08x}/{now:012x}-{self._writer}-{self._number:06x}"
        self._blobs.create(name, self._keys.seal(name, content))

    def look(self) -> None:
        """Find the entries of other writers that are new, to `read` them. Raise OSError if the store fails."""
        hour = self._clock.time_ns() // 3_600_000_000_000
        now = self._clock.now()
        if full := now - self._full >= FULL_SECONDS:
            names = self._blobs.list(self._folder)
        else:
            names = [name for at in range(hour - BEHIND, hour + 2) for name in self._blobs.list(self._of(at))]
        oldest, self._recent = max(self._oldest, hour - OLDEST_HOURS), self._of(hour - BEHIND)
        new = [name for name in names if self._is_new(name, oldest)]
        if self._full == -math.inf:
            self._backlog.extend(reversed(new))
        else:
            self._fresh.extend(new)
        if full:
            self._full = now
            listed = set(names)
            self._seen = {at: kept for at, seen in self._seen.items() if (kept := seen & listed)}
        self._forget(hour - BEHIND)

    def read(self) -> Sequence[Announcement]:
        """Return the next entries that a look has found. Raise OSError if the store fails; nothing is lost then."""
        old = not self._fresh
        names = self._backlog if old else self._fresh
        batch = [names.popleft() for _ in range(min(BATCH, len(names)))]
        reading = [self._threads.submit(self._blobs.read, name) for name in batch]
        found: list[Announcement] = []
        for at, name in enumerate(batch):
            try:
                content = self._opened(name, reading[at].result())
            except ObjectFailed as error:
                self.refused += 1
                log.warning("an entry of the shared store's feed is passed over: %s", error)
                continue
            except OSError:
                names.extendleft(reversed(batch[at:]))
                if not found:
                    raise
                break
            if content is not None:
                found.append(Announcement(content, old))
        return found

    def skip_backlog(self) -> None:
        """Leave the rest of the backlog unread."""
        self._backlog.clear()

    def _is_new(self, name: str, oldest: int) -> bool:
        """Return whether an entry is to be read, and note that it is about to be."""
        parts = name.split("/")
        try:
            at, writer = int(parts[-2], 16), parts[-1].split("-")[1]
        except (ValueError, IndexError):
            return False
        if writer == self._writer or at < oldest or name in self._seen.get(at, ()):
            return False
        self._seen.setdefault(at, set()).add(name)
        return True

    def _forget(self, recent: int) -> None:
        """Forget the oldest names beyond `MOST_SEEN`, and pass over what is as old, but no hour from `recent` on."""
        many = sum(map(len, self._seen.values())) - MOST_SEEN
        for hour in sorted(self._seen):
            if many <= 0 or hour >= recent:
                break
            many -= len(self._seen.pop(hour))
            self._oldest = hour + 1
        first = self._of(self._oldest)
        while self._backlog and self._backlog[-1] < first:
            self._backlog.pop()

    def _opened(self, name: str, data: bytes | None) -> bytes | None:
        """Return the content of an entry; None for one that is gone, or that fails its check."""
        content = None if data is None else self._keys.open(name, data)
        if data is not None and content is None:
            self.refused += 1
            log.warning("an entry of the shared store's feed was changed, or sealed under an unknown key: %s", name)
        return content

    def _of(self, hour: int) -> str:
        return f"{self._folder}/{hour:08x}"
