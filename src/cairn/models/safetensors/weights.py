"""Safetensors files -> mapped arrays, checked whole before anything is built; GGUF files are read by `gguf.weights`.

The format (https://github.com/huggingface/safetensors, "Format"): 8 bytes little-endian length of the header, the
header as a JSON object of `{name: {dtype, shape, data_offsets}}`, then the data without holes. Arrays are views of the
mapped file: opening a model copies nothing. Pickle files (.bin, .pt) are never opened.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from cairn.models.families.encoder_spec import encoder_tensors
from cairn.models.families.encoder_spec import own_name as encoder_name
from cairn.models.families.families import AHEAD, FAMILIES
from cairn.models.families.family import Family
from cairn.models.families.latent_spec import latent_tensors
from cairn.models.families.moe_spec import mixture_tensors
from cairn.models.families.mtp_spec import ahead_tensors, one_layer_name
from cairn.models.families.recurrent_spec import MIXER, recurrent_tensors
from cairn.models.families.tensor_names import XIELU, own_tensors
from cairn.models.families.uneven_spec import uneven_layer, uneven_tensors
from cairn.models.files import (
    INDEX,
    MAX_NAME_BYTES,
    WEIGHTS,
    Fields,
    is_gguf,
    opened,
    parse_object,
    read_json,
    reading,
    shards,
)
from cairn.models.gguf.reader import read_gguf
from cairn.models.gguf.weights import GgufWeights
from cairn.models.quantization.quantized_config import Scheme, scheme_of
from cairn.models.safetensors.coded_weights import Coded, CodedWeights
from cairn.models.safetensors.head_norms import head_norm, join_heads
from cairn.models.safetensors.quantized_files import ENDS, Stored, modules
from cairn.models.safetensors.stored_codes import PARTS, SelectedRows, StoredMatrix, join_mxfp4, selected_rows
from cairn.types.errors import ModelFileError
from cairn.types.model_spec import ModelSpec

DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}

_WHOLE: dict[str, np.dtype[Any]] = {
    **{
        "I64": np.dtype("<i8"),
        "I32": np.dtype("<i4"),
        "U32": np.dtype("<u4"),
        "I8": np.dtype("i1"),
        "U8": np.dtype("u1"),
        "BOOL": np.dtype("?"),
    },
    **{"F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn), "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu)},
}
"""Types of position and mask buffers in old checkpoints, and of the parts of quantised modules. Plain weights never
have them."""

MAX_HEADER_BYTES = 100_000_000
"""The format's own bound."""
MAX_TENSORS = 1 << 16
"""Most tensors of one file; the largest models have some thousands."""
MAX_BRACES = 1 << 17
"""Most braces in a header, one for each tensor; the rest is for quoted text in __metadata__."""

_HARMLESS = re.compile(r"(.*\.)?rotary_emb\.inv_freq|.*\.(self_attn|attention)\.(bias|masked_bias)")
"""Buffers of old checkpoints that follow from the config."""

_PART = re.compile(r"(?:model\.language_model\.|language_model\.model\.|language_model\.(?=lm_head\.))(.*)")
_OTHER_PARTS = re.compile(
    r"(model\.)?(vision_tower|vision_model|visual|audio_tower|multi_modal_projector|embed_vision|embed_audio)\."
)
"""Vision and audio parts of multimodal models: only text is served."""
_AHEAD = re.compile(r"mtp\..*")
"""Multi-token-prediction tensors stored outside the layers."""

_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


Shapes = Mapping[str, tuple[int, ...]]
"""Names of tensors, and their shapes."""


