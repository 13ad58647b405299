"""How many values MessagePack bytes hold, counted without making any: a value of one byte takes eighty once it is made.

https://github.com/msgpack/msgpack/blob/master/spec.md
"""

from __future__ import annotations

_BEHIND = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_BEHIND |= {0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17, 0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}
"""First byte -> how many bytes follow before the next value: of numbers and small extensions the value itself, of
arrays and maps their length."""
_COUNTED = {0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0), 0xC7: (1, 1), 0xC8: (2, 1), 0xC9: (4, 1)}
_COUNTED |= {0xD9: (1, 0), 0xDA: (2, 0), 0xDB: (4, 0)}
"""First byte of bytes, extensions and texts -> bytes of the length, and bytes beside what is counted."""


def count_values(data: bytes, most: int) -> int:
    """Values in `data`, arrays and maps and what they hold each; stops beyond `most`. What is no MessagePack gives any
    number."""
    at = count = 0
    while at < len(data) and count <= most:
        head, count = data[at], count + 1
        at += 1
        if 0xA0 <= head < 0xC0:
            at += head & 31
        elif head in _COUNTED:
            length, more = _COUNTED[head]
            at += length + more + int.from_bytes(data[at : at + length], "big")
        else:
            at += _BEHIND.get(head, 0)
    return count
