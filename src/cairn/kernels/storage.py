"""Storage of a kernel set's arrays, and transfers to and from them.

An engine never touches an array of a device. It fills numpy mirrors, uploads them in one transfer for each step, and
fetches results. In host memory an array is its own mirror, so that both cost nothing.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cairn.kernels.stream import InlineStream, WorkStream

Array = Any

PAGE = 4096
"""Bytes of a page of the system's memory."""
_SLICE = 4 << 20


class Storage(Protocol):
    """Arrays of one device. All methods but `mirror` and `stream` run on the kernel set's stream."""

    @property
    def logits_rows(self) -> int:
        """Most rows of logits in one run of the head; a step that wants more runs it in slices."""
        ...

    def allocate(self, shape: tuple[int, ...], dtype: str) -> Array:
        """Return a zeroed array; `dtype` is numpy's name. Raises `DeviceMemoryError` if there is no room."""
        ...

    def first(self, array: Array, count: int, second: int | None = None) -> Array:
        """Return the first `count` entries along axis 0, and the first `second` along axis 1, sharing memory."""
        ...

    def mirror(self, array: Array) -> NDArray[Any]:
        """Return numpy memory in an array's shape to fill for `upload`; in host memory the array itself."""
        ...

    def upload(self, pairs: Sequence[tuple[Array, NDArray[Any]]]) -> None:
        """Copy each mirror, or a leading part of it, to the beginning of its array, all in one transfer."""
        ...

    def fetch(self, array: Array) -> NDArray[Any]:
        """Return an array as numpy: a view in host memory, else a copy."""
        ...

    def gather(self, source: Array, places: Array, out: Array) -> None:
        """out[R, H] = source[places[R], H]."""
        ...

    def read_pages(self, pool: Array, blocks: Sequence[int]) -> list[memoryview]:
        """Return the bytes of some blocks of a pool: views in host memory, else copies."""
        ...

    def write_pages(self, pool: Array, blocks: Sequence[int], pages: Sequence[memoryview]) -> None:
        """Fill blocks of a pool with pages from `read_pages`."""
        ...

    def copy_blocks(self, pool: Array, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy block `source` to block `target` within a pool for each pair, in order."""
        ...

    def touching(self, pools: Sequence[Array], size: int) -> AbstractContextManager[None]:
        """Allocate the first `size` bytes of the pools, of each in proportion, in parallel to the body."""
        ...

    def stream(self) -> WorkStream:
        """Return the stream on which the engine runs all work with these kernels."""
        ...


class HostStorage:
    """`Storage` in host memory: arrays are numpy's, pages are views, and transfers copy nothing."""

    logits_rows = 32

    def first(self, array: NDArray[Any], count: int, second: int | None = None) -> NDArray[Any]:
        """Return a view."""
        return array[:count] if second is None else array[:count, :second]

    def mirror(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return the array itself."""
        return array

    def upload(self, pairs: Sequence[tuple[Array, NDArray[Any]]]) -> None:
        """Do nothing: a mirror is its array."""

    def fetch(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return the array itself."""
        return array

    def gather(self, source: NDArray[Any], places: NDArray[np.int32], out: NDArray[Any]) -> None:
        """out[R, H] = source[places[R], H]."""
        np.take(source, places, axis=0, out=out)

    def read_pages(self, pool: NDArray[Any], blocks: Sequence[int]) -> list[memoryview]:
        """Return views: no copy."""
        return [_bytes_of(pool[block]).data for block in blocks]

    def write_pages(self, pool: NDArray[Any], blocks: Sequence[int], pages: Sequence[memoryview]) -> None:
        """Copy pages into blocks."""
        for block, page in zip(blocks, pages, strict=True):
            # Not by memoryview's copy, which holds the interpreter lock.
            np.copyto(_bytes_of(pool[block]), np.frombuffer(page, np.uint8))

    def copy_blocks(self, pool: NDArray[Any], pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks within a pool."""
        for source, target in pairs:
            np.copyto(_bytes_of(pool[target]), _bytes_of(pool[source]))

    @contextlib.contextmanager
    def touching(self, pools: Sequence[NDArray[Any]], size: int) -> Iterator[None]:
        """Write a zero into each memory page of the first `size` bytes of the pools, on a thread parallel to the body.

        The system allocates memory page by page at the first write, which takes as long as reading as much stored KV.
        A context that is requested right after a restart should not wait for both, so the blocks used first are
        allocated while weights load. Nothing else may write to them meanwhile. At the end of the body the thread stops
        where it is.
        """
        over = threading.Event()
        whole = sum(pool.nbytes for pool in pools)

        def write() -> None:
            for pool in pools:
                numbers = _bytes_of(pool)
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

    def stream(self) -> InlineStream:
        """Return a stream that runs work at once, since these kernels use all cores themselves."""
        return InlineStream()


def _bytes_of(array: NDArray[Any]) -> NDArray[np.uint8]:
    """View an array's bytes: not every type of number has a memoryview of its own."""
    return array.reshape(-1).view(np.uint8)


__all__ = ["PAGE", "HostStorage", "Storage"]
