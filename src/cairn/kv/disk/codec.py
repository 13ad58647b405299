"""Encodings of a chunk's pages on the disk: the same bytes, or 8-bit integers.

`raw` gives back the same bits. `q8` takes about a quarter of the room of float32 pages, half of that of 16-bit ones,
and is lossy except for states, which it leaves as they are: a loss in a state would affect every later token. Whoever
turns it on gives up the promise that a cached answer is the same answer. A store never gives chunks of one codec to a
reader of another.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Literal, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cairn.types.model_spec import CHUNK_BLOCKS, CacheGroup

_DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype("<f2"),
}
_ROUNDING = {"float32": (2**-24, 2**-149), "bfloat16": (2**-8, 2**-133), "float16": (2**-11, 2**-24)}
"""The error of rounding to the type: relative to the number, and the smallest absolute step."""


class Codec(Protocol):
    """An encoding of pages.

    Chunks of a group have one size before and one after, and tails the share of it that their blocks have; any other
    size raises `ValueError`.
    """

    @property
    def name(self) -> str:
        """The name that is written in every file."""
        ...

    @property
    def lossless(self) -> bool:
        """Whether `decode` gives back the same bits."""
        ...

    @property
    def state_sizes(self) -> frozenset[int]:
        """Encoded sizes of chunks of states, in bytes."""
        ...

    def size(self, group: int) -> int:
        """Return the encoded size of a whole chunk of the group, in bytes."""
        ...

    def written(self, group: int, size: int) -> int:
        """Return the encoded size of so many bytes of a group's pages."""
        ...

    def encode(self, group: int, pages: bytes | memoryview) -> bytes | memoryview:
        """Encode a chunk's pages. Raise `ValueError` for pages that cannot be encoded."""
        ...

    def decode(self, group: int, data: memoryview) -> bytes | memoryview:
        """Decode the pages. Raise `ValueError` for data of a wrong size."""
        ...


class Raw:
    """The pages themselves."""

    name = "raw"
    lossless = True

    def __init__(self, block_bytes: Sequence[int], states: Collection[int] = ()) -> None:
        """Take the sizes of an engine's blocks.

        `block_bytes`: of one block of each group, as in `EngineInfo`. `states`: numbers of the groups whose chunks are
        one block.
        """
        self._sizes = tuple((1 if at in states else CHUNK_BLOCKS) * size for at, size in enumerate(block_bytes))
        self._blocks = tuple(block_bytes)
        self.state_sizes = frozenset(self._sizes[at] for at in states)

    def size(self, group: int) -> int:
        """Return the size of the chunk's pages: four, or one of a state."""
        return _checked(self._sizes, group)

    def written(self, group: int, size: int) -> int:
        """Return the same size."""
        return size

    def encode(self, group: int, pages: bytes | memoryview) -> bytes | memoryview:
        """Return the pages, not copied."""
        return _sized(pages, self.size(group), self._blocks[group])

    def decode(self, group: int, data: memoryview) -> bytes | memoryview:
        """Return the data, not copied."""
        return _sized(data, self.size(group), self._blocks[group])


