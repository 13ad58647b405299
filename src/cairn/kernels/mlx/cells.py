"""Cells that stand for arrays which kernels overwrite: MLX's own arrays are values and never change.

A KV or state pool is held as arrays of each layer. MLX writes into an array in place only if nothing else holds it, and
a read of it counts until the step is done. In one array of all layers the second layer's write would copy the whole
pool, because the first layer has read it; an array of its own is written once in a step, before it is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

Array = Any
"""An array of MLX."""

DTYPES = {
    "float32": mx.float32,
    "float16": mx.float16,
    "bfloat16": mx.bfloat16,
    "int32": mx.int32,
    "int8": mx.int8,
    "uint8": mx.uint8,
}
"""Numpy's name of a type -> MLX's type."""
_KV_AXES = 6
_STATE_AXES = 3


class Cell:
    """The place of an array: its largest shape, and the value of its first entries."""

    __slots__ = ("dtype", "host", "pool", "shape", "value")

    def __init__(self, shape: tuple[int, ...], dtype: str) -> None:
        self.shape, self.dtype = shape, dtype
        self.value: Array = mx.zeros(shape, DTYPES[dtype])
        self.host: NDArray[np.int32] | None = None
        """The last upload of integers: some decide which arrays a step reads, and reading them back would stall it."""
        self.pool: Pool | None = None
        """What it holds if it is a pool; its value is then empty."""

    def __len__(self) -> int:
        return self.shape[0]

    def cut(self, count: int, second: int | None = None) -> Array:
        """Return the first `count` entries along axis 0, and the first `second` along axis 1; missing ones are 0."""
        value = self.whole()
        wanted = (count, *self.shape[1:]) if second is None else (count, second, *self.shape[2:])
        if tuple(value.shape) == wanted:
            return value
        value = value[tuple(map(slice, wanted))]
        gaps = [(0, size - there) for there, size in zip(value.shape, wanted, strict=True)]
        return mx.pad(value, gaps) if any(gap for _, gap in gaps) else value

    def integers(self, count: int, second: int | None = None) -> NDArray[np.int32]:
        """Return `cut` on the host, without reading it back if that is what was uploaded."""
        known, shape = self.host, (count,) if second is None else (count, second)
        if known is not None and all(there >= size for there, size in zip(known.shape, shape, strict=False)):
            return known[tuple(map(slice, shape))]
        return np.array(self.cut(count, second))

    def whole(self) -> Array:
        """Return its value; a pool's in the shape that it was allocated with."""
        return self.value if self.pool is None else self.pool.joined()

    def take(self, value: Array, host: NDArray[np.int32] | None = None) -> None:
        """Hold other numbers: those of the first entries, or of a whole pool."""
        self.host = host
        if self.pool is None:
            self.value = value
        else:
            self.pool = Pool(value)

    def as_pool(self) -> Pool:
        """Return the cell's pool; the first call turns its value into one."""
        if self.pool is None:
            self.pool, self.value = Pool(self.value), None
        return self.pool


@dataclass(frozen=True, slots=True)
class Cut:
    """The first entries of a cell."""

    cell: Cell
    count: int
    second: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of these entries."""
        own = self.cell.shape
        return (self.count, *own[1:]) if self.second is None else (self.count, self.second, *own[2:])

    @property
    def value(self) -> Array:
        """The entries."""
        return self.cell.cut(self.count, self.second)


@dataclass(frozen=True, slots=True)
class Blank:
    """Stands for an argument that a kernel overwrites whole: its shape."""

    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LaterWrite:
    """Numbers that go to a state pool when the step's reads are done."""

    layer: int
    blocks: Array
    first: int
    numbers: Array
    """[blocks, numbers from `first` on]"""


