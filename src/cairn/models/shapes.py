"""Models of well-known shapes with random weights, made in memory: for speed, which does not depend on the weights."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cairn.models.weights import DTYPES, expected_tensors
from cairn.types import CacheGroup, ModelSpec

TYPES = {"f32": "F32", "bf16": "BF16", "f16": "F16"}
"""What weights may be stored as -> the name of safetensors."""

_SIZES: dict[str, dict[str, Any]] = {
    "demo": {"layers": 6, "hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "ffn": 640, "vocab": 2048},
    "qwen3-0.6b": {
        **{"layers": 28, "hidden": 1024, "heads": 16, "kv_heads": 8, "head_dim": 128, "ffn": 3072, "vocab": 151_936},
        "context": 40_960,
    },
    "llama-3.2-1b": {
        **{"layers": 16, "hidden": 2048, "heads": 32, "kv_heads": 8, "head_dim": 64, "ffn": 8192, "vocab": 128_256},
        **{"context": 131_072, "architecture": "LlamaForCausalLM", "qk_norm": False, "rope_theta": 5e5},
    },
}
SHAPES = tuple(_SIZES)

_PERIOD = 1 << 20
"""Random numbers that are drawn for a tensor; larger ones repeat them."""


def shape_spec(name: str) -> ModelSpec:
    """The spec of one of `SHAPES`."""
    sizes = {"context": 2048, "architecture": "Qwen3ForCausalLM", "qk_norm": True, "rope_theta": 1e6, **_SIZES[name]}
    groups = (CacheGroup(kind="full", layers=tuple(range(sizes["layers"]))),)
    return ModelSpec(name=name, norm_eps=1e-6, tied=True, groups=groups, **sizes)


class RandomWeights(Mapping[str, NDArray[Any]]):
    """Every tensor of a spec, made when it is asked for: the same numbers each time."""

    def __init__(self, spec: ModelSpec, kind: str) -> None:
        """`kind` is one of `TYPES`. Norms are float32, as files have them beside weights of 16 bits."""
        self._shapes = expected_tensors(spec)
        self._dtype = DTYPES[TYPES[kind]]

    def outline(self, name: str) -> tuple[tuple[int, ...], str, int]:
        """Shape and type of the array that `[name]` gives, and the bytes of memory that it makes."""
        shape, dtype = self._shapes[name], self._dtype_of(name)
        return shape, str(dtype), math.prod(shape) * dtype.itemsize

    def __getitem__(self, name: str) -> NDArray[Any]:
        shape, dtype = self._shapes[name], self._dtype_of(name)
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        size = math.prod(shape)
        drawn = rng.standard_normal(min(size, _PERIOD), dtype=np.float32)
        drawn = 1 + 0.1 * drawn if "norm" in name else drawn / math.sqrt(shape[-1])
        return np.resize(drawn.astype(dtype), size).reshape(shape)

    def _dtype_of(self, name: str) -> np.dtype[Any]:
        return self._dtype if len(self._shapes[name]) > 1 else np.dtype(np.float32)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)
