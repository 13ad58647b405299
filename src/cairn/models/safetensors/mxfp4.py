"""Safetensors whose experts are in MXFP4, as gpt-oss comes: half bytes of neighbours and one exponent for 32 of them.

A byte holds two neighbours, the first in its low half. A value is one of sixteen, times 2 ** (exponent - 127). They are
put into the order of GGUF's MXFP4, so that one decoder serves both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cairn.kernels.base import GROUP, Packed
from cairn.models.packing.dequant import KINDS, dequantize
from cairn.models.packing.quantize import unpack
from cairn.models.safetensors.coded_weights import Coded
from cairn.models.safetensors.tensor_meta import TensorMeta, codes
from cairn.types.errors import ModelFileError

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

    @property
    def kind(self) -> tuple[str, bool]:
        """MXFP4, of which nothing is rounded."""
        return _KIND.name, False

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in its file."""
        return self.blocks.nbytes + self.scales.nbytes

    def values(self) -> NDArray[np.float32]:
        """Its numbers [out, in]."""
        return dequantize(_KIND, self.rows()).reshape(self.shape)

    def packed_outline(self) -> TensorMeta:
        """What `packed` gives."""
        return codes(self.shape, _KIND.bits, *_KIND.scaled, table=_KIND.table)

    def packed(self) -> tuple[Packed, float]:
        """The matrix as codes of kernels; no error."""
        return unpack(_KIND, self.rows(), self.shape)


def joined(
    path: Path, found: Mapping[str, Any], parts: Mapping[str, NDArray[Any]], expected: Mapping[str, Any]
) -> dict[str, Coded]:
    """The tensors that stand in two parts, whose names end in one of `PARTS`."""
    packed: dict[str, Coded] = {}
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
    return packed