def expected_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor of a model with this spec; matrices are [out, in].

    Names are transformers' for decoders, ours for encoders.
    """
    if spec.encoder is not None:
        return encoder_tensors(spec)
    shapes = _outside(spec)
    for layer, parts in enumerate(_layer_parts(spec)):
        prefix = f"model.layers.{layer}."
        shapes |= {prefix + name: shape for part in parts for name, shape in part.items()}
    return shapes


def _outside(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return name and shape of a decoder's tensors outside its layers."""
    if spec.ahead:
        return ahead_tensors(spec)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (spec.vocab, spec.hidden),
        "model.norm.weight": (spec.hidden,),
    }
    shapes |= {f"{one.place}.weight": (one.outputs, one.inputs) for one in spec.embedding.dense if one.inside}
    if spec.judge is not None and spec.judge.apart:
        shapes["judge.weight"] = (2, spec.hidden)
    if not spec.tied:
        shapes["lm_head.weight"] = (spec.vocab, spec.hidden)
    if spec.head_bias:
        shapes["lm_head.bias"] = (spec.vocab,)
    if spec.norm_bias:
        shapes["model.norm.bias"] = (spec.hidden,)
    return shapes if spec.uneven is None else shapes | uneven_tensors(spec, spec.uneven)


def _layer_parts(spec: ModelSpec) -> Iterator[list[Shapes]]:
    """Yield the parts of each layer; names are below the layer. Large parts that layers share are one object."""
    mixture = {} if spec.experts is None else mixture_tensors(spec, spec.experts)
    if spec.uneven is not None:
        for layer in range(spec.layers):
            yield [uneven_layer(spec, spec.uneven, layer), mixture]
        return
    query, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    attention = {
        "self_attn.q_proj": (2 * query if spec.output_gate else query, spec.hidden, spec.qkv_bias),
        "self_attn.k_proj": (kv, spec.hidden, spec.qkv_bias),
        "self_attn.v_proj": (kv, spec.hidden, spec.qkv_bias),
        "self_attn.o_proj": (spec.hidden, query, spec.out_bias),
    }
    mlp = {
        **({"mlp.gate_proj": (spec.ffn, spec.hidden, spec.mlp_bias)} if spec.mlp_gated else {}),
        "mlp.up_proj": (spec.ffn, spec.hidden, spec.mlp_bias),
        "mlp.down_proj": (spec.hidden, spec.ffn, spec.mlp_bias),
    }
    latent = {} if spec.latent is None else latent_tensors(spec, spec.latent)
    norms = _norms(spec)
    heads = {name: size for name, size in norms.items() if name.startswith("self_attn.")}
    recurrent = {} if spec.recurrence is None else recurrent_tensors(spec, spec.recurrence)
    for layer in range(spec.layers):
        attends, has_mlp = spec.attends(layer), spec.has_mlp(layer)
        sparse = spec.experts is not None and layer in spec.experts.layers
        plain = (attention if attends and not latent else {}) | (mlp if has_mlp and not sparse else {})
        own: list[tuple[Shapes, bool]] = [
            *((latent, attends), (mixture, sparse), (recurrent, spec.keeps_state(layer))),
            ({"self_attn.sinks": (spec.heads,)}, spec.sinks and attends),
            ({f"{XIELU}.alpha_p": (1,), f"{XIELU}.alpha_n": (1,)}, spec.activation == "xielu"),
            (_with_biases(plain), True),
            ({name: (size,) for name, size in norms.items() if attends or name not in heads}, True),
        ]
        yield [part for part, there in own if there]


def _with_biases(matrices: Mapping[str, tuple[int, int, bool]]) -> dict[str, tuple[int, ...]]:
    """Return the tensors of matrices given as (out, in, whether there is a bias)."""
    found: dict[str, tuple[int, ...]] = {}
    for name, (rows, columns, bias) in matrices.items():
        found[f"{name}.weight"] = (rows, columns)
        if bias:
            found[f"{name}.bias"] = (rows,)
    return found