class Q8:
    """Pages as one int8 a number and one float32 scale for each row of `head_dim` numbers.

    The scale is a 127th of the largest magnitude in the row, so each number comes back within half a scale of its value
    (`error_bound`), and zeros come back as zeros. All scales come first, then all numbers, both in the order of the
    pages.
    """

    name = "q8"
    lossless = False

    def __init__(
        self,
        block_bytes: Sequence[int],
        head_dim: int | Sequence[int],
        dtype: str = "float32",
        states: Collection[int] = (),
    ) -> None:
        """Take the layout of an engine's pages. Raise `ValueError` if they are not rows of `head_dim` numbers.

        `block_bytes` and `states` as for `Raw`. `head_dim`: of each group or of all. `dtype`: float32, bfloat16 or
        float16; any other is a `ValueError` too.
        """
        if dtype not in _DTYPES:
            raise ValueError(f"pages of {dtype} hold codes already, and are stored as they are by the codec raw")
        self._dtype = _DTYPES[dtype]
        self._states, self._raw = frozenset(states), Raw(block_bytes, states)
        self.state_sizes = self._raw.state_sizes
        sizes = [head_dim] * len(block_bytes) if isinstance(head_dim, int) else head_dim
        for at, (one, size) in enumerate(zip(sizes, block_bytes, strict=True)):
            if size % (self._dtype.itemsize * one) and at not in self._states:
                raise ValueError(f"pages of {tuple(block_bytes)} bytes are not rows of {one} {dtype} numbers")
        self._head_dims = tuple(sizes)
        self._rows = tuple(
            CHUNK_BLOCKS * size // (self._dtype.itemsize * one) for one, size in zip(sizes, block_bytes, strict=True)
        )

    def size(self, group: int) -> int:
        """Return `head_dim` + 4 bytes for each row of a chunk."""
        if group in self._states:
            return self._raw.size(group)
        return _checked(self._rows, group) * (self._head_dims[group] + 4)

    def written(self, group: int, size: int) -> int:
        """Return one byte for each number and four for each row."""
        if group in self._states:
            return size
        return size * self.size(group) // (_checked(self._rows, group) * self._head_dims[group] * self._dtype.itemsize)

    def encode(self, group: int, pages: bytes | memoryview) -> bytes | memoryview:
        """Quantize the pages. Raise `ValueError` for infinite numbers and NaN, which would spoil their whole row."""
        if group in self._states:
            return self._raw.encode(group, pages)
        rows = _checked(self._rows, group)
        size = self._head_dims[group]
        bytes_of_row = size * self._dtype.itemsize
        data = _sized(pages, rows * bytes_of_row, rows * bytes_of_row // CHUNK_BLOCKS)
        numbers = np.frombuffer(data, dtype=self._dtype).astype(np.float32, copy=False).reshape(-1, size)
        largest = np.abs(numbers).max(axis=1)
        if not np.isfinite(largest).all():
            raise ValueError("a page has a number that is not finite")
        scales = largest / np.float32(127)
        # A subnormal scale has too few bits to divide by; such a row is as good as zero.
        scales[scales < np.finfo(np.float32).tiny] = 0
        divisors = np.where(scales > 0, scales, np.float32(np.inf))
        small = np.clip(np.rint(numbers / divisors[:, None]), -127, 127).astype(np.int8)
        return bytes(scales.astype("<f4").tobytes() + small.tobytes())

    def decode(self, group: int, data: memoryview) -> bytes | memoryview:
        """Return the pages in their type."""
        if group in self._states:
            return self._raw.decode(group, data)
        data = _sized(data, self.size(group), self.size(group) // CHUNK_BLOCKS)
        rows = len(data) // (self._head_dims[group] + 4)
        scales = np.frombuffer(data[: 4 * rows], dtype="<f4")
        small = np.frombuffer(data[4 * rows :], dtype=np.int8).reshape(rows, self._head_dims[group])
        pages: NDArray[np.float32] = small * scales[:, None]
        return pages.astype(self._dtype, copy=False).tobytes()


def error_bound(largest: float, dtype: str = "float32") -> float:
    """Return the largest error of `q8` in a row with this largest magnitude: half a step, and rounding of floats."""
    relative, least = _ROUNDING[dtype]
    return largest / 254 * (1 + 1e-4) + relative * largest + least + 127 * float(np.finfo(np.float32).tiny)


def open_codec(
    name: Literal["raw", "q8"],
    block_bytes: Sequence[int],
    head_dim: int | Sequence[int],
    dtype: str = "float32",
    states: Collection[int] = (),
) -> Codec:
    """Return the codec with this name.

    `head_dim`: numbers a row of the pages, of each group or of all; `states`: groups whose pages it leaves as they are.
    """
    return Q8(block_bytes, head_dim, dtype, states) if name == "q8" else Raw(block_bytes, states)


def state_groups(groups: Sequence[CacheGroup]) -> tuple[int, ...]:
    """Return the numbers of the groups that keep states."""
    return tuple(number for number, group in enumerate(groups) if group.kind == "state")


def _checked(sizes: tuple[int, ...], group: int) -> int:
    if not 0 <= group < len(sizes):
        raise ValueError(f"there is no cache group {group}, only {len(sizes)} groups")
    return sizes[group]


def _sized(data: bytes | memoryview, size: int, block: int) -> memoryview:
    """Return the bytes of a whole chunk or of the blocks of a tail. Raise `ValueError` for any other size."""
    view = memoryview(data).cast("B")
    if len(view) % block or not 0 < len(view) <= size:
        raise ValueError(f"{len(view)} bytes are not whole blocks of {block} bytes, at most {size} in all")
    return view
