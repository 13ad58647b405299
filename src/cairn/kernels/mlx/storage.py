"""Storage on MLX's device: cells, and transfers to and from them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import ml_dtypes
import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from cairn.kernels.mlx.cells import Cell, Cut, from_bytes, from_numpy, to_bytes, to_numpy
from cairn.kernels.stream import ThreadStream
from cairn.types.errors import DeviceError, DeviceMemoryError

Place = Cell | Cut


class MlxStorage:
    """`kernels.storage.Storage` on a device of MLX."""

    logits_rows = 64

    def __init__(self, device: Any) -> None:
        """Use `device`, mx.cpu or mx.gpu."""
        # One stream that any thread may use: weights load on one thread, and steps run on another.
        self.queue = mx.new_thread_unsafe_stream(device)

    def active(self) -> Any:
        """Return a context in which this thread's operations go to the kernel set's stream."""
        return mx.stream(self.queue)

    def allocate(self, shape: tuple[int, ...], dtype: str) -> Cell:
        """Return a cell of zeros, which take memory when they are first read or written."""
        with self.active():
            return Cell(tuple(int(size) for size in shape), dtype)

    def first(self, array: Cell, count: int, second: int | None = None) -> Cut:
        """Return the place of the first entries."""
        return Cut(array, count, second)

    def mirror(self, array: Cell) -> NDArray[Any]:
        """Return zeroed numpy memory of the cell's shape and type."""
        return np.zeros(array.shape, ml_dtypes.bfloat16 if array.dtype == "bfloat16" else array.dtype)

    def upload(self, pairs: Sequence[tuple[Cell, NDArray[Any]]]) -> None:
        """Copy each mirror, or the beginning of one, to its cell."""
        with self.active():
            for cell, mirror in pairs:
                cell.take(from_numpy(mirror), mirror.copy() if mirror.dtype == np.int32 else None)

    def fetch(self, array: Place) -> NDArray[Any]:
        """Return a copy of a cell's numbers."""
        with self.active():
            return to_numpy(array.whole() if isinstance(array, Cell) else array.value)

    def gather(self, source: Cell, places: Place, out: Place) -> None:
        """out[R, H] = source[places[R], H]."""
        with self.active():
            which = places.whole() if isinstance(places, Cell) else places.value
            found = mx.take(source.whole(), which, axis=0)
            mx.eval(found)
        (out if isinstance(out, Cell) else out.cell).take(found)

    def read_pages(self, pool: Cell, blocks: Sequence[int]) -> list[memoryview]:
        """Return copies of the blocks' bytes, fetched in one transfer."""
        if not blocks:
            return []
        with self.active():
            return to_bytes(pool.as_pool().pages(mx.array(list(blocks))))

    def write_pages(self, pool: Cell, blocks: Sequence[int], pages: Sequence[memoryview]) -> None:
        """Fill blocks in one transfer."""
        if not blocks:
            return
        with self.active():
            held = pool.as_pool()
            held.fill(mx.array(list(blocks)), from_bytes([np.frombuffer(one, np.uint8) for one in pages], held.dtype))
            mx.eval(held.arrays)

    def copy_blocks(self, pool: Cell, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks within a pool, in order: a source that an earlier pair has filled is read after that."""
        with self.active():
            held = pool.as_pool()
            for batch in _apart(pairs):
                pages = held.pages(mx.array([source for source, _ in batch]))
                mx.eval(pages)  # or the pool would be read while it is written, and copied
                held.fill(mx.array([target for _, target in batch]), pages)
                mx.eval(held.arrays)

    @contextlib.contextmanager
    def touching(self, pools: Sequence[Cell], size: int) -> Iterator[None]:
        """Take the memory of the pools before the body."""
        with self.active():
            for pool in pools:
                mx.eval(pool.as_pool().arrays)
        yield

    def stream(self) -> ThreadStream:
        """Return a thread that drives the device."""
        return ThreadStream("cairn-mlx", translated)


def _apart(pairs: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Yield runs of pairs of which no block is written twice, or written and then read."""
    number, written = 0, set[int]()
    marked: list[tuple[int, tuple[int, int]]] = []
    for source, target in pairs:
        if source in written or target in written:
            number, written = number + 1, set()
        written.add(target)
        marked.append((number, (source, target)))
    for _, run in groupby(marked, key=lambda one: one[0]):
        yield [pair for _, pair in run]


def translated(error: Exception) -> Exception:
    """Return the typed error for an exception of MLX; other exceptions unchanged."""
    if not isinstance(error, RuntimeError) or isinstance(error, (DeviceError, DeviceMemoryError)):
        return error
    line = (str(error).splitlines() or [type(error).__name__])[0][:300]
    if out_of_memory(error):
        return DeviceMemoryError(f"the device has no memory left: {line}")
    return DeviceError(f"the device failed: {line}")


def out_of_memory(error: Exception) -> bool:
    """Tell whether MLX failed because it found no memory."""
    return any(word in str(error) for word in ("malloc", "allocate", "Insufficient Memory", "OutOfMemory"))