def _norms(spec: ModelSpec) -> dict[str, int]:
    """Return name and size of the weights and biases of a layer's norms."""
    # A layer that is only a mixer or only an MLP has one norm.
    named = ["post_attention_layernorm"] if spec.mlp_layers is None and spec.parallel != "one norm" else []
    if spec.pre_norms:
        named.append("input_layernorm")
    if spec.post_norms:
        named.append("post_feedforward_layernorm")
    if spec.pre_norms and spec.post_norms:
        named.append("pre_feedforward_layernorm")
    heads = _head_norms(spec) if spec.qk_norm else {}
    norms = dict.fromkeys(named, spec.hidden) | heads
    biased = named if spec.qk_norm_apart else [*named, *heads]
    found = {f"{name}.weight": size for name, size in norms.items()}
    return found | {f"{name}.bias": norms[name] for name in biased if spec.norm_bias}


def _head_norms(spec: ModelSpec) -> dict[str, int]:
    """Return name and size of a layer's norms of queries and keys."""
    whole = spec.qk_norm_whole or spec.qk_norm_apart
    heads = {"self_attn.q_norm": spec.heads, "self_attn.k_norm": spec.kv_heads}
    return {name: spec.head_dim * (count if whole else 1) for name, count in heads.items()}


def parameters(spec: ModelSpec) -> int:
    """Return the number of parameters of a model with this spec, from its shapes alone.

    Parts that layers share are counted once and multiplied: a mixture may have thousands of tensors.
    """
    if spec.encoder is not None:
        return _numbers(encoder_tensors(spec))
    parts = [part for layer in _layer_parts(spec) for part in layer]
    uses, known = Counter(map(id, parts)), {id(part): part for part in parts}
    return _numbers(_outside(spec)) + sum(count * _numbers(known[key]) for key, count in uses.items())


def _numbers(shapes: Shapes) -> int:
    """Return how many numbers tensors have together."""
    return sum(map(math.prod, shapes.values()))


SMALL = 1 << 25
"""Parameters; 64 MiB in 16 bits."""


def small(spec: ModelSpec) -> bool:
    """Return whether a model is so small that rounding its weights or KV saves nothing.

    Weights and KV of such a model are float32 unless an option says otherwise, so its answers follow the precision it
    was trained in.
    """
    return parameters(spec) < SMALL


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files of a folder or a GGUF file, in a fixed order; empty if there are none.

    Raise `ModelFileError` for an index that is broken or names a missing file.
    """
    if is_gguf(folder):
        return list(shards(folder))
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        return sorted({folder / name for name in _weight_map(folder).values()})
    return []


def open_weights(folder: Path, spec: ModelSpec) -> Mapping[str, NDArray[Any]]:
    """Return every tensor of the model as a read-only array: float32, float16 or bfloat16, mapped from its file.

    A GGUF's packed tensors are unpacked to float32 each time they are asked for: ask once. Names and shapes are those
    of `expected_tensors`. Raise `ModelFileError` for a missing, unknown or misshapen tensor, a truncated file or a
    folder without safetensors, before anything is returned.
    """
    if is_gguf(folder):
        return GgufWeights(read_gguf(folder), expected_tensors(spec), spec)
    files = weight_files(folder)
    if not files:
        raise _no_weights(folder)
    homes = _weight_map(folder) if files != [folder / WEIGHTS] else None
    expected = expected_tensors(spec)
    family = None if spec.encoder is not None else FAMILIES[spec.architecture]
    found: dict[str, NDArray[Any]] = {}
    halves: dict[str, NDArray[Any]] = {}
    of_heads: dict[str, dict[int, NDArray[Any]]] = {}
    coded: dict[str, Coded] = {}
    scheme = stored_scheme(folder, spec)
    stored = _stored(files, homes)
    for one in stored if scheme is None else modules(scheme, stored):
        path = one.path
        for name, part in _parts(path, spec, one.name, one.array):
            if name in found or name in coded:
                raise ModelFileError(f"{path}: the tensor {name[:120]!r} is stored under two names")
            if name in expected and one.source is not None:
                coded[name] = _picked(path, name, one.source, part, expected[name])
            elif name in expected:
                _check(path, name, part, expected[name])
                found[name] = 1 + part.astype(np.float32) if family and _moved(family, name) else part
            elif name.endswith(PARTS) and name.rpartition(".")[0] in expected and name not in halves:
                halves[name] = part
            elif spec.qk_norm_apart and part.ndim == 1 and (place := head_norm(name, expected)):
                of_heads.setdefault(place[0], {})[place[1]] = part
            elif not (_HARMLESS.fullmatch(name) or (spec.tied and name == "lm_head.weight") or not name):
                raise _unknown(path, name, spec, scheme)
    coded |= join_mxfp4(folder, found, halves, expected)
    found |= join_heads(folder, of_heads, expected)
    whole: Mapping[str, Any] = CodedWeights(found, coded) if coded else found
    missing = next((name for name in expected if name not in whole), None)
    if missing is not None:
        named = {own_name(name, spec): home for name, home in (homes or {}).items()}
        home = WEIGHTS if homes is None else named.get(missing, INDEX)
        raise ModelFileError(f"{folder / home}: the tensor {missing} of shape {list(expected[missing])} is missing")
    return whole


def _unknown(path: Path, name: str, spec: ModelSpec, scheme: Scheme | None) -> ModelFileError:
    if scheme is None and name.rpartition(".")[2] in ENDS:
        return ModelFileError(
            f"{path}: the tensor {name[:120]!r} belongs to quantised weights, but config.json does not say how "
            "they are quantised"
        )
    return ModelFileError(f"{path}: the tensor {name[:120]!r} is not part of a {spec.architecture}")


def stored_scheme(folder: Path, spec: ModelSpec) -> Scheme | None:
    """Return how the folder's config says weights are quantised; None for plain numbers and for GGUF files."""
    path = folder / "config.json"
    if spec.encoder is not None or is_gguf(folder) or not path.is_file():
        return None
    return scheme_of(Fields(read_json(path), path), FAMILIES[spec.architecture].packed)


