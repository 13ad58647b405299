"""The events of one answer, kept so that they can be read again from any of them on."""

from __future__ import annotations

import asyncio
import zlib
from bisect import bisect_right
from collections.abc import Callable
from typing import NamedTuple

from cairn.api.chat.wire import error_event
from cairn.frontend.request_state import Waker
from cairn.types.errors import CairnError, NotFound

PAGE = 1 << 15
"""Bytes of events that are compressed together; they repeat each other, so little remains."""
LOG_COST = 1 << 12
"""Bytes that a log counts beside its events."""
_END = b"\n\n"


class _Page(NamedTuple):
    first: int
    """Number of the first event."""
    packed: bytes


class EventLog:
    """The events of one answer. Those of the beginning may be given up when memory is short."""

    __slots__ = (
        "_fresh",
        "_fresh_bytes",
        "_pages",
        "begun",
        "cancel",
        "cancelled",
        "error",
        "failure",
        "last",
        "number",
        "over",
        "readers",
        "salt",
        "size",
        "timer",
        "unattended",
    )

    def __init__(
        self, number: int, salt: bytes, cancel: Callable[[], object], error: Callable[[CairnError], bytes]
    ) -> None:
        self.number = number
        self.salt = salt
        self.over = False
        self.begun = False
        """Whether its request was let in: what fails from then on is an event."""
        self.cancelled = False
        """Somebody has ended it by its id."""
        self.failure: CairnError | None = None
        """Why it ended early."""
        self.last = 0
        """Number of the last event."""
        self.readers: set[Waker] = set()
        self.size = LOG_COST
        """How many bytes of memory it takes."""
        self.timer: asyncio.TimerHandle | None = None
        self.unattended = False
        """Its request needs no reader."""
        self.cancel = cancel
        self.error = error
        """The events of a failure, as the answer's dialect has them."""
        self._pages: list[_Page] = []
        self._fresh: list[bytes] = []
        self._fresh_bytes = 0

    @property
    def first(self) -> int:
        """Number of the first event that is still there, or of the next one."""
        return self._pages[0].first if self._pages else self.last - len(self._fresh) + 1

    def add(self, data: bytes) -> None:
        """Append whole events."""
        events = data.split(_END)[:-1]
        self._fresh += events
        self.last += len(events)
        self._fresh_bytes += len(data)
        self.size += len(data)
        if self._fresh_bytes >= PAGE:
            self._pack()
        self.wake()

    def end(self) -> None:
        """There will be no more events. What the request held is let go of, and all that was said is compressed."""
        self.over = True
        self.cancel, self.error = _nothing, error_event  # what they were bound to holds the whole prompt
        if self._fresh:
            self._pack()
        self.wake()

    def _pack(self) -> None:
        packed = zlib.compress(_END.join(self._fresh), 1)
        self._pages.append(_Page(self.last - len(self._fresh) + 1, packed))
        self.size += len(packed) - self._fresh_bytes
        self._fresh, self._fresh_bytes = [], 0

    def shorten(self) -> bool:
        """Give up the oldest page; False if there is none."""
        if not self._pages:
            return False
        self.size -= len(self._pages.pop(0).packed)
        return True

    def read(self, after: int) -> tuple[bytes, int]:
        """Some of the events that follow number `after`, as they are sent, and the number of the last of them."""
        if after >= self.last:
            return b"", after
        if after + 1 < self.first:
            raise NotFound(
                f"the events up to {self.first - 1} are no longer kept; the text so far is at "
                f"/v1/requests/{self.number:016x}",
                field="after",
            )
        index = bisect_right(self._pages, after + 1, key=lambda page: page.first) - 1
        fresh = self.last - len(self._fresh) + 1
        if after + 1 >= fresh:
            first, events = fresh, self._fresh
        else:
            page = self._pages[index]
            first, events = page.first, zlib.decompress(page.packed).split(_END)
        wanted = events[after + 1 - first :]
        data = b"".join([b"id: %d\n%s\n\n" % pair for pair in enumerate(wanted, after + 1)])
        return data, after + len(wanted)

    def wake(self) -> None:
        """Tell the readers that there is news."""
        for reader in self.readers:
            reader.wake()


def _nothing() -> None:
    """Nothing is left to cancel."""
