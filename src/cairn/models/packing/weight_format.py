"""The form that a model's weights are held in (`--weights`): as stored, in 32 or 16 bits, or rounded to 8 or 4.

    auto     `stored`; `f32` for a model that is `weights.small`
    stored   floats as they are, packed tensors of a GGUF file as codes: see `quantize.unpack`
    f32      every number in float32
    bf16     every matrix in bfloat16
    int8     every matrix in codes of 8 bits; packed ones with at most 8 stay as they are
    int4     every matrix in codes of 4 bits, the embedding and the output in 8, as `cairn quantize` writes them

A matrix whose rows are no multiple of 32 is not rounded to codes. Vectors are never rounded, nor are routers of experts
and the decay of recurrent states, which are float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Protocol, runtime_checkable

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cairn.kernels.base import GROUP, Packed
from cairn.models.families.moe_spec import is_router
from cairn.models.families.recurrent_spec import is_step
from cairn.models.families.uneven_spec import INPUTS
from cairn.models.hub.digests import tell
from cairn.models.quantization import tensor_meta as known
from cairn.models.quantization.dequant import SLICE
from cairn.models.quantization.quantize import rounded
from cairn.models.quantization.tensor_meta import TensorMeta
from cairn.models.safetensors.weights import small
from cairn.types.model_spec import ModelSpec

Form = Literal["stored", "f32", "bf16", "int8", "int4"]

_LOSS = {
    "bf16": "bfloat16 with an error below 0.2 %",
    "int4": "4 bits with an error of about 8 %",
    "int8": "8 bits with an error below 1 %",
}
_KINDS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_ENDS = ("model.embed_tokens.weight", "lm_head.weight")


def form_of(spec: ModelSpec, wanted: str) -> Form:
    """Return the form that the option `weights` means for a model."""
    if wanted == "auto":
        return "f32" if small(spec) else "stored"
    forms: dict[str, Form] = {"stored": "stored", "f32": "f32", "bf16": "bf16", "int8": "int8", "int4": "int4"}
    return forms[wanted]


@runtime_checkable
class _Packed(Protocol):
    """Weights of which some are stored as codes."""

    def packed_outline(self, name: str) -> TensorMeta | None:
        """Return the meta of `packed(name)`; None for a tensor not stored as codes."""
        ...

    def packed(self, name: str) -> tuple[Packed, float]:
        """Return a tensor as codes, and its relative error."""
        ...

    def kind(self, name: str) -> tuple[str, bool]:
        """Return a tensor's number format in the file, and whether `packed` has to round it."""
        ...


