"""Modules of quantised safetensors: groups the tensors of each module and reads them as one matrix.

A module's tensors share its name as a prefix:

    float8      weight e4m3 [out, in], and weight_scale_inv or weight_scale: one, [out], [out, 1] or one for each block
    integers    weight int8 [out, in], or weight_packed int32 [out, in * bits / 32] with its weight_shape; weight_scale
                [out, G] or fewer; weight_zero_point as the weight is, packed along the outputs; weight_g_idx [in]
                of fp4 weight_packed or weight uint8 [out, in / 2]; weight_scale e4m3 [out, in / 16], all divided by
                weight_global_scale or multiplied with weight_scale_2, or e8m0 [out, in / 32]
    awq         qweight int32 [in, out / 8], qzeros [G, out / 8], scales [G, out]; eight outputs out of order in a word
    mlx         weight uint32 [out, in * bits / 32], scales and biases [out, G]; of all experts [experts, out, ...]
    gptq        qweight int32 [in * bits / 32, out], qzeros [G, out * bits / 32], scales [G, out], g_idx [in]

Numbers fill a word from its lowest bits. Unsigned ones are centred: 8 or 128 is subtracted; but for mlx, whose biases
are added to scale * code.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from cairn.models.quantization.quantized_config import Scheme
from cairn.models.safetensors.stored_codes import (
    FLOAT8,
    FLOAT_E8,
    AffineCodes,
    Float4,
    Float8,
    IntegerCodes,
    Rows,
    StoredMatrix,
    row_numbers,
)
from cairn.types.errors import ModelFileError

Array = NDArray[Any]

_ENDS = {
    "float8": ("weight_scale_inv", "weight_scale"),
    "integers": (
        *("weight_packed", "weight_shape", "weight_scale", "weight_zero_point", "weight_g_idx"),
        *("weight_global_scale", "weight_scale_2"),
    ),
    "awq": ("qweight", "qzeros", "scales"),
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "mlx": ("scales", "biases"),
}
"""Suffixes of the tensors of a module."""
ENDS = frozenset(end for ends in _ENDS.values() for end in ends)
_UNUSED = (
    "input_scale",
    "input_global_scale",
    "input_zero_point",
    "output_scale",
    "k_scale",
    "v_scale",
    "q_scale",
    "activation_scale",
)
"""Settings for rounding activations or KV."""
_JOINED = ".switch_mlp."
"""Part of the names of modules in which mlx_lm joins all experts of a layer: weight, scales and biases have 3 axes."""
_AWQ = np.array((0, 4, 1, 5, 2, 6, 3, 7), np.uint32)
"""Nibble position of each of eight neighbouring outputs in a word."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a file; if it has a `source`, `array` is `stored_codes.row_numbers` of it."""

    path: Path
    name: str
    array: Array
    source: StoredMatrix | None = None


def modules(scheme: Scheme, tensors: Iterable[Stored]) -> Iterator[Stored]:
    """Yield plain tensors, and each quantised module as one tensor NAME.weight.

    Raise `ModelFileError` for parts that do not fit together.
    """
    parts: dict[str, dict[str, Array]] = {}
    weights: dict[str, Stored] = {}
    homes: dict[str, Path] = {}
    for one in tensors:
        module, _, end = one.name.rpartition(".")
        if end in _UNUSED:
            continue
        if end in _ENDS[scheme.method]:
            parts.setdefault(module, {})[end] = one.array
            homes[module] = one.path
        elif end == "weight":
            weights[module] = one
        elif scheme.method != "gptq" or end != "bias" or one.array.any():  # some files have zero biases everywhere
            yield one
    for module, weight in weights.items():
        if module not in parts and weight.array.dtype != FLOAT8:
            yield weight
            continue
        found = parts.setdefault(module, {})
        if "weight" in found or "weight_packed" in found or "qweight" in found:
            raise ModelFileError(f"{weight.path}: the tensor {weight.name[:120]!r} is stored under two names")
        found["weight"] = weight.array
        homes[module] = weight.path
    for module, own in parts.items():
        for name, tensors_of in _apart(scheme, module, own):
            source = _Module(homes[module], module, tensors_of).source(scheme)
            yield Stored(homes[module], f"{name}.weight", row_numbers(source.shape), source)


