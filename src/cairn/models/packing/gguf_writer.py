"""Writes a model as one GGUF file of another number format and measures the rounding error.

Our code reads; the gguf package (an extra of this package) packs numbers and lays out the file. Matrices are packed a
slice of rows at a time, and errors are measured on what `dequant` reads back.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cairn.kernels.elementary import log_of
from cairn.kernels.rope import frequencies
from cairn.models.families.tensor_names import permute
from cairn.models.files import is_gguf
from cairn.models.gguf.architectures import ARCHITECTURES
from cairn.models.gguf.encoder import POOLINGS
from cairn.models.gguf.reader import Gguf, Tensor, read_gguf
from cairn.models.gguf.spec import FACTORS, SAMPLING
from cairn.models.gguf.weights import gguf_name
from cairn.models.quantization.dequant import KINDS, BlockFormat, dequantize
from cairn.models.safetensors.weights import expected_tensors, open_weights
from cairn.types.errors import ModelError, ModelFileError
from cairn.types.model_spec import ModelSpec, RopeScaling

TYPES = {"F32": 0, "F16": 1, "BF16": 32, "Q8_0": 7, "Q5_1": 9, "Q5_0": 8, "Q4_1": 3, "Q4_0": 2}
"""Number formats that can be written -> their `general.file_type`."""
SLICE = 1 << 24
"""Values of a matrix that are packed at a time."""

_KIND = {kind.name: (number, kind) for number, kind in KINDS.items()}
_FINE = ("F32", "F16", "BF16", "Q8_0")
_NOT_COPIED = re.compile(r"GGUF\..*|split\..*|general\.(architecture|file_type|quantization_version|alignment)")
_PART = re.compile(r"(?:blk\.\d+\.)?(\w+)\.\w+")


@dataclass(frozen=True, slots=True)
class Loss:
    """Rounding error of the tensors of one class, such as ffn_down."""

    part: str
    type: str
    tensors: int
    values: int
    error: float
    """Root mean square error relative to that of the values; 0 for bytes that were only copied."""
    worst: float
    """Largest absolute error."""


@dataclass(frozen=True, slots=True)
class _Source:
    """A tensor to write, under GGUF's name and in GGUF's row order."""

    name: str
    shape: tuple[int, ...]
    kind: str
    rows: Callable[[int, int], NDArray[Any]]
    """Returns rows [begin, end) in any float type."""
    packed: Callable[[], NDArray[np.uint8]] | None = None
    """Returns its bytes, if they are of `kind` already."""


def package() -> Any:
    """Return the gguf package; raise `ModelError` that says how to install it."""
    try:
        import gguf
    except ImportError:
        raise ModelError("writing GGUF needs the gguf package; get it with: pip install gguf") from None
    return gguf


def write_gguf(
    source: Path,
    spec: ModelSpec,
    path: Path,
    kind: str,
    texts: dict[str, Any],
    progress: Callable[[int, int], None],
) -> list[Loss]:
    """Write the model at `source` to `path` with matrices of `kind`, one of `TYPES`; return the losses.

    `spec` is the source's. `texts` are the tokenizer and the templates as metadata; a GGUF source brings its own.
    `progress` gets the values written and the total. Vectors stay float32; output (and a tied embedding) is Q8_0 if
    `kind` has fewer bits; a matrix whose rows are no multiple of 32 is BF16. Raise `ModelError` for a model that GGUF
    cannot express.
    """
    library = package()
    if is_gguf(source):
        gguf = read_gguf(source)
        open_weights(source, spec)
        writer = library.GGUFWriter(path, gguf.metadata["general.architecture"])
        try:
            fields = library.GGUFReader(gguf.paths[0]).fields
        except ValueError as error:
            raise ModelError(f"{gguf.paths[0]}: the gguf package cannot read it: {error}") from None
        for field in fields.values():
            if not _NOT_COPIED.fullmatch(field.name) and len(field.data):  # the format's writer takes no empty array
                inner = field.types[-1] if len(field.types) > 1 else None
                writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
        tensors = list(_packed_tensors(gguf))
    else:
        name = _architecture(spec)
        writer = library.GGUFWriter(path, name)
        for key, value in (metadata(spec, name) | texts).items():
            put(writer, key, value)
        tensors = list(_plain_tensors(source, spec, name))
    writer.add_uint32("general.file_type", TYPES[kind])
    writer.add_uint32("general.quantization_version", 2)
    return _write(library, writer, tensors, kind, spec.tied, progress)


_WRITTEN = ("llama", "qwen2", "qwen3")
"""Architectures as which a folder's model can be written."""