def _stored(files: Sequence[Path], homes: Mapping[str, str] | None) -> Iterator[Stored]:
    """Yield the tensors of all files; raise `ModelFileError` for one that the index puts elsewhere."""
    for path in files:
        for name, array in _tensors(path):
            if homes is not None and homes.get(name) != path.name:
                place = homes.get(name, "no file")
                raise ModelFileError(f"{path}: holds the tensor {name[:120]!r}, which {INDEX} puts in {place}")
            yield Stored(path, name, array)


def _picked(path: Path, name: str, source: StoredMatrix, part: NDArray[Any], shape: tuple[int, ...]) -> SelectedRows:
    """Return a part of a quantised module as a tensor of ours."""
    found = selected_rows(source, part)
    if found is None:
        raise ModelFileError(f"{path}: the tensor {name} is quantised, where only plain numbers are supported")
    if found.shape != shape:
        raise ModelFileError(
            f"{path}: the tensor {name} has the shape {list(found.shape)}, expected {list(shape)} from config.json"
        )
    return found


def has_own_head(folder: Path, spec: ModelSpec) -> bool:
    """Return whether a folder whose config ties the head to the embedding has a different head nevertheless.

    transformers then uses it. Raise `ModelFileError` for a broken file.
    """
    if not spec.tied or spec.encoder is not None:
        return False
    wanted = {"lm_head.weight", "model.embed_tokens.weight"}
    found: dict[str, NDArray[Any]] = {}
    for path in weight_files(folder):
        for stored, array in _tensors(path):
            if stored.endswith(_TABLES):
                found |= {name: part for name, part in _parts(path, spec, stored, array) if name in wanted}
    if found.keys() != wanted:
        return False
    head, table = (found[name] for name in sorted(wanted))
    alike = head.dtype == table.dtype and head.shape == table.shape
    return not (
        alike
        and all(np.array_equal(head[at : at + _ROWS], table[at : at + _ROWS]) for at in range(0, len(head), _ROWS))
    )


_TABLES = (
    *("lm_head.weight", "embed_out.weight"),
    *("embed_tokens.weight", "embeddings.weight", "embed_in.weight"),
)
"""Ends of the stored names of heads and embeddings."""
_ROWS = 1 << 10
"""Rows of two tables that are compared at once."""


