"""Which blocks were computed lately, and whether a store had them: what tells why one has to be computed again.

Known are the beginnings of their keys. They are written down beside the stored chunks, so that a restart forgets none;
of what must not be stored nothing is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

MOST = 1 << 16
"""Blocks that are remembered: of a million tokens."""
RECORD_BYTES = 8
_IN_STORE = 2


class SeenBlocks:
    """The blocks that were seen last. One thread."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, int] = OrderedDict()
        """0 of a block that must not be written down, 1 of one that was computed, 2 where a store had it."""
        self._news = bytearray()

    def __contains__(self, key: bytes) -> bool:
        return _head(key) in self._known

    def was_stored(self, key: bytes) -> bool:
        """Whether a store had the block."""
        return self._known.get(_head(key), 0) == _IN_STORE

    def add(self, key: bytes, *, told: bool) -> None:
        """A block was computed; `told`: it may be written down."""
        head = _head(key)
        if self._known.get(head, -1) < told:
            self._put(head, int(told))

    def store(self, keys: Iterable[bytes]) -> None:
        """A store has these blocks."""
        for key in keys:
            if self._known.get(head := _head(key), 0) < _IN_STORE:
                self._put(head, _IN_STORE)

    def forget(self, keys: Iterable[bytes]) -> bool:
        """Remember nothing of these blocks; whether anything was known of one."""
        found = [self._known.pop(_head(key), None) is not None for key in keys]
        return any(found)

    def news(self) -> bytes:
        """Return the records of all that is to be written down since the last call."""
        news, self._news = bytes(self._news), bytearray()
        return news

    def records(self) -> bytes:
        """Return the records of all that may be written down, those that were seen last at the end."""
        self._news.clear()
        return b"".join(_record(head, known) for head, known in self._known.items() if known)

    def restore(self, records: bytes) -> None:
        """Take what earlier processes wrote down; a part of a record at the end is nothing."""
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
    """Return what is written down of a block: the last bit tells whether a store had it, the others are its key's."""
    return (head | (known == _IN_STORE)).to_bytes(RECORD_BYTES, "big")