def _architecture(spec: ModelSpec) -> str:
    """Return GGUF's name of a spec's architecture; raise `ModelError` if it cannot be written."""
    named = spec.architecture.replace("Mistral", "Llama")
    for name, one in ARCHITECTURES.items():
        if name in _WRITTEN and one.name == named and spec.activation == "silu" and len(spec.groups) == 1:
            return name
    raise ModelError(f"{spec.name}: this kind of model cannot be written as GGUF ({spec.architecture})")


def metadata(spec: ModelSpec, name: str) -> dict[str, Any]:
    """Return the spec as GGUF metadata; `name` is GGUF's name of the architecture."""
    rope = spec.rope_scaling
    found: dict[str, Any] = {
        "block_count": spec.layers,
        "context_length": rope.original_context if rope.kind == "linear" else spec.context,
        "embedding_length": spec.hidden,
        "feed_forward_length": spec.ffn,
        "attention.head_count": spec.heads,
        "attention.head_count_kv": spec.kv_heads,
        "attention.key_length": spec.head_dim,
        "attention.value_length": spec.head_dim,
        "attention.layer_norm_rms_epsilon": spec.norm_eps,
        "rope.dimension_count": spec.head_dim,
        "rope.freq_base": spec.rope_theta,
        "vocab_size": spec.vocab,
    }
    if spec.groups[0].window:
        found["attention.sliding_window"] = spec.groups[0].window
    if spec.kind == "embed":
        found["pooling_type"] = next(number for number, one in POOLINGS.items() if one == spec.embedding.pooling)
    if rope.kind in ("linear", "yarn"):
        found |= {"rope.scaling.type": rope.kind, "rope.scaling.factor": rope.factor}
    if rope.kind == "yarn":
        found["rope.scaling.original_context_length"] = rope.original_context
        found |= {"rope.scaling.yarn_beta_fast": rope.beta_fast, "rope.scaling.yarn_beta_slow": rope.beta_slow}
        if rope.attention_factor is not None and rope.factor > 1:
            found["rope.scaling.attn_factor"] = rope.attention_factor / (0.1 * log_of(rope.factor) + 1)
    whole = {f"{name}.{key}": value for key, value in found.items()} | {"general.name": spec.name}
    for option, value in spec.defaults.items():
        # -1 keeps every token, as 0 does, and the format's number has no sign.
        whole[f"general.sampling.{SAMPLING[option]}"] = max(int(value), 0) if option == "top_k" else float(value)
    return whole


def check_written(spec: ModelSpec, written: ModelSpec) -> None:
    """Raise `ModelError` if the spec of the written file differs from its source's."""
    exact = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "context", "activation", "qk_norm")
    for name in (*exact, "qkv_bias", "out_bias", "mlp_bias", "tied", "groups", "kind", "width"):
        if getattr(spec, name) != getattr(written, name):
            raise ModelError(f"{spec.name}: its {name} cannot be written as GGUF")
    ours, theirs = (frequencies(one.head_dim, one.rope_theta, one.rope_scaling) for one in (spec, written))
    near = np.allclose(ours.frequencies, theirs.frequencies, rtol=1e-6, atol=0) and math.isclose(
        ours.factor, theirs.factor, rel_tol=1e-6
    )
    if not near or not math.isclose(spec.norm_eps, written.norm_eps, rel_tol=1e-6):
        raise ModelError(f"{spec.name}: its rotary positions or norms cannot be written as GGUF")
    if not set(spec.eos_ids) <= set(written.eos_ids):
        raise ModelError(f"{spec.name}: it has more tokens that end an answer than GGUF can name")


