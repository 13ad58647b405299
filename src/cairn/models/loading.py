"""How far the load of a model is, told to whoever watches it: nobody, unless somebody asked to."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

Watch = Callable[[str, int, int], None]
"""What is being done, how much of it is done, and of how much."""

_watch: ContextVar[Watch | None] = ContextVar("cairn_loading", default=None)


@contextlib.contextmanager
def watched(watch: Watch) -> Iterator[None]:
    """Inside, on this thread, `watch` is told of every step of a load."""
    token = _watch.set(watch)
    try:
        yield
    finally:
        _watch.reset(token)


def tell(doing: str, done: int, total: int) -> None:
    """Something of a load is done."""
    if (watch := _watch.get()) is not None:
        watch(doing, done, total)
