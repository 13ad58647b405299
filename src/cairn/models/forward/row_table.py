"""A table left in its file whose rows are read on demand.

Steps use few rows of it. They are read, not mapped: a file that shrinks is then an error and does not kill the process.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cairn.models.families.uneven_spec import INPUTS
from cairn.models.files import is_gguf, opened
from cairn.models.gguf.architectures import PER_LAYER
from cairn.models.gguf.reader import read_gguf
from cairn.models.quantization.dequant import BlockFormat, dequantize
from cairn.models.safetensors.weights import DTYPES, located
from cairn.types.errors import ModelFileError
from cairn.types.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class TableLocation:
    """File, offset, shape and format of a table [rows, width]."""

    path: Path
    begin: int
    rows: int
    width: int
    kind: BlockFormat

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.width // self.kind.values * self.kind.bytes


class RowTable:
    """An open table. Rows are returned exactly as stored, in float32."""

    def __init__(self, place: TableLocation) -> None:
        """Open the file; later renames or replacements of its name have no effect."""
        self.place = place
        with opened(place.path) as file:
            self._file = os.dup(file.fileno())

    def read(self, ids: Sequence[int] | NDArray[np.int32], out: NDArray[np.float32]) -> None:
        """Set out[n, width] to the rows ids[n]; ids beyond the table give row 0.

        Raise `ModelFileError` if the file ends before one of them.
        """
        place, size = self.place, self.place.row_bytes
        known = np.asarray(ids)
        numbers, places = np.unique(np.where(known < place.rows, known, 0), return_inverse=True)
        found = np.empty((len(numbers), size), np.uint8)
        for at, number in enumerate(numbers.tolist()):
            if os.preadv(self._file, [memoryview(found[at])], place.begin + number * size) != size:
                raise ModelFileError(f"{place.path}: the file became shorter while it was served")
        blocks = found.reshape(-1, place.kind.bytes)
        flat = blocks.view(place.kind.dtype) if place.kind.dtype is not None else dequantize(place.kind, blocks)
        out[:] = flat.reshape(len(numbers), place.width)[places]

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def open_table(folder: Path, spec: ModelSpec) -> RowTable | None:
    """Open the table of a model's per-layer inputs; None for a model without."""
    if spec.uneven is None or not spec.uneven.inputs:
        return None
    if is_gguf(folder):
        tensor = read_gguf(folder).tensors[PER_LAYER]
        return RowTable(TableLocation(tensor.path, tensor.begin, *_two(tensor.shape), tensor.kind))
    path, begin, shape, dtype = located(folder, spec, INPUTS)
    if dtype not in DTYPES.values():
        raise ModelFileError(f"{path}: the tensor {INPUTS} is stored as {dtype}; supported are {', '.join(DTYPES)}")
    return RowTable(TableLocation(path, begin, *_two(shape), BlockFormat(str(dtype), 1, dtype.itemsize, str(dtype))))


def _two(shape: tuple[int, ...]) -> tuple[int, int]:
    rows, width = shape
    return rows, width