def put(writer: Any, key: str, value: Any) -> None:
    """Add a value under the GGUF type that readers expect."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    else:
        writer.add_array(key, value)


def _write(
    library: Any, writer: Any, tensors: list[_Source], kind: str, tied: bool, progress: Callable[[int, int], None]
) -> list[Loss]:
    chosen = [_chosen(one, kind, tied) for one in tensors]
    for one, to in zip(tensors, chosen, strict=True):
        shape = (*one.shape[:-1], one.shape[-1] // to.values * to.bytes)
        number = library.GGMLQuantizationType(_KIND[to.name][0])
        writer.add_tensor_info(one.name, shape, np.dtype(np.uint8), math.prod(shape), raw_dtype=number)
    found: dict[tuple[str, str], list[float]] = {}
    done, total = 0, sum(math.prod(one.shape) for one in tensors)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for one, to in zip(tensors, chosen, strict=True):
            data, squares, errors, worst = _packed(library, one, to)
            writer.write_tensor_data(data)
            sums = found.setdefault((_class(one.name), to.name), [0, 0, 0.0, 0.0, 0.0])
            size = math.prod(one.shape)
            sums[:] = [sums[0] + 1, sums[1] + size, sums[2] + squares, sums[3] + errors, max(sums[4], worst)]
            done += size
            progress(done, total)
    finally:
        writer.close()
    return [
        Loss(part, name, int(count), int(values), math.sqrt(errors / squares) if squares else 0.0, worst)
        for (part, name), (count, values, squares, errors, worst) in found.items()
    ]


_EXACT = re.compile(r"ffn_gate_inp|_norm\b|\.ssm_(conv1d|a|d|norm|alpha|beta|ba)\b|\.shortconv\.conv\b")
"""Tensors that are never rounded: rounding would change the choice of experts, or accumulate in recurrent states.
Norms of single heads are matrices in a file."""


def _chosen(one: _Source, kind: str, tied: bool) -> BlockFormat:
    """Return the number format for one tensor."""
    last = one.name == "output.weight" or (tied and one.name == "token_embd.weight")
    exact = _EXACT.search(one.name) is not None
    name = "F32" if len(one.shape) == 1 or exact else "Q8_0" if last and kind not in _FINE else kind
    if one.shape[-1] % _KIND[name][1].values:
        name = "BF16"
    return _KIND[name][1]


def _packed(library: Any, one: _Source, to: BlockFormat) -> tuple[NDArray[np.uint8], float, float, float]:
    """Return a tensor's bytes, the sums of squares of its values and of the errors, and the largest error."""
    if one.kind == to.name and one.packed is not None:
        return one.packed(), 0.0, 0.0, 0.0
    columns = one.shape[-1]
    out = np.empty((math.prod(one.shape[:-1]), columns // to.values * to.bytes), np.uint8)
    squares = errors = worst = 0.0
    step = max(SLICE // columns, 1)
    for at in range(0, len(out), step):
        values = np.ascontiguousarray(one.rows(at, min(at + step, len(out))), np.float32)
        if not np.isfinite(values).all():
            raise ModelFileError(f"the tensor {one.name} holds numbers that are not finite")
        with np.errstate(over="ignore"):
            if to.dtype is not None:
                bits = values.astype(to.dtype)
                data, back = bits.view(np.uint8), bits.astype(np.float32)
            else:
                data = library.quants.quantize(values, library.GGMLQuantizationType(_KIND[to.name][0]))
                back = dequantize(to, data.reshape(-1, to.bytes)).reshape(values.shape)
        if not np.isfinite(back).all():
            raise ModelError(f"the tensor {one.name} holds numbers that {to.name} cannot hold; use BF16")
        out[at : at + step] = data.reshape(len(values), -1)
        gap = (back - values).astype(np.float64)
        squares += float(np.square(values, dtype=np.float64).sum())
        errors += float(np.square(gap).sum())
        worst = max(worst, float(np.abs(gap).max()))
    return out, squares, errors, worst


def _class(name: str) -> str:
    match = _PART.fullmatch(name)
    return match[1] if match else name


def _packed_tensors(gguf: Gguf) -> Iterator[_Source]:
    """Yield the tensors of a GGUF file as stored."""
    for tensor in gguf.tensors.values():

        def rows(begin: int, end: int, tensor: Tensor = tensor) -> NDArray[Any]:
            kind, blocks = tensor.kind, gguf.blocks(tensor.name)
            width = tensor.shape[-1] // kind.values
            part = blocks[begin * width : end * width]
            flat = part.view(kind.dtype) if kind.dtype is not None else dequantize(kind, part)
            return flat.reshape(end - begin, tensor.shape[-1])

        def packed(tensor: Tensor = tensor) -> NDArray[np.uint8]:
            return gguf.blocks(tensor.name)

        yield _Source(tensor.name, tensor.shape, tensor.kind.name, rows, packed)


def _plain_tensors(folder: Path, spec: ModelSpec, name: str) -> Iterator[_Source]:
    """Yield the tensors of a folder under GGUF's names, and llama3's rope factors."""
    weights = open_weights(folder, spec)
    for known in expected_tensors(spec):

        def rows(begin: int, end: int, known: str = known) -> NDArray[Any]:
            array = weights[known]
            if ARCHITECTURES[name].interleaved and re.search(r"self_attn\.[qk]_proj", known):
                array = permute(array, spec.head_dim)
            return array.reshape(-1, array.shape[-1])[begin:end]

        yield _Source(gguf_name(known), weights[known].shape, "", rows)
    if spec.rope_scaling.kind == "llama3":
        plain = frequencies(spec.head_dim, spec.rope_theta, RopeScaling())
        slowed = frequencies(spec.head_dim, spec.rope_theta, spec.rope_scaling)
        factors = (plain.frequencies / slowed.frequencies).astype(np.float32)
        yield _Source(FACTORS, factors.shape, "", lambda begin, end: factors.reshape(1, -1))
