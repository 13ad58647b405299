"""A table from keys to places in files, packed: a history of a million turns has two million of them."""

from __future__ import annotations

from array import array

_SPREAD = 0x9E3779B97F4A7C15
"""2**64 over the golden ratio: keys that follow each other come to lie far apart."""
_OFFSET_BITS = 34
_FEWEST = 8


class PlaceTable:
    """Key -> (file's number, offset), at 16 bytes a slot, of which at least a third are not used (open addressing).

    Keys are 1 to 2**64 - 1, numbers 1 to 2**30 - 1, offsets below 2**34. Not safe to use from several threads at once.
    """

    __slots__ = ("_keys", "_places", "_used")

    def __init__(self) -> None:
        self._keys = array("Q", bytes(8 * _FEWEST))
        """0 where a slot was never used."""
        self._places = array("Q", bytes(8 * _FEWEST))
        """0 for a key that was dropped."""
        self._used = 0

    def get(self, key: int) -> tuple[int, int]:
        """(number, offset); (0, 0) for a key that is not there."""
        place = self._places[self._slot(key)]
        return place >> _OFFSET_BITS, place & ((1 << _OFFSET_BITS) - 1)

    def put(self, key: int, number: int, offset: int) -> None:
        """The key is there now. OverflowError for a number beyond the limit."""
        slot = self._slot(key)
        self._places[slot] = number << _OFFSET_BITS | offset
        if not self._keys[slot]:
            self._keys[slot] = key
            self._used += 1
            if 3 * self._used > 2 * len(self._keys):
                self._rehash()

    def drop(self, key: int) -> None:
        """The key is nowhere. Its slot is used again when the table grows."""
        self._places[self._slot(key)] = 0

    def _slot(self, key: int) -> int:
        """The key's, or the one that it would get."""
        last = len(self._keys) - 1
        slot = (key * _SPREAD >> 20) & last
        while (found := self._keys[slot]) and found != key:
            slot = (slot + 1) & last
        return slot

    def _rehash(self) -> None:
        kept = [(key, place) for key, place in zip(self._keys, self._places, strict=True) if place]
        slots = _FEWEST
        while slots < 3 * len(kept):
            slots *= 2
        self._keys, self._places, self._used = array("Q", bytes(8 * slots)), array("Q", bytes(8 * slots)), len(kept)
        for key, place in kept:
            slot = self._slot(key)
            self._keys[slot], self._places[slot] = key, place