class HeldWeights(Mapping[str, Any]):
    """The weights of `open_weights` converted to a form. Tensors are not cached: ask for each once."""

    def __init__(self, source: Mapping[str, NDArray[Any]], form: Form) -> None:
        self.source, self.form = source, form
        """Tensors as the files have them, and the form they are held in."""
        self._codes = source if isinstance(source, _Packed) else None  # once: isinstance of a protocol is slow
        self.errors: dict[str, float] = {}
        """Relative error of each tensor that was rounded so far."""
        self._made = 0

    def __getitem__(self, name: str) -> NDArray[Any] | Packed:
        tell("packing the weights", self._made, len(self.source))
        self._made += 1
        if _is_exact(name):
            return self.source[name].astype(np.float32)
        if self._stays(name):
            return self._as_stored(name)
        array = self.source[name]
        if self.form == "f32":
            return array.astype(np.float32, copy=False)
        if self.form == "bf16":
            return self._bf16(name, array)
        shape = (array.shape[0], array.shape[1])
        held, self.errors[name] = rounded(lambda begin, end: array[begin:end], shape, self._bits(name))
        return held

    def outline(self, name: str) -> TensorMeta:
        """Return the meta of `[name]`, with the bytes that building it takes."""
        plain = known.outline(self.source, name)
        if _is_exact(name):
            return TensorMeta(plain.shape, "float32", plain.made + 4 * math.prod(plain.shape))
        if self._stays(name):
            return self._packed(name) or plain
        if self.form in ("f32", "bf16"):
            dtype, width = ("float32", 4) if self.form == "f32" else ("bfloat16", 2)
            made = plain.made + (0 if plain.dtype == dtype else width * math.prod(plain.shape))
            return TensorMeta(plain.shape, dtype, made)
        return known.codes(plain.shape, self._bits(name), "float16", passing=plain.made)

    def note(self) -> str:
        """Return how the weights are held and which formats are rounded, as a phrase; reads no tensor."""
        found: dict[str, set[str]] = {}
        for name in self.source:
            kind, target = self._rounds(name)
            if target:
                found.setdefault(target, set()).add(kind)
        notes = [f"{' and '.join(sorted(kinds))} rounded to {_LOSS[one]}" for one, kinds in sorted(found.items())]
        return ", ".join([self.form, *notes])

    def formats(self) -> tuple[str, ...]:
        """Return the number formats in the file; reads no tensor."""
        return tuple(sorted({self._rounds(name)[0] for name in self.source}))

    def _rounds(self, name: str) -> tuple[str, str]:
        """Return a tensor's number format in the file, and what it is rounded to; "" if it is exact."""
        plain = known.outline(self.source, name)
        kind, inexact = _KINDS.get(plain.dtype, plain.dtype), False
        if self._codes is not None:
            kind, inexact = self._codes.kind(name)
        if _is_exact(name) or name == INPUTS:  # INPUTS is read from the file by rows
            return kind, ""
        if self._stays(name):
            return kind, "int8" if inexact and len(plain.shape) == 2 else ""
        if self.form in ("f32", "bf16"):
            return kind, "bf16" if self.form == "bf16" and plain.dtype != "bfloat16" else ""
        return kind, f"int{self._bits(name)}"

    def __contains__(self, name: object) -> bool:
        return name in self.source  # Mapping's default would build the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.source)

    def __len__(self) -> int:
        return len(self.source)

    def _stays(self, name: str) -> bool:
        """Return whether a tensor is held as it is stored."""
        shape = known.outline(self.source, name).shape
        if self.form == "stored" or (len(shape) == 1 and self.form != "f32"):
            return True
        if self.form in ("f32", "bf16"):
            return False
        packed = self._packed(name)
        return bool(shape[1] % GROUP) or (packed is not None and packed.bits <= self._bits(name))

    def _bits(self, name: str) -> Literal[4, 8]:
        return 4 if self.form == "int4" and name not in _ENDS else 8

    def _packed(self, name: str) -> TensorMeta | None:
        return None if self._codes is None else self._codes.packed_outline(name)

    def _as_stored(self, name: str) -> NDArray[Any] | Packed:
        if self._codes is None or self._codes.packed_outline(name) is None:
            return self.source[name]
        held, error = self._codes.packed(name)
        if error:
            self.errors[name] = error
        return held

    def _bf16(self, name: str, array: NDArray[Any]) -> NDArray[Any]:
        if array.dtype == ml_dtypes.bfloat16:
            return array
        held = np.empty(array.shape, ml_dtypes.bfloat16)
        wrong = total = 0.0
        # In slices: the mapped arrays may be larger than memory.
        step = max(1, SLICE // array.shape[1])
        with np.errstate(all="ignore"):
            for at in range(0, len(array), step):
                rows, into = array[at : at + step].astype(np.float32), held[at : at + step]
                into[:] = rows
                finite = np.isfinite(rows) & np.isfinite(into)
                wrong += float(np.square(rows - into.astype(np.float32), dtype=np.float64)[finite].sum())
                total += float(np.square(rows, dtype=np.float64)[finite].sum())
        if wrong:
            self.errors[name] = math.sqrt(wrong / total)
        return held


def _is_exact(name: str) -> bool:
    """Return whether a tensor is never rounded."""
    return is_router(name) or is_step(name)


def error_line(errors: Mapping[str, float], tensors: int) -> str | None:
    """Return a sentence with mean and largest relative error of the tensors; None if nothing was rounded."""
    if not errors:
        return None
    worst = max(errors, key=errors.__getitem__)
    return (
        f"{len(errors)} of {tensors} tensors were rounded: relative error {sum(errors.values()) / len(errors):.2%} in "
        f"the mean, {errors[worst]:.2%} at most ({worst})"
    )
