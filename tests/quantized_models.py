"""Quantized safetensors as other tools write them: each packer returns a module's tensors and their values.

Written from the formats' descriptions, independently of the code that reads them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from tests.tiny_models import write_model

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
Packed = tuple[dict[str, np.ndarray], np.ndarray]
Pack = Callable[[np.ndarray, np.random.Generator], Packed]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
PLAIN = ("gate", "router", "layer", "shared_expert_gate", "in_proj_a", "in_proj_b", "in_proj_ba", "conv1d")
"""Modules that quantizers leave alone, because they route or gate."""
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}


def words(numbers: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """Pack non-negative numbers [n, k] in 32-bit words along k; `order`: which number each place of a word has."""
    each = 32 // bits
    padded = np.zeros((len(numbers), -(-numbers.shape[1] // each) * each), np.uint32)
    padded[:, : numbers.shape[1]] = numbers
    groups = padded.reshape(len(numbers), -1, each)
    packed = np.zeros(groups.shape[:2], np.uint32)
    for place, number in enumerate(order or range(each)):
        packed |= groups[:, :, number] << np.uint32(bits * place)
    return packed.view(np.int32)


def _scales(array: np.ndarray, shape: tuple[int, int], rng: np.random.Generator, most: float) -> np.ndarray:
    return (rng.uniform(0.5, 1, shape) * np.abs(array).max() / most).astype(np.float32)


def float8(rows: int, columns: int, name: str = "weight_scale_inv", dtype: Any = np.float32) -> Pack:
    """Return a packer for float8 in blocks of rows and columns; 0 for all of them."""

    def pack(array: np.ndarray, rng: np.random.Generator) -> Packed:
        out, inner = array.shape
        shape = (-(-out // (rows or out)), -(-inner // (columns or inner)))
        scale = _scales(array, shape, rng, 448).astype(dtype)
        wide = np.repeat(np.repeat(scale.astype(np.float32), rows or out, 0)[:out], columns or inner, 1)[:, :inner]
        weight = np.clip(array / wide, -448, 448).astype(FLOAT8)
        return {"weight": weight, name: scale if rows else scale.reshape(1)}, weight.astype(np.float32) * wide

    return pack


def four(group: int, whole: str) -> Pack:
    """Return a packer for fp4 as in compressed-tensors and modelopt; `whole`: name of the global scale."""
    half = np.array((0, 0.5, 1, 1.5, 2, 3, 4, 6), np.float32)
    table = np.concatenate([half, -half])

    def pack(array: np.ndarray, rng: np.random.Generator) -> Packed:
        out, inner = array.shape
        codes = rng.integers(0, 16, (out, inner), dtype=np.uint8)
        pairs = codes.reshape(out, -1, 2)
        packed = {"weight" if whole == "weight_scale_2" else "weight_packed": pairs[..., 0] | pairs[..., 1] << 4}
        if group == 32:
            scale = rng.integers(121, 124, (out, inner // group), dtype=np.uint8)
            wide = np.exp2(scale.astype(np.float32) - 127)
            return packed | {"weight_scale": scale}, table[codes] * np.repeat(wide, group, 1)
        most = np.float32(np.abs(array).max() / 6)
        scale = rng.uniform(100, 448, (out, inner // group)).astype(FLOAT8)
        one = most / np.float32(448) if whole == "weight_scale_2" else np.float32(448) / most
        wide = scale.astype(np.float32) * one if whole == "weight_scale_2" else scale.astype(np.float32) / one
        packed |= {"weight_scale": scale, whole: np.array([one], np.float32)}
        return packed, table[codes] * np.repeat(wide, group, 1)

    return pack


def compressed(bits: int, group: int, dtype: Any = BFLOAT16, zeros: bool = False, order: bool = False) -> Pack:
    """Return a packer for compressed-tensors' pack-quantized; with `order`, inputs of a group are no neighbours."""

    def pack(array: np.ndarray, rng: np.random.Generator) -> Packed:
        out, inner = array.shape
        count, middle = inner // (group or inner), 1 << (bits - 1)
        scale = _scales(array, (out, count), rng, middle).astype(dtype)
        zero = rng.integers(-3, 4, (out, count)) if zeros else np.zeros((out, count), int)
        index = np.arange(inner) // (group or inner)
        index = rng.permutation(index) if order else index
        codes = rng.integers(-middle, middle, (out, inner))
        tensors = {
            "weight_packed": words(codes + middle, bits),
            "weight_shape": np.array([out, inner], np.int64),
            "weight_scale": scale,
        }
        if zeros:
            tensors["weight_zero_point"] = words((zero + middle).T, bits).T.copy()
        if order:
            tensors["weight_g_idx"] = index.astype(np.int32)
        return tensors, ((codes - zero[:, index]) * scale.astype(np.float32)[:, index]).astype(np.float32)

    return pack


