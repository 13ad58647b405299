"""Models of well-known shapes with random weights, for measuring speed, which does not depend on the values."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from cairn.kernels.base import BLOCK, GROUP, Quantized
from cairn.kernels.elementary import exp
from cairn.models.families.moe_spec import is_router
from cairn.models.families.recurrent_spec import MIXER, is_step, with_state
from cairn.models.gguf.spec import cache_groups
from cairn.models.quantization.tensor_meta import TensorMeta, blocks, codes
from cairn.models.safetensors.weights import DTYPES, expected_tensors
from cairn.types.model_spec import CacheGroup, Experts, ModelSpec, Recurrence, RotaryPositions

_SIZES: dict[str, dict[str, Any]] = {
    "demo": {"layers": 8, "hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "ffn": 608, "vocab": 2048},
    "qwen3-0.6b": {
        **{"layers": 28, "hidden": 1024, "heads": 16, "kv_heads": 8, "head_dim": 128, "ffn": 3072, "vocab": 151_936},
        "context": 40_960,
    },
    "llama-3.2-1b": {
        **{"layers": 16, "hidden": 2048, "heads": 32, "kv_heads": 8, "head_dim": 64, "ffn": 8192, "vocab": 128_256},
        **{"context": 131_072, "architecture": "LlamaForCausalLM", "qk_norm": False, "rope_theta": 5e5},
    },
    "qwen3-8b": {
        **{"layers": 36, "hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "ffn": 12_288, "vocab": 151_936},
        "context": 40_960,
    },
    "gemma3-270m": {
        **{"layers": 18, "hidden": 640, "heads": 4, "kv_heads": 1, "head_dim": 256, "ffn": 2048, "vocab": 262_144},
        **{"context": 32_768, "architecture": "Gemma3ForCausalLM", "window": 512},
    },
    "gemma3-1b": {
        **{"layers": 26, "hidden": 1152, "heads": 4, "kv_heads": 1, "head_dim": 256, "ffn": 6912, "vocab": 262_144},
        **{"context": 32_768, "architecture": "Gemma3ForCausalLM", "window": 512},
    },
    "qwen3-30b-a3b-4-layers": {
        **{"layers": 4, "hidden": 2048, "heads": 32, "kv_heads": 4, "head_dim": 128, "ffn": 6144, "vocab": 151_936},
        **{"context": 40_960, "architecture": "Qwen3MoeForCausalLM"},
        "experts": {"count": 128, "chosen": 8, "ffn": 768, "normed": True},
    },
    "qwen3.5-0.8b": {
        **{"layers": 24, "hidden": 1024, "heads": 8, "kv_heads": 2, "head_dim": 256, "ffn": 3584, "vocab": 248_320},
        **{"context": 262_144, "architecture": "Qwen3_5ForCausalLM", "rope_theta": 1e7, "rotary": 64},
        **{"output_gate": True, "recurrence": {"heads": 16, "key_heads": 16}},
    },
    "qwen3.5-4b": {
        **{"layers": 32, "hidden": 2560, "heads": 16, "kv_heads": 4, "head_dim": 256, "ffn": 9216, "vocab": 248_320},
        **{"context": 262_144, "architecture": "Qwen3_5ForCausalLM", "rope_theta": 1e7, "rotary": 64},
        **{"output_gate": True, "recurrence": {"heads": 32, "key_heads": 16}},
    },
}
SHAPES = tuple(_SIZES)
_DTYPES = {str(dtype): dtype for dtype in DTYPES.values()}

_PERIOD = 1 << 20
"""Random numbers drawn for a tensor; larger tensors repeat them."""


def shape_spec(name: str) -> ModelSpec:
    """Return the spec of one of `SHAPES`."""
    sizes = {"context": 2048, "architecture": "Qwen3ForCausalLM", "qk_norm": True, "rope_theta": 1e6, **_SIZES[name]}
    if window := sizes.pop("window", 0):
        limited = [layer for layer in range(sizes["layers"]) if (layer + 1) % 6]
        groups = cache_groups(sizes["layers"], limited, window, sizes["context"], RotaryPositions(theta=1e4))
        sizes |= {"activation": "gelu_tanh", "post_norms": True, "embedding_scale": math.sqrt(sizes["hidden"])}
    else:
        groups = (CacheGroup(kind="full", layers=tuple(range(sizes["layers"]))),)
    if gated := sizes.pop("recurrence", None):
        apart = tuple(layer for layer in range(sizes["layers"]) if (layer + 1) % 4)
        kept = Recurrence(kind="delta", layers=apart, reach=4, value_size=128, key_size=128, **gated)
        sizes["recurrence"], groups = kept, with_state(groups, kept)
    if experts := sizes.pop("experts", None):
        sizes["experts"] = Experts(layers=tuple(range(sizes["layers"])), **experts)
    return ModelSpec(name=name, norm_eps=1e-6, tied=True, groups=groups, **sizes)


@dataclass(frozen=True, slots=True)
class _Storage:
    """Storage of a tensor: plain numbers, codes with scales and minima, or codes in super-blocks."""

    dtype: str = "float32"
    bits: Literal[0, 4, 8] = 0
    scale: str = ""
    minimum: str = ""
    block: Literal[0, 4, 5, 6] = 0


_SIX = _Storage(block=6)
_ODD = _Storage(bits=8, scale="float16")
"""Used instead of super-blocks for rows whose length is not a multiple of 256, where llama.cpp writes Q5_0 or Q8_0."""
_STORAGES = {
    "f32": _Storage("float32"),
    "bf16": _Storage("bfloat16"),
    "f16": _Storage("float16"),
    "q4_0": _Storage(bits=4, scale="float16"),
    "q4_1": _Storage(bits=4, scale="float16", minimum="float16"),
    "q4_k": _Storage(block=4),
    "q4_k_m": _Storage(block=4),
    "q5_k": _Storage(block=5),
    "q6_k": _SIX,
    "q8_0": _Storage(bits=8, scale="float16"),
}
TYPES = tuple(_STORAGES)
"""Types of the matrices: floats, or packed types of GGUF. q4_k_m mixes types as files of that name do: some matrices of
attention and MLP, and the output, are Q6_K."""

_LAYER = re.compile(r"model\.layers\.(\d+)\.(self_attn\.v_proj|mlp\.(?:experts\.\d+\.)?down_proj)\.weight")


class RandomWeights(Mapping[str, Any]):
    """Every tensor of a spec, made on demand and the same each time. Codes are drawn as codes."""

    def __init__(self, spec: ModelSpec, kind: str) -> None:
        """Prepare weights of `kind`, one of `TYPES`. Norms are float32, as in files."""
        self.form = kind
        self.errors: dict[str, float] = {}
        """Always empty: nothing is rounded."""
        self._shapes = expected_tensors(spec)
        self._layers = spec.layers

    def outline(self, name: str) -> TensorMeta:
        """Return the meta of `[name]`, with the bytes of memory that it takes."""
        shape, storage = self._shapes[name], self._storage(name)
        if storage.block:
            return blocks(shape, storage.block)
        if storage.bits:
            return codes(shape, storage.bits, storage.scale, storage.minimum)
        return TensorMeta(shape, storage.dtype, math.prod(shape) * _DTYPES[storage.dtype].itemsize)

    def __getitem__(self, name: str) -> NDArray[Any] | Quantized:
        shape, storage = self._shapes[name], self._storage(name)
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        if storage.block:
            return _draw_blocks(rng, storage.block, shape[0], shape[1])
        if storage.bits:
            return _draw_codes(rng, storage, shape[0], shape[1])
        size = math.prod(shape)
        drawn = rng.standard_normal(min(size, _PERIOD), dtype=np.float32)
        if name.endswith(f"{MIXER}decay"):
            drawn = -exp(drawn)
        else:
            drawn = 1 + 0.1 * drawn if "norm" in name else drawn / math.sqrt(shape[-1])
        return np.resize(drawn.astype(_DTYPES[storage.dtype]), size).reshape(shape)

    def _storage(self, name: str) -> _Storage:
        shape, storage = self._shapes[name], _STORAGES[self.form]
        if len(shape) == 1 or is_router(name) or is_step(name):
            return _Storage()
        if self.form == "q4_k_m":
            found = _LAYER.fullmatch(name)
            if not name.startswith("model.layers.") or (found and _more_bits(int(found[1]), self._layers)):
                storage = _SIX
        return _ODD if storage.block and shape[1] % BLOCK else storage

    def __contains__(self, name: object) -> bool:
        return name in self._shapes  # Mapping's default would build the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def _more_bits(layer: int, layers: int) -> bool:
    """Return whether q4_k_m stores a layer's values and down projection in Q6_K: the outer eighths, and every third."""
    first, last = layers // 8, 7 * layers // 8
    return layer < first or layer >= last or (layer - first) % 3 == 2