def _parts(path: Path, spec: ModelSpec, stored: str, array: NDArray[Any]) -> list[tuple[str, NDArray[Any]]]:
    """Return a stored tensor as those of `expected_tensors`; raise `ModelFileError` if its shape does not allow it."""
    name = own_name(stored, spec)
    if spec.encoder is not None:
        return [(name, array)]
    try:
        return list(own_tensors(spec, bool(FAMILIES[spec.architecture].ahead) * AHEAD, name, array))
    except (IndexError, TypeError, ValueError):  # of numpy: fused tensors are split by the sizes in config.json
        raise ModelFileError(
            f"{path}: the tensor {stored[:120]!r} has the shape {list(array.shape)}, which does not fit config.json"
        ) from None


def _moved(family: Family, name: str) -> bool:
    """Return whether a tensor is the weight of a norm that multiplies by 1 + w."""
    return (family.gemma or (family.centred and MIXER not in name)) and name.endswith("norm.weight")


def _check(path: Path, name: str, array: NDArray[Any], shape: tuple[int, ...]) -> None:
    if array.dtype in _WHOLE.values():
        raise _wrong_type(
            f"{path}: the tensor {name}", next(one for one, kind in _WHOLE.items() if kind == array.dtype)
        )
    if array.shape != shape:
        raise ModelFileError(
            f"{path}: the tensor {name} has the shape {list(array.shape)}, expected {list(shape)} from config.json"
        )


def stored_names(folder: Path) -> list[str]:
    """Return the names of all tensors in a folder's files or a GGUF file, as they are stored."""
    if is_gguf(folder):
        return list(read_gguf(folder).tensors)
    return [name for path in weight_files(folder) for name, _ in _tensors(path)]


def open_tensors(path: Path) -> dict[str, NDArray[Any]]:
    """Return every tensor of one safetensors file; raise `ModelFileError` for a broken one."""
    return dict(_tensors(path))


def located(folder: Path, spec: ModelSpec, name: str) -> tuple[Path, int, tuple[int, ...], np.dtype[Any]]:
    """Return a tensor's file, byte offset, shape and type."""
    for path in weight_files(folder):
        with opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            header = _header(path, file.read(8), size)
            entries = _entries(path, file.read(header), size - 8 - header)
        for stored, (dtype, shape, begin, _) in entries.items():
            if own_name(stored, spec) == name:
                return path, 8 + header + begin, shape, dtype
    raise ModelFileError(f"{folder}: the tensor {name} is missing")


def own_name(name: str, spec: ModelSpec) -> str:
    """Return the name in `expected_tensors` of a stored tensor.

    It is "" if the tensor is not used, and the stored name if it is unknown.
    """
    if spec.encoder is not None:
        return encoder_name(spec, name)
    family = FAMILIES[spec.architecture]
    if spec.ahead:
        return one_layer_name(name, spec.ahead)
    if family.ahead and _AHEAD.fullmatch(name):
        return ""
    if family.nested:
        return _text_name(name)
    bare = spec.kind == "embed" and not name.startswith(("model.", "lm_head."))
    return f"model.{name}" if bare else name


def _text_name(name: str) -> str:
    """Return a tensor's name without the prefix of the text part; "" for a tensor of another part."""
    if _OTHER_PARTS.match(name):
        return ""
    match = _PART.fullmatch(name)
    return name if match is None else "lm_head.weight" if match[1] == "lm_head.weight" else f"model.{match[1]}"


def _no_weights(folder: Path) -> ModelFileError:
    wanted = f"expected {WEIGHTS}, or {INDEX} and its files"
    with reading(folder):
        pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES)
    if pickles:
        return ModelFileError(
            f"{folder}: the weights are only in {pickles[0]}, a pickle, which is never opened; {wanted}"
        )
    return ModelFileError(f"{folder}: there are no weights; {wanted}")