class Pool:
    """A pool's arrays: of each layer keys and values [blocks, 16, K, D], latents likewise, or states [blocks, N]."""

    __slots__ = ("_tail", "later", "layers")

    def __init__(self, whole: Array) -> None:
        """Split [blocks, layers, parts, K, 16, D], or states [blocks, layers, N]."""
        if whole.ndim not in (_KV_AXES, _STATE_AXES):
            raise ValueError(f"a pool has {_KV_AXES} axes, or {_STATE_AXES} for states, not {whole.ndim}")
        self._tail = tuple(whole.shape[2:])
        count = whole.shape[1]
        if whole.ndim == _STATE_AXES:
            self.layers = [[mx.contiguous(whole[:, layer])] for layer in range(count)]
        else:
            turned = mx.swapaxes(whole, 3, 4)
            self.layers = [
                [mx.contiguous(turned[:, layer, part]) for part in range(whole.shape[2])] for layer in range(count)
            ]
        self.later: list[LaterWrite] = []

    @property
    def arrays(self) -> list[Array]:
        """All arrays, layer by layer."""
        return [one for layer in self.layers for one in layer]

    @arrays.setter
    def arrays(self, found: list[Array]) -> None:
        given = iter(found)
        self.layers = [[next(given) for _ in layer] for layer in self.layers]

    @property
    def dtype(self) -> Any:
        """The type of its numbers."""
        return self.layers[0][0].dtype

    @property
    def page(self) -> tuple[int, ...]:
        """The shape of a block's numbers of one layer and part, in the pool's order."""
        return tuple(self.layers[0][0].shape[1:])

    def joined(self) -> Array:
        """Return a copy in the shape that the pool was split from."""
        if len(self._tail) == 1:
            return mx.stack([layer[0] for layer in self.layers], axis=1)
        parts = mx.stack([mx.stack(layer, axis=1) for layer in self.layers], axis=1)
        return mx.swapaxes(parts, 3, 4)

    def pages(self, blocks: Array) -> Array:
        """Return copies of blocks as [n, numbers], over all layers and parts."""
        # Gathered: a slice would share its base, and the next write would copy the base.
        found = [mx.take(one, blocks, axis=0).reshape(blocks.size, 1, -1) for one in self.arrays]
        return mx.concatenate(found, axis=1).reshape(blocks.size, -1)

    def fill(self, blocks: Array, pages: Array) -> None:
        """Overwrite blocks with pages [n, numbers]."""
        parts = pages.reshape(blocks.size, len(self.arrays), *self.page)
        arrays, self.arrays = self.arrays, [None] * len(self.arrays)
        for number in range(len(arrays)):
            arrays[number][blocks] = parts[:, number]
        self.arrays = arrays

    def settle(self) -> None:
        """Make the writes that waited for the step's reads."""
        for one in self.later:
            (array,) = self.layers[one.layer]
            self.layers[one.layer] = [None]
            array[one.blocks, one.first : one.first + one.numbers.shape[1]] = one.numbers
            self.layers[one.layer] = [array]
            del array
        self.later = []


def from_numpy(source: NDArray[Any]) -> Array:
    """Copy a numpy array to MLX."""
    whole = np.ascontiguousarray(source)
    if whole.dtype == ml_dtypes.bfloat16:
        return mx.array(whole.view(np.uint16)).view(mx.bfloat16)
    return mx.array(whole)


def to_numpy(array: Array) -> NDArray[Any]:
    """Copy an array to numpy."""
    if array.dtype == mx.bfloat16:
        return np.array(array.view(mx.uint16)).view(ml_dtypes.bfloat16)
    return np.array(array)


def to_bytes(pages: Array) -> list[memoryview]:
    """Return the bytes of each line of pages [n, numbers]."""
    lines = np.array(mx.contiguous(pages).view(mx.uint8))
    return [line.data for line in lines]


def from_bytes(pages: list[NDArray[np.uint8]], dtype: Any) -> Array:
    """Return pages [n, numbers] of their bytes."""
    return mx.array(np.stack(pages)).view(dtype)