def _draw_blocks(rng: np.random.Generator, bits: Literal[4, 5, 6], out: int, inner: int) -> Quantized:
    """Draw codes in super-blocks whose integer scales are all 1."""
    most = 1 << bits
    some: NDArray[Any] = rng.integers(1, most, min(out * inner, _PERIOD), dtype=np.uint8)
    step = math.sqrt(12) / (most - 1) / math.sqrt(inner)
    groups, supers = (out, inner // (16 if bits == 6 else GROUP)), (out, inner // BLOCK)
    codes = np.resize(some, out * inner).reshape(out, inner)
    if bits == 6:
        return Quantized(6, codes, np.full(groups, 1, np.int8), None, np.full(supers, step, np.float16))
    one = np.full(groups, 1, np.uint8)
    scale, middle = np.full(supers, step, np.float16), np.full(supers, -most // 2 * step, np.float16)
    return Quantized(bits, codes, one, one.copy(), scale, middle)


def _draw_codes(rng: np.random.Generator, storage: _Storage, out: int, inner: int) -> Quantized:
    """Draw codes, with scales that give the weights a standard deviation of 1 / sqrt(inner)."""
    low, high = (1, 16) if storage.bits == 4 else (-127, 128)  # symmetric about the middle
    dtype: Any = np.uint8 if storage.bits == 4 else np.int8
    some: NDArray[Any] = rng.integers(low, high, min(out * inner, _PERIOD), dtype=dtype)
    step = math.sqrt(12) / (high - low) / math.sqrt(inner)
    groups = (out, inner // GROUP)
    scale = np.full(groups, step, storage.scale)
    middle = 8 if storage.bits == 4 else 0
    minimum = np.full(groups, -middle * step, storage.minimum) if storage.minimum else None
    assert storage.bits
    return Quantized(storage.bits, np.resize(some, out * inner).reshape(out, inner), scale, minimum)