def eight(group: int, zeros: bool = False) -> Pack:
    """Return a packer for compressed-tensors' int-quantized."""

    def pack(array: np.ndarray, rng: np.random.Generator) -> Packed:
        out, inner = array.shape
        count = inner // (group or inner)
        scale = _scales(array, (out, count), rng, 127).astype(BFLOAT16)
        zero = rng.integers(-20, 20, (out, count)) if zeros else np.zeros((out, count), int)
        codes = rng.integers(-128, 128, (out, inner))
        tensors = {"weight": codes.astype(np.int8), "weight_scale": scale}
        if zeros:
            tensors["weight_zero_point"] = zero.astype(np.int8)
        wide = inner // count
        values = (codes - np.repeat(zero, wide, 1)) * np.repeat(scale.astype(np.float32), wide, 1)
        return tensors, values.astype(np.float32)

    return pack


def awq(group: int) -> Pack:
    def pack(array: np.ndarray, rng: np.random.Generator) -> Packed:
        out, inner = array.shape
        scale = _scales(array, (inner // group, out), rng, 8).astype(np.float16)
        zero = rng.integers(5, 11, scale.shape)
        codes = rng.integers(0, 16, (inner, out))
        tensors = {
            "qweight": words(codes, 4, AWQ_ORDER),
            "qzeros": words(zero, 4, AWQ_ORDER),
            "scales": scale,
        }
        wide = np.repeat(scale.astype(np.float32), group, 0)
        return tensors, ((codes - np.repeat(zero, group, 0)) * wide).T.astype(np.float32).copy()

    return pack


def mlx(bits: int, group: int) -> Pack:
    """Return a packer for mlx_lm.convert's format: scales and biases in bfloat16."""

    def pack(array: np.ndarray, rng: np.random.Generator) -> Packed:
        out, inner = array.shape
        shape = (out, inner // group)
        scale = _scales(array, shape, rng, 1 << (bits - 1)).astype(BFLOAT16)
        bias = (-(1 << (bits - 1)) * scale.astype(np.float32) * rng.uniform(0.9, 1.1, shape)).astype(BFLOAT16)
        codes = rng.integers(0, 1 << bits, (out, inner))
        tensors = {"weight": words(codes, bits).view(np.uint32), "scales": scale, "biases": bias}
        wide, more = (np.repeat(one.astype(np.float32), group, 1) for one in (scale, bias))
        if bits == 8:  # in the order of the kernels' sums
            return tensors, (codes - 128).astype(np.float32) * wide + (more + np.float32(128) * wide)
        return tensors, codes.astype(np.float32) * wide + more

    return pack


def gptq(bits: int, group: int, shift: int = 1, symmetric: bool = True, order: bool = False) -> Pack:
    """Return a packer for GPTQ. `shift`: what the file subtracts from zero points; `order`: as with desc_act."""

    def pack(array: np.ndarray, rng: np.random.Generator) -> Packed:
        out, inner = array.shape
        middle = 1 << (bits - 1)
        scale = _scales(array, (inner // group, out), rng, middle).astype(np.float16)
        zero = np.full(scale.shape, middle) if symmetric else rng.integers(middle - 3, middle + 4, scale.shape)
        index = np.arange(inner) // group
        index = rng.permutation(index) if order else index
        codes = rng.integers(0, 2 * middle, (inner, out))
        tensors = {
            "qweight": words(codes.T, bits).T.copy(),
            "qzeros": words(zero - shift, bits),
            "scales": scale,
            "g_idx": index.astype(np.int32),
        }
        values = (codes - zero[index]) * scale.astype(np.float32)[index]
        return tensors, values.T.astype(np.float32).copy()

    return pack


def write_quantized(
    folder: Path, pack: Pack, config: dict[str, Any], ignore: tuple[str, ...] = ("lm_head",), **fields: Any
) -> tuple[Path, Path]:
    """Write a quantized model, and the same numbers written out.

    Modules whose names end in one of `ignore` stay plain.
    """
    plain, packed = write_model(folder / "plain", **{**SIZES, **fields}), folder / "packed"
    tensors, rng = load_file(plain / "model.safetensors"), np.random.default_rng(5)
    tensors_out: dict[str, np.ndarray] = {}
    for name, array in list(tensors.items()):
        module = name.removesuffix(".weight")
        kept = (
            array.ndim != 2 or ".layers." not in name or module.rpartition(".")[2] in PLAIN or module.endswith(ignore)
        )
        if kept:
            tensors_out[name] = array
            continue
        parts, values = pack(array, rng)
        # As large as what it replaces, so that the model's numbers stay in bounds.
        assert 0.2 < values.std() / array.std() < 5, name
        tensors[name] = values
        tensors_out |= {f"{module}.{end}": np.ascontiguousarray(array) for end, array in parts.items()}
    save_file(tensors, plain / "model.safetensors")
    packed.mkdir()
    written = json.loads((plain / "config.json").read_text()) | {"quantization_config": config}
    (packed / "config.json").write_text(json.dumps(written))
    save_file(tensors_out, packed / "model.safetensors")
    return plain, packed
