"""Memory for the blocks of KV pools that will be used first, taken while weights are loaded.

The system gives out memory page by page, when each is first written to, which takes as long as it does to read as much
stored KV. A context that is asked for right after a restart should not wait for both.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

PAGE = 4096
_SLICE = 4 << 20


@contextmanager
def taken(pools: Sequence[NDArray[Any]], size: int) -> Iterator[None]:
    """Write zeros into each page of the first `size` bytes of the pools, of each in proportion, beside the body.

    Nobody else may write to them meanwhile. What is not done at the end of the body is left undone.
    """
    over = threading.Event()
    whole = sum(pool.nbytes for pool in pools)

    def write() -> None:
        for pool in pools:
            numbers = pool.reshape(-1).view(np.uint8)
            numbers = numbers[: len(numbers) * min(size, whole) // whole]
            for at in range(0, len(numbers), _SLICE):
                if over.is_set():
                    return
                numbers[at : at + _SLICE : PAGE] = 0

    thread = threading.Thread(target=write, name="cairn-kv-pages", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
