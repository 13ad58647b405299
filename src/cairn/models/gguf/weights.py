"""The tensors of a GGUF file under transformers' names, each built when it is asked for.

Plain numbers (F32, F16, BF16) are views of the mapped file. Packed formats are returned as codes (`packed`), or as
float32, which holds their values exactly but takes 4 bytes a number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cairn.kernels.base import Packed
from cairn.models.families.moe_spec import CORRECTION
from cairn.models.families.mtp_spec import one_layer_gguf_name
from cairn.models.families.tensor_names import XIELU, unpermute
from cairn.models.families.uneven_spec import INPUTS, INPUTS_NORM, INPUTS_PROJECTION, MERGES, STREAMS
from cairn.models.gguf.architectures import PER_LAYER, Architecture, layers
from cairn.models.gguf.encoder import DENSE, JUDGE, encoder_name
from cairn.models.gguf.reader import Gguf, Tensor
from cairn.models.gguf.recurrent import WHOLE, Change, Part, parts
from cairn.models.gguf.spec import FACTORS, LONG, SHORT, architecture
from cairn.models.gguf.uneven import NAMES as UNEVEN_NAMES
from cairn.models.gguf.uneven import WHOLE as UNEVEN_WHOLE
from cairn.models.gguf.vocabulary import is_encoder
from cairn.models.quantization.dequant import BlockFormat, dequantize
from cairn.models.quantization.quantize import unpack
from cairn.models.quantization.tensor_meta import TensorMeta, codes, row_blocks
from cairn.models.quantization.tensor_meta import blocks as super_blocks
from cairn.types.errors import ModelError, ModelFileError
from cairn.types.model_spec import ModelSpec

_WHOLE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "token_embd_norm": "model.norm",
    "output": "lm_head",
    PER_LAYER.removesuffix(".weight"): INPUTS.removesuffix(".weight"),
    "per_layer_model_proj": INPUTS_PROJECTION.removesuffix(".weight"),
    "per_layer_proj_norm": INPUTS_NORM.removesuffix(".weight"),
    "altup_proj": f"{STREAMS}.{{}}",
    "altup_unembd_proj": f"{MERGES}.{{}}",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
"""Layer tensors; {} stands for the number of an expert, all of which are in one tensor."""
_FUSED = {"ffn_gate_up_exps": ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj")}
"""Layer tensors that hold the rows of several of ours."""
_WHOLE_OF_LAYER = WHOLE | UNEVEN_WHOLE
"""Layer tensors whose suffix differs too."""
_UNREAD = re.compile(r"self_attn\.(k_proj|v_proj|k_norm)\.weight")
"""Tensors that some files have for layers that share an earlier layer's KV; they are ignored."""
_XIELU = {"beta": 0.5, "eps": -1e-6}
"""Constants of the xIELU activation that the kernels assume."""
_WITHOUT_END = {"attn_sinks": "self_attn.sinks", "exp_probs_b": CORRECTION}
"""Tensors whose names here have no `.weight`."""
_BEHIND = {JUDGE: "judge.weight"} | {f"{name}.weight": f"{name}.weight" for name in DENSE}
"""Matrices applied after pooling."""
_NAME = re.compile(r"(?:blk\.(\d{1,5})\.)?([\w.]+?)(?:\.(weight|bias))?")
_HARMLESS = re.compile("|".join((*map(re.escape, (FACTORS, SHORT, LONG)), r"blk\.\d+\.attn_rot_embd\.weight")))
"""Rotary constants; the spec holds those that matter."""
_LAYER_OF = re.compile(r"blk\.(\d{1,5})\.")
_TURNED = re.compile(r".*\.self_attn\.[qk]_(proj\.(weight|bias)|norm\.weight)")


def hub_name(name: str, others: Mapping[str, str] | None = None) -> str | None:
    """Return transformers' name of a tensor, with {} for an expert's number; None if no decoder here has it.

    `others`: names that differ from plain decoders'.
    """
    if name in _BEHIND:
        return _BEHIND[name]
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    layer, part, end = match.groups()
    if layer is None:
        return f"{_WHOLE[part]}.{end}" if part in _WHOLE and end else None
    if (whole := f"{part}.{end}" if end else part) in _WHOLE_OF_LAYER:
        return f"model.layers.{int(layer)}.{_WHOLE_OF_LAYER[whole]}"
    if not end:
        return None
    names = {**_LAYER, **UNEVEN_NAMES, **(others or {})}
    if part in _WITHOUT_END:
        return f"model.layers.{int(layer)}.{_WITHOUT_END[part]}"
    return f"model.layers.{int(layer)}.{names[part]}.{end}" if part in names else None


def hub_names(name: str, own: Architecture) -> tuple[str, ...]:
    """Return the names of all our tensors that a stored tensor holds, as in `hub_name`."""
    match = _NAME.fullmatch(name)
    fused = {**_FUSED, **own.fused}
    if match is not None and match[1] is not None and match[3] and match[2] in fused:
        return tuple(f"model.layers.{int(match[1])}.{one}.{match[3]}" for one in fused[match[2]])
    found = hub_name(name, own.names)
    return () if found is None else (found,)