def _apart(scheme: Scheme, module: str, parts: Mapping[str, Array]) -> Iterator[tuple[str, Mapping[str, Array]]]:
    """Yield a module, or each expert of those that mlx joins, by the name that its family gives it."""
    weight = parts.get("weight")
    if scheme.method != "mlx" or weight is None or weight.ndim != 3 or _JOINED not in module:
        yield module, parts
        return
    for expert in range(len(weight)):
        own = {end: one[expert] for end, one in parts.items() if one.ndim == 3 and expert < len(one)}
        yield module.replace(_JOINED, f".experts.{expert}."), own


@dataclass(frozen=True, slots=True)
class _Module:
    """The tensors of one module."""

    path: Path
    name: str
    parts: Mapping[str, Array]

    def source(self, scheme: Scheme) -> StoredMatrix:
        if scheme.method == "awq":
            return self._awq(scheme)
        if scheme.method == "gptq":
            return self._gptq(scheme)
        if scheme.method == "mlx":
            return self._mlx(*scheme.modules.get(self.name, scheme.modules[""]))
        if "weight_packed" in self.parts:
            packed = self._part("weight_packed", 2, np.dtype("<i4"), np.dtype(np.uint8))
            return self._four(packed) if packed.dtype == np.uint8 else self._packed()
        weight = self._part("weight", 2, FLOAT8, np.dtype(np.int8), np.dtype(np.uint8))
        if weight.dtype == np.uint8:
            return self._four(weight)
        return self._float8(weight, scheme) if weight.dtype == FLOAT8 else self._eight(weight)

    def _part(self, name: str, axes: int, *dtypes: np.dtype[Any]) -> Array:
        found = self.parts.get(name)
        if found is None:
            raise self._error(name, "present")
        if found.ndim != axes or (dtypes and found.dtype not in dtypes):
            raise self._error(name, f"of {axes} dimensions in {' or '.join(map(str, dtypes)) or 'numbers'}")
        return found

    def _error(self, name: str, wanted: str) -> ModelFileError:
        found = self.parts.get(name)
        actual = "nothing" if found is None else f"{found.dtype} of shape {list(found.shape)}"
        return ModelFileError(f"{self.path}: the tensor {self.name[:120]}.{name} must be {wanted}, found {actual}")

    def _bytes(self) -> int:
        return sum(one.nbytes for one in self.parts.values())

    def _scales(self, name: str, shape: tuple[int, int]) -> Array:
        """Return the scales of a matrix as [out, G]; all outputs may share one row."""
        scales = self.parts.get(name)
        if scales is None or scales.ndim > 2 or scales.dtype.kind in "iu":
            raise self._error(name, "numbers of one or two dimensions")
        scales = scales.reshape(1, 1) if scales.size == 1 else scales.reshape(len(scales), -1)
        scales = np.broadcast_to(scales, (shape[0], scales.shape[1])) if len(scales) == 1 else scales
        if len(scales) != shape[0] or shape[1] % scales.shape[1]:
            raise self._error(name, f"scales of a matrix {list(shape)}, in whole groups")
        return scales

    def _float8(self, weight: Array, scheme: Scheme) -> StoredMatrix:
        name = "weight_scale_inv" if "weight_scale_inv" in self.parts else "weight_scale"
        scales = self.parts.get(name)
        if scales is None or scales.ndim > 2:
            raise self._error(name, "numbers of two dimensions at most")
        scales = scales.reshape(1, 1) if scales.size == 1 else scales.reshape(len(scales), -1)
        if not Float8.fits(weight, scales, scheme.block):
            shape, (rows, columns) = list(weight.shape), scheme.block
            raise self._error(name, f"scales of a matrix {shape} in blocks of {rows} x {columns}, of outputs, or one")
        return Float8(weight, scales, scheme.block)

    def _four(self, packed: Array) -> StoredMatrix:
        """Read two fp4 numbers from each byte."""
        out, inner = len(packed), 2 * packed.shape[1]
        scales = self._part("weight_scale", 2, FLOAT8, FLOAT_E8, np.dtype(np.uint8))
        size = 16 if scales.dtype == FLOAT8 else 32
        if inner % size or scales.shape != (out, inner // size):
            raise self._error("weight_scale", f"a scale for each {size} of a matrix {[out, inner]}")
        divisor, factor = (self.parts.get(name) for name in ("weight_global_scale", "weight_scale_2"))
        for name, one in (("weight_global_scale", divisor), ("weight_scale_2", factor)):
            if one is not None and (one.size != 1 or one.dtype != np.float32):
                raise self._error(name, "one number in float32")
        whole = [np.float32(1) if one is None else one.reshape(-1)[0] for one in (factor, divisor)]
        return Float4(packed, scales, whole[0], whole[1], self._bytes())

    def _eight(self, weight: Array) -> StoredMatrix:
        """Read one int8 number from each byte."""
        out, inner = weight.shape
        scales = self._scales("weight_scale", (out, inner))
        stored, zeros = self.parts.get("weight_zero_point"), None
        if stored is not None and stored.any():
            offsets = self._zeros(stored.astype(np.int16), scales)
            zeros = lambda rows: offsets[rows]  # noqa: E731
        groups = self._groups("weight_g_idx", inner, scales.shape[1])
        return IntegerCodes("INT8", (out, inner), self._bytes(), 8, lambda rows: weight[rows], scales, zeros, groups)

    def _zeros(self, zeros: NDArray[np.int16], scales: Array) -> NDArray[np.int16]:
        zeros = zeros.reshape(1, 1) if zeros.size == 1 else zeros.reshape(len(zeros), -1)
        if zeros.shape[1] != scales.shape[1] or len(zeros) not in (1, len(scales)):
            raise self._error("weight_zero_point", f"of the shape of scales {list(scales.shape)}")
        return np.broadcast_to(zeros, scales.shape)

    def _packed(self) -> StoredMatrix:
        """Read numbers packed along the inputs in 32-bit words."""
        words = self._part("weight_packed", 2, np.dtype("<i4")).view(np.uint32)
        shape = self._part("weight_shape", 1)
        if shape.dtype.kind not in "iu" or shape.size != 2 or not words.shape[1]:
            raise self._error("weight_shape", "two whole numbers")
        out, inner = int(shape[0]), int(shape[1])
        bits: Literal[4, 8] = 4 if words.shape == (out, -(-inner // 8)) else 8
        if words.shape != (out, -(-inner * bits // 32)):
            raise self._error("weight_packed", f"a matrix {[out, inner]} in words of 4 or 8 bits a number")
        scales = self._scales("weight_scale", (out, inner))
        zeros, given = None, self.parts.get("weight_zero_point")
        if given is not None:
            if given.dtype == np.dtype("<i4"):  # packed along the outputs
                given = _unpacked(given.view(np.uint32).T, bits).T[:out]
            offsets = self._zeros(given.astype(np.int16), scales)
            zeros = lambda rows: offsets[rows]  # noqa: E731
        groups = self._groups("weight_g_idx", inner, scales.shape[1])

        def read(rows: Rows) -> NDArray[np.int8]:
            return _unpacked(words[rows], bits)[:, :inner]

        return IntegerCodes(f"INT{bits}", (out, inner), self._bytes(), bits, read, scales, zeros, groups)

    def _awq(self, scheme: Scheme) -> StoredMatrix:
        words = self._part("qweight", 2, np.dtype("<i4")).view(np.uint32)
        inner, out = words.shape[0], 8 * words.shape[1]
        scales = self._part("scales", 2).T
        if scales.shape[0] != out or inner % scales.shape[1]:
            raise self._error("scales", f"scales of {out} outputs in whole groups of {inner} inputs")
        zeros = None
        if not scheme.symmetric or "qzeros" in self.parts:
            stored = self._part("qzeros", 2, np.dtype("<i4")).view(np.uint32)
            if stored.shape != (scales.shape[1], words.shape[1]):
                raise self._error("qzeros", f"of the shape {[scales.shape[1], words.shape[1]]}")
            zeros = lambda rows: _of_awq(stored, rows).astype(np.int16)  # noqa: E731
        return IntegerCodes("AWQ", (out, inner), self._bytes(), 4, lambda rows: _of_awq(words, rows), scales, zeros)

    def _gptq(self, scheme: Scheme) -> StoredMatrix:
        words = self._part("qweight", 2, np.dtype("<i4")).view(np.uint32)
        scales = self._part("scales", 2).T
        index = self.parts.get("g_idx")
        bits: Literal[4, 8] = 8 if (32 * len(words) == 8 * index.size if index is not None else scheme.bits == 8) else 4
        inner, out = len(words) * 32 // bits, words.shape[1]
        if scales.shape[0] != out or inner % scales.shape[1]:
            raise self._error("scales", f"scales of {out} outputs in whole groups of {inner} inputs")
        stored = self._part("qzeros", 2, np.dtype("<i4")).view(np.uint32)
        if stored.shape != (scales.shape[1], -(-out * bits // 32)):
            raise self._error("qzeros", f"of the shape {[scales.shape[1], -(-out * bits // 32)]}")

        def zeros(rows: Rows) -> NDArray[np.int16]:
            return _unpacked(stored, bits).T[rows].astype(np.int16) + np.int16(scheme.zero_shift)

        def read(rows: Rows) -> NDArray[np.int8]:
            return _unpacked(words[:, rows].T, bits)

        middle = scheme.symmetric and not zeros(np.arange(out)).any()
        groups = self._groups("g_idx", inner, scales.shape[1])
        given = None if middle else zeros
        return IntegerCodes("GPTQ", (out, inner), self._bytes(), bits, read, scales, given, groups)

    def _mlx(self, bits: int, group: int) -> StoredMatrix:
        words = self._part("weight", 2, np.dtype("<u4"))
        shape = len(words), words.shape[1] * 32 // bits
        for name in ("scales", "biases"):
            numbers = self._part(name, 2)
            if numbers.dtype.kind in "iu" or numbers.shape != (shape[0], shape[1] / group):
                raise self._error(name, f"numbers of a matrix {list(shape)} of {bits} bits in groups of {group}")
        return AffineCodes(words, self.parts["scales"], self.parts["biases"], 4 if bits == 4 else 8, self._bytes())

    def _groups(self, name: str, inner: int, count: int) -> NDArray[np.intp] | None:
        """Return each input's group; None if groups are neighbouring inputs."""
        index = self.parts.get(name)
        if index is None or (index.shape == (inner,) and (index == _NO_GROUP).all()):
            return None
        if index.shape != (inner,) or index.dtype.kind not in "iu" or not 0 <= index.min() <= index.max() < count:
            raise self._error(name, f"a group below {count} for each of {inner} inputs")
        plain = np.arange(inner) // (inner // count)
        return None if (index == plain).all() else index.astype(np.intp)


_NO_GROUP = -1
"""Group index in compressed-tensors for inputs in group order."""


def _unpacked(words: NDArray[np.uint32], bits: Literal[4, 8]) -> NDArray[np.int8]:
    """Return the numbers of words [n, w] as [n, w * 32 / bits], centred."""
    found = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return (found ^ np.uint8(0x80)).view(np.int8)
    halves = np.stack([found & 15, found >> 4], axis=-1).reshape(len(words), -1)
    return halves.view(np.int8) - np.int8(8)


def _of_awq(words: NDArray[np.uint32], rows: Rows) -> NDArray[np.int8]:
    """Return some outputs of AWQ words [n, out / 8] as [rows, n], centred."""
    found = words[:, rows // 8] >> (4 * _AWQ[rows % 8]) & np.uint32(15)
    return np.ascontiguousarray(found.T.astype(np.int8)) - np.int8(8)
