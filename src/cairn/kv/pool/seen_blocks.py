"""Blocks that were computed lately, and whether a store had them: tells why a block has to be computed again.

Only the first bytes of keys are remembered. They are saved beside the stored chunks, so a restart forgets none. Blocks
that must not be stored are not saved either.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

MOST = 1 << 16
"""Blocks that are remembered: those of a million tokens."""
RECORD_BYTES = 8
_IN_STORE = 2


class SeenBlocks:
    """The most recently seen blocks. One thread."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, int] = OrderedDict()
        """0: computed, must not be saved; 1: computed; 2: a store had it."""
        self._news = bytearray()

    def __contains__(self, key: bytes) -> bool:
        return _head(key) in self._known

    def was_stored(self, key: bytes) -> bool:
        """Return whether a store had the block."""
        return self._known.get(_head(key), 0) == _IN_STORE

    def add(self, key: bytes, *, saved: bool) -> None:
        """Record that a block was computed; `saved`: whether that may be saved."""
        head = _head(key)
        if self._known.get(head, -1) < saved:
            self._put(head, int(saved))

    def store(self, keys: Iterable[bytes]) -> None:
        """Record that a store has these blocks."""
        for key in keys:
            if self._known.get(head := _head(key), 0) < _IN_STORE:
                self._put(head, _IN_STORE)

    def forget(self, keys: Iterable[bytes]) -> bool:
        """Forget these blocks; return whether any of them was known."""
        known = [self._known.pop(_head(key), None) is not None for key in keys]  # all of them, not up to the first
        return any(known)

    def news(self) -> bytes:
        """Return the records to be saved since the last call."""
        news, self._news = bytes(self._news), bytearray()
        return news

    def records(self) -> bytes:
        """Return all records that may be saved, the most recently seen last."""
        self._news.clear()
        return b"".join(_record(head, known) for head, known in self._known.items() if known)

    def restore(self, records: bytes) -> None:
        """Load the records that earlier processes saved; an incomplete record at the end is ignored."""
        for at in range(0, len(records) - RECORD_BYTES + 1, RECORD_BYTES):
            word = int.from_bytes(records[at : at + RECORD_BYTES], "big")
            self._put(word & ~1, 1 + (word & 1))
        self._news.clear()

    def _put(self, head: int, known: int) -> None:
        self._known.pop(head, None)
        self._known[head] = known
        if known:
            self._news += _record(head, known)
        if len(self._known) > MOST:
            self._known.popitem(last=False)


def _head(key: bytes) -> int:
    return int.from_bytes(key[:RECORD_BYTES], "big") & ~1


def _record(head: int, known: int) -> bytes:
    """Return the saved form of a block: the first bits of its key, then one bit that says whether a store had it."""
    return (head | (known == _IN_STORE)).to_bytes(RECORD_BYTES, "big")