def is_turned(name: str) -> bool:
    """Return whether a tensor of ours has rows of rotary heads."""
    return _TURNED.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class _Part:
    """A tensor of ours: a whole stored tensor, or some of its rows."""

    tensor: Tensor
    shape: tuple[int, ...]
    start: int = 0
    """Index of its first number in the stored tensor."""
    change: Change | None = None
    """Converts an array of the stored shape into ours."""

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def kind(self) -> BlockFormat:
        return self.tensor.kind

    def blocks(self, gguf: Gguf) -> NDArray[np.uint8]:
        if self.change is not None:
            return gguf.blocks(self.name)
        first, count = self.start // self.kind.values, math.prod(self.shape) // self.kind.values
        return gguf.blocks(self.name)[first : first + count]


class GgufWeights(Mapping[str, NDArray[Any]]):
    """`weights.open_weights` for GGUF. Arrays are not cached: ask for each once."""

    def __init__(self, gguf: Gguf, expected: Mapping[str, tuple[int, ...]], spec: ModelSpec) -> None:
        """Map the file's tensors to the `expected` names.

        Raise `ModelFileError` if one is missing, unknown or misshapen.
        """
        self._gguf, self._spec, self._head_dim, self._turned_part = gguf, spec, spec.head_dim, spec.turned
        own = None if is_encoder(gguf) else architecture(gguf)
        self._interleaved = own is not None and own.interleaved
        behind = layers(gguf.own_fields, own) if own is not None and own.ahead else 0
        normed = f"blk.{spec.ahead}.nextn.shared_head_norm.weight" in gguf.tensors
        self._found: dict[str, _Part] = {}
        for tensor in gguf.tensors.values():
            names: tuple[str, ...]
            if own is None:
                one = encoder_name(gguf.metadata["general.architecture"], tensor.name)
                names = () if one is None else (one,)
            elif spec.ahead:
                name, ours = one_layer_gguf_name(tensor.name, spec.ahead, normed=normed)
                if not name:
                    continue
                names = (name,) if ours else hub_names(name, own)
            else:
                names = hub_names(tensor.name, own)
            changed = list(parts(names[0], spec.recurrence, spec.hidden)) if names and spec.recurrence else []
            if changed:
                for part in changed:
                    self._change(part, tensor, expected)
            elif names and all(name.format(0) in expected for name in names):
                self._put(names, tensor, expected)
            elif not (
                _HARMLESS.fullmatch(tensor.name)
                or (behind and _set_aside(tensor.name, behind))
                or (names and _unread(spec, names[0]))
            ):
                family = gguf.metadata["general.architecture"]
                raise ModelFileError(f"{tensor.path}: the tensor {tensor.name[:120]!r} is not part of a {family}")
        self._constants = {} if own is None else _constants(gguf, own, spec)
        missing = next((name for name in expected if name not in self._found and name not in self._constants), None)
        if missing is not None:
            raise ModelFileError(
                f"{gguf.paths[0]}: the tensor for {missing} of shape {list(expected[missing])} is missing"
            )

    def _put(self, names: Sequence[str], tensor: Tensor, expected: Mapping[str, tuple[int, ...]]) -> None:
        every, shape = list(names), expected[names[0].format(0)]
        if "{}" in names[0] and len(names) > 1:
            count = len(_numbered(names[0], expected))
            every = [name.format(number) for number in range(count) for name in names]
            shape = (count, sum(expected[name.format(0)][0] for name in names), *shape[1:])
        elif "{}" in names[0]:
            every = _numbered(names[0], expected)
            shape = (len(every), *shape)
        elif len(names) > 1:
            shape = (sum(expected[name][0] for name in names), *shape[1:])
        self._fits(tensor, shape)
        start = 0
        for own in every:
            if own in self._found:
                raise ModelFileError(
                    f"{tensor.path}: the tensors {self._found[own].name} and {tensor.name} both hold {own}"
                )
            self._found[own] = _Part(tensor, expected[own], start)
            start += math.prod(expected[own])

    @staticmethod
    def _fits(tensor: Tensor, shape: tuple[int, ...]) -> None:
        of_heads = tensor.name.endswith("_norm.weight") and shape == (math.prod(tensor.shape),)
        if tensor.shape != shape and (1, *tensor.shape) != shape and not of_heads:
            raise ModelFileError(
                f"{tensor.path}: the tensor {tensor.name} has the shape {list(tensor.shape)}, "
                f"expected {list(shape)} from the metadata"
            )

    def _change(self, part: Part, tensor: Tensor, expected: Mapping[str, tuple[int, ...]]) -> None:
        self._fits(tensor, part.stored)
        self._found[part.name] = _Part(tensor, expected[part.name], change=part.change)

    def __getitem__(self, name: str) -> NDArray[Any]:
        if name in self._constants:
            return self._constants[name]
        tensor = self._found[name]
        blocks = tensor.blocks(self._gguf)
        kind = tensor.kind
        flat = blocks.view(kind.dtype) if kind.dtype is not None else dequantize(kind, blocks)
        array = (
            flat.reshape(tensor.shape) if tensor.change is None else tensor.change(flat.reshape(tensor.tensor.shape))
        )
        if self._turned(name):
            array = unpermute(array, self._head_dim, self._turned_part)
        array.flags.writeable = False
        return array

    def outline(self, name: str) -> TensorMeta:
        """Return the meta of `[name]`, with the bytes of memory that building it takes."""
        if name in self._constants:
            return TensorMeta(self._constants[name].shape, "float32", 0)
        tensor = self._found[name]
        dtype = tensor.kind.dtype if tensor.kind.dtype is not None else np.dtype(np.float32)
        size = math.prod(tensor.shape) * dtype.itemsize
        made = (tensor.kind.dtype is None) + self._turned(name) + (tensor.change is not None)
        return TensorMeta(tensor.shape, str(dtype), size * made)

    def packed_outline(self, name: str) -> TensorMeta | None:
        """Return the meta of `packed(name)`; None for vectors and for plain numbers."""
        if name in self._constants:
            return None
        tensor = self._found[name]
        kind = tensor.kind
        if kind.dtype is not None or len(tensor.shape) != 2 or tensor.change is not None:
            return None
        if kind.rows:
            found = row_blocks(tensor.shape, kind.rows)
        elif kind.blocks:
            found = super_blocks(tensor.shape, 4 if kind.bits == 8 else kind.bits, kind.table)
        else:
            found = codes(tensor.shape, kind.bits, *kind.scaled, table=kind.table)
        return replace(found, made=2 * found.made) if self._turned(name) else found

    def packed(self, name: str) -> tuple[Packed, float]:
        """Return a tensor with a `packed_outline` as codes, and its relative error, which is 0 for most formats."""
        tensor = self._found[name]
        held, error = unpack(tensor.kind, tensor.blocks(self._gguf), (tensor.shape[0], tensor.shape[1]))
        if self._turned(name):
            held = held.rows(lambda rows: unpermute(rows, self._head_dim, self._turned_part))
        return held, error

    def kind(self, name: str) -> tuple[str, bool]:
        """Return a tensor's number format in the file, and whether `packed` has to round it."""
        if name in self._constants:
            return "F32", False
        kind = self._found[name].kind
        return kind.name, kind.dtype is None and not kind.exact

    def _turned(self, name: str) -> bool:
        """Return whether q or k rows have to be reordered from interleaved rotary pairs."""
        return self._interleaved and is_turned(name)

    def __contains__(self, name: object) -> bool:
        return name in self._found or name in self._constants  # Mapping's default would build the tensor

    def __iter__(self) -> Iterator[str]:
        return iter([*self._found, *self._constants])

    def __len__(self) -> int:
        return len(self._found) + len(self._constants)


