"""`quantization_config` of a config.json: how safetensors store quantised weights.

Only what the tensors do not show is read: bits, groups and minima follow from them. Lists of unquantised modules
(`ignore`, `modules_to_not_convert`) are not needed either, since such modules have plain numbers. Settings for
activations have no effect: see `kernels.quantized`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from cairn.models.files import Fields
from cairn.types.errors import ModelError

Method = Literal["float8", "integers", "awq", "gptq", "mlx"]

FIELDS = ("quantization_config", "compression_config")
_MLX = "quantization"
"""Key of MLX's settings; newer releases also write `quantization_config`, without a method."""
_MOST = 1 << 20
"""Most outputs or inputs of a block."""
SUPPORTED = (
    "fp8 (e4m3), compressed-tensors (float-, int- and pack-quantized, nvfp4, mxfp4), modelopt (fp8, nvfp4), "
    "awq (gemm), gptq, mlx (affine, 4 and 8 bits), and mxfp4 of gpt-oss"
)


@dataclass(frozen=True, slots=True)
class Scheme:
    """Storage of quantised modules."""

    method: Method
    """`integers` is compressed-tensors, whose modules may be float8 too."""
    block: tuple[int, int] = (128, 128)
    """Of float8: outputs and inputs that share a scale, if there is a scale for each block."""
    bits: int = 4
    """Of awq and gptq."""
    symmetric: bool = False
    """Of awq and gptq: whether the file states that zero points are in the middle."""
    zero_shift: int = 0
    """Of gptq: added to the stored zero points."""
    modules: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Of mlx: bits and weights of a group of modules by name; "" for all others."""


def scheme_of(config: Fields, mxfp4: bool = False) -> Scheme | None:
    """Return how a config.json says weights are stored; None for plain numbers.

    None also for MXFP4 if the family supports it (`mxfp4`). Raise `ModelError` that names what is not supported.
    """
    name = next((one for one in (_MLX, *FIELDS) if config.has(one)), None)
    if name is None:
        return None
    fields = config.object(name)
    if name == _MLX or (not fields.has("quant_method") and {"bits", "group_size"} <= fields.values.keys()):
        return _mlx(fields)
    method = fields.text("quant_method", "compressed-tensors" if name == FIELDS[1] else "")
    if method == "mxfp4" and mxfp4:
        return None
    if method == "auto-round":
        method = fields.text("packing_format", "").removeprefix("auto_round:auto_")
    readers = {
        "fp8": _float8,
        "fbgemm_fp8": _float8,
        "compressed-tensors": _compressed,
        "modelopt": _modelopt,
        "awq": _awq,
        "gptq": _gptq,
    }
    if method not in readers:
        raise _no(fields, f"the method {method[:40]!r}")
    return readers[method](fields)


def _no(fields: Fields, what: str) -> ModelError:
    place = fields.prefix.rstrip(".")
    return ModelError(f"{fields.path}: {place}: {what} is not supported for safetensors; supported are {SUPPORTED}")


def _float8(fields: Fields) -> Scheme:
    if (kind := fields.text("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
        raise _no(fields, f"fp8 in {kind[:40]!r}")
    return Scheme("float8", block=_block(fields, "weight_block_size"))


def _block(fields: Fields, name: str) -> tuple[int, int]:
    value: Any = fields.values[name] if fields.has(name) else [128, 128]
    if (
        not isinstance(value, list)
        or len(value) != 2
        or not all(type(one) is int and 0 < one <= _MOST for one in value)
    ):
        raise fields.error(name, f"two whole numbers from 1 to {_MOST}")
    return value[0], value[1]


_FORMATS = (
    *("dense", "float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "mixed-precision"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized"),
)


def _compressed(fields: Fields) -> Scheme:
    if (status := fields.text("quantization_status", "compressed")) != "compressed":
        raise _no(fields, f"the quantization_status {status[:40]!r}")
    sparse = fields.object("sparsity_config")
    if sparse.values and sparse.text("format", "dense") != "dense":
        raise _no(fields, f"the sparsity {sparse.text('format', '')[:40]!r}")
    if fields.object("transform_config").object("config_groups").values:
        raise _no(fields, "a transform_config")
    groups = fields.object("config_groups")
    blocks = [_group(fields, groups.object(name)) for name in groups.values]
    _known(fields, fields.text("format", "pack-quantized"))
    if len(set(blocks) - {None}) > 1:
        raise _no(fields, "more than one block_structure")
    return Scheme("integers", block=next((one for one in blocks if one is not None), (128, 128)))


def _group(fields: Fields, group: Fields) -> tuple[int, int] | None:
    """Check the weights' settings of one group of modules; return its block size, if any."""
    if group.has("format"):
        _known(fields, group.text("format", ""))
    weights = group.object("weights")
    kind, bits = weights.text("type", "int"), weights.integer("num_bits", 1, 64, 8)
    if (kind, bits) not in (("int", 4), ("int", 8), ("float", 4), ("float", 8)):
        raise _no(fields, f"weights of the type {kind[:20]!r} with {bits} bits")
    return _block(weights, "block_structure") if weights.has("block_structure") else None


def _known(fields: Fields, named: str) -> None:
    if named not in _FORMATS:
        raise _no(fields, f"the format {named[:40]!r}")


def _modelopt(fields: Fields) -> Scheme:
    named = fields.text("quant_algo", "")
    if named not in ("FP8", "NVFP4"):
        raise _no(fields, f"the quant_algo {named[:40]!r} of modelopt")
    return Scheme("integers")


def _awq(fields: Fields) -> Scheme:
    bits = fields.integer("bits", 1, 32, 4)
    if bits != 4:
        raise _no(fields, f"awq with {bits} bits")
    if (version := fields.text("version", "gemm").lower()) != "gemm":
        raise _no(fields, f"the version {version[:40]!r} of awq")
    return Scheme("awq", symmetric=not fields.flag("zero_point", True))


def _mlx(fields: Fields) -> Scheme:
    """Read MLX's settings: those of all modules, and beside them objects for single ones; false leaves one plain."""
    found = {"": _mlx_module(fields)}
    for name, value in fields.values.items():
        if isinstance(value, dict):
            found[name] = _mlx_module(Fields({"mode": fields.text("mode", "affine"), **value}, fields.path, f"{name}."))
    return Scheme("mlx", modules=found)


def _mlx_module(fields: Fields) -> tuple[int, int]:
    if (mode := fields.text("mode", "affine")) != "affine":
        raise _no(fields, f"mlx in the mode {mode[:40]!r}")
    bits, group = fields.integer("bits", 1, 32), fields.integer("group_size", 1, 1 << 20)
    from cairn.kernels.base import GROUP  # imports numpy; a server's front knows families, and computes nothing

    if bits not in (4, 8) or group % GROUP:
        raise _no(fields, f"mlx with {bits} bits in groups of {group}")
    return bits, group


def _gptq(fields: Fields) -> Scheme:
    bits = fields.integer("bits", 1, 32, 4)
    if bits not in (4, 8):
        raise _no(fields, f"gptq with {bits} bits")
    named = fields.text("checkpoint_format", "gptq")
    if named not in ("gptq", "gptq_v2"):
        raise _no(fields, f"the checkpoint_format {named[:40]!r} of gptq")
    shift = 0 if named == "gptq_v2" else 1
    return Scheme("gptq", bits=bits, symmetric=fields.flag("sym", True), zero_shift=shift)
