"""The texts in a JSON value, and its size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from cairn.text.tokens.tokenizer import INLINE
from cairn.types.errors import InvalidRequest

_DEEPEST = 1000
"""Most levels of nesting that are walked. Rendering stops earlier; a Python list may contain itself."""


def texts_in(value: Any) -> Iterator[str]:
    """Yield every text in a JSON value, keys included.

    Raises InvalidRequest for a key that is not a text, as Python's dicts may have, and beyond 1000 levels.
    """
    return (item for item in _values_in(value) if isinstance(item, str))


def length(value: Any) -> int:
    """Return the size of a JSON value: its texts' characters, and 1 for every other item.

    Counting stops above INLINE. Raises as `texts_in` does.
    """
    count = 0
    for item in _values_in(value):
        count += max(len(item), 1) if isinstance(item, str) else 1
        if count > INLINE:
            break
    return count


def _values_in(value: Any) -> Iterator[Any]:
    """Yield every item of a JSON value, itself and keys included."""
    # Not recursive: nested generators would pay the depth again for every item.
    levels: list[Iterator[Any]] = [iter((value,))]
    while levels:
        if len(levels) > _DEEPEST:
            raise InvalidRequest("messages or tools are nested too deeply", field="messages")
        for item in levels[-1]:
            yield item
            if isinstance(item, str):
                continue
            if isinstance(item, Mapping):
                yield from map(_key, item)
                levels.append(iter(item.values()))
                break
            if isinstance(item, list | tuple):
                levels.append(iter(item))
                break
        else:
            levels.pop()


def _key(key: object) -> str:
    if not isinstance(key, str):
        raise InvalidRequest(f"messages or tools have the key {key!r:.40}; keys must be texts", field="messages")
    return key