def _weight_map(folder: Path) -> dict[str, str]:
    """Return the index as tensor name -> file name; each is a plain file name in the same folder."""
    path = folder / INDEX
    homes = Fields(read_json(path), path).object("weight_map").values
    if not homes:
        raise ModelFileError(f"{path}: weight_map must be an object from tensor names to file names")
    for home in homes.values():
        plain = isinstance(home, str) and re.fullmatch(r"[\w.-]+\.safetensors", home)
        if not plain or len(home.encode()) > MAX_NAME_BYTES:
            raise ModelFileError(f"{path}: weight_map must name .safetensors files in its folder, found {home!r:.80}")
    for name in set(homes.values()):
        if not (folder / name).is_file():
            raise ModelFileError(f"{folder / name}: the file is missing, and {INDEX} names it")
    return homes


def _tensors(path: Path) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield the tensors of one file, after its whole header was checked against its size."""
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        header = _header(path, file.read(8), size)
        text = file.read(header)
        data = np.memmap(file, np.uint8, "r", offset=8 + header) if size > 8 + header else np.empty(0, np.uint8)
    entries = _entries(path, text, len(data))
    for name, (dtype, shape, begin, end) in entries.items():
        # A plain ndarray: slices of np.memmap carry a subclass through every operation.
        yield name, np.asarray(data[begin:end]).view(dtype).reshape(shape)


def _header(path: Path, prefix: bytes, size: int) -> int:
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
        raise ModelFileError(
            f"{path}: not a whole safetensors file: its {size} bytes cannot hold the header it announces"
        )
    return length


_Entry = tuple[np.dtype[Any], tuple[int, ...], int, int]


def _entries(path: Path, text: bytes, size: int) -> dict[str, _Entry]:
    """Return the header's entries, which must cover the `size` bytes of data exactly, without holes or overlap."""
    if text.count(b"{") > MAX_BRACES:  # checked first: parsing would take seconds and ten times its size
        raise ModelFileError(f"{path}: its header describes more than {MAX_TENSORS} tensors")
    header = parse_object(text, path, unique=True)
    header.pop("__metadata__", None)
    if len(header) > MAX_TENSORS:
        raise ModelFileError(f"{path}: its header describes {len(header)} tensors, more than {MAX_TENSORS}")
    entries = {name: _entry(path, name, entry) for name, entry in header.items()}
    at = 0
    for name, (_, _, begin, end) in sorted(entries.items(), key=lambda item: item[1][2:]):
        if begin != at:
            raise ModelFileError(f"{path}: the tensor {name[:120]!r} starts at byte {begin}, expected {at}")
        at = end
    if at != size:
        state = "truncated" if at > size else "too long"
        raise ModelFileError(f"{path}: the file is {state}: its header describes {at} bytes of data, found {size}")
    return entries


def _entry(path: Path, name: str, entry: object) -> _Entry:
    where = f"{path}: the tensor {name[:120]!r}"
    if not isinstance(entry, dict):
        raise ModelFileError(f"{where} must be described by an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    kind: np.dtype[Any] | None = {**DTYPES, **_WHOLE}.get(dtype) if isinstance(dtype, str) else None
    if kind is None:
        raise _wrong_type(where, dtype)
    if not _counts(shape) or len(shape) > 8 or not _counts(offsets) or len(offsets) != 2:
        raise ModelFileError(f"{where} needs a shape and two data_offsets of whole numbers")
    if 0 in shape:  # no model has one, and numpy may reject its other dimensions
        raise ModelFileError(f"{where} has the shape {shape}, which is empty")
    begin, end = offsets
    if end - begin != math.prod(shape) * kind.itemsize:
        raise ModelFileError(f"{where} has {end - begin} bytes, expected {dtype} of shape {shape}")
    return kind, tuple(shape), begin, end


def _wrong_type(where: str, dtype: object) -> ModelFileError:
    return ModelFileError(f"{where} has the type {dtype!r:.40}; supported are {', '.join(DTYPES)}")


def _counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(one) is int and 0 <= one < 1 << 62 for one in value)
