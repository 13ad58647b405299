"""Safetensors whose experts are in MXFP4, as gpt-oss comes: half bytes of neighbours and one exponent for 32 of them.

A byte holds two neighbours, the first in its low half. A value is one of sixteen, times 2 ** (exponent - 127). They are
put into the order of GGUF's MXFP4, so that one decoder serves both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cairn.errors import ModelFileError
from cairn.kernels.base import GROUP, Quantized
from cairn.models import tensor_meta as known
from cairn.models.dequant import KINDS, dequantize
from cairn.models.quantize import unpack
from cairn.models.tensor_meta import TensorMeta, codes

PARTS = (".blocks", ".scales")
"""What stands behind the name of a tensor that is stored in two."""
_KIND = next(kind for kind in KINDS.values() if kind.name == "MXFP4")


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """A matrix [out, in]: blocks [out, in / 32, 16] and scales [out, in / 32], both uint8."""

    blocks: NDArray[np.uint8]
    scales: NDArray[np.uint8]

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)"""
        return len(self.scales), self.scales.shape[1] * GROUP

    def rows(self) -> NDArray[np.uint8]:
        """GGUF's blocks [out * in / 32, 17]."""
        order = np.stack([self.blocks & 15, self.blocks >> 4], axis=-1).reshape(-1, 2, 16)
        return np.concatenate([self.scales.reshape(-1, 1), order[:, 0] | order[:, 1] << 4], axis=1)


def joined(
    path: Path, found: dict[str, NDArray[Any]], parts: Mapping[str, NDArray[Any]], expected: Mapping[str, Any]
) -> Mapping[str, NDArray[Any]]:
    """The tensors that were found, with those that stand in two parts, whose names end in one of `PARTS`."""
    if not parts:
        return found
    packed = {}
    for name in dict.fromkeys(one.rpartition(".")[0] for one in parts):
        out, inner = expected[name]
        wanted = {".blocks": (out, inner // GROUP, GROUP // 2), ".scales": (out, inner // GROUP)}
        for end, shape in wanted.items():
            one = parts.get(name + end)
            if one is None or one.dtype != np.uint8 or one.shape != shape or inner % GROUP:
                said = "nothing" if one is None else f"{one.dtype} of shape {list(one.shape)}"
                raise ModelFileError(f"{path}: {name}{end} must be U8 of shape {list(shape)}, found {said}")
        if name in found:
            raise ModelFileError(f"{path}: the tensor {name[:120]!r} is there under two names")
        packed[name] = Mxfp4(parts[f"{name}.blocks"], parts[f"{name}.scales"])
    return Mxfp4Weights(found, packed)


class Mxfp4Weights(Mapping[str, NDArray[Any]]):
    """Weights some of which are in MXFP4. An array that was asked for is not kept: ask once."""

    def __init__(self, plain: Mapping[str, NDArray[Any]], packed: Mapping[str, Mxfp4]) -> None:
        self._plain, self._packed = plain, packed

    def __getitem__(self, name: str) -> NDArray[Any]:
        if name not in self._packed:
            return self._plain[name]
        one = self._packed[name]
        return dequantize(_KIND, one.rows()).reshape(one.shape)

    def outline(self, name: str) -> TensorMeta:
        """What `[name]` gives, and the bytes of memory that it makes."""
        if name not in self._packed:
            return known.outline(self._plain, name)
        shape = self._packed[name].shape
        return TensorMeta(shape, "float32", 4 * math.prod(shape))

    def packed_outline(self, name: str) -> TensorMeta | None:
        """What `packed` gives; None for a tensor of single numbers."""
        return codes(self._packed[name].shape, _KIND.bits, *_KIND.scaled) if name in self._packed else None

    def packed(self, name: str) -> tuple[Quantized, float]:
        """A tensor that has a `packed_outline` as codes, and its relative error: none is lost."""
        one = self._packed[name]
        return unpack(_KIND, one.rows(), one.shape)

    def kind(self, name: str) -> tuple[str, bool]:
        """A tensor's number format in the file, and whether `packed` has to round it."""
        if name in self._packed:
            return _KIND.name, False
        return {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[str(self._plain[name].dtype)], False

    def __contains__(self, name: object) -> bool:
        return name in self._plain or name in self._packed

    def __iter__(self) -> Iterator[str]:
        return iter((*self._plain, *self._packed))

    def __len__(self) -> int:
        return len(self._plain) + len(self._packed)