def _numbered(name: str, expected: Container[str]) -> list[str]:
    """Return the expected names that have 0, 1 and so on in the place of `{}`."""
    return list(takewhile(expected.__contains__, map(name.format, count())))


def _constants(gguf: Gguf, own: Architecture, spec: ModelSpec) -> dict[str, NDArray[Any]]:
    """Return per-layer constants of the metadata that are tensors here: the two parameters of xIELU."""
    found: dict[str, NDArray[Any]] = {}
    if not own.constants:
        return found
    for name in (*own.constants, *_XIELU):
        listed = np.asarray(gguf.metadata.get(f"xielu.{name}", np.nan), np.float32)
        numbers = np.full(spec.layers, listed) if listed.ndim == 0 else listed
        if numbers.shape != (spec.layers,) or not np.isfinite(numbers).all():
            raise gguf.fields.error(f"xielu.{name}", f"a number, or a list of {spec.layers}")
        if name in _XIELU:
            if not np.allclose(numbers, _XIELU[name], rtol=1e-2, atol=0):
                raise ModelError(f"{gguf.paths[0]}: xielu.{name} other than {_XIELU[name]} is not supported")
            continue
        for layer in range(spec.layers):
            found[f"model.layers.{layer}.{XIELU}.{name}"] = numbers[layer : layer + 1]
    return found


def _unread(spec: ModelSpec, name: str) -> bool:
    """Return whether a tensor is a k or v tensor of a layer that shares an earlier layer's KV."""
    match = re.fullmatch(r"model\.layers\.(\d{1,5})\.(.+)", name)
    if match is None or spec.uneven is None or int(match[1]) >= spec.layers:
        return False
    return spec.kv_layer(int(match[1])) != int(match[1]) and _UNREAD.fullmatch(match[2]) is not None


def _set_aside(name: str, layers: int) -> bool:
    """Return whether a tensor belongs to a multi-token-prediction layer."""
    match = _LAYER_OF.match(name)
    return match is not None and int(match[1]) >= layers


def gguf_name(name: str) -> str:
    """Return GGUF's name of a tensor that transformers calls `name`; the inverse of `hub_name` for plain decoders."""
    stem, _, end = name.rpartition(".")
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
    if match is None:
        return f"{next(own for own, theirs in _WHOLE.items() if theirs == stem)}.{end}"
    return f"blk.{match[1]}.{next(own for own, theirs in _LAYER.items() if theirs == match[2])}.{end}"
