"""A rank's part of a model: its spec, and its slices of the weights.

Queries, keys, values, gates and ups are cut by outputs (heads, columns of the MLP); the matrices that follow them are
cut by inputs, so that each rank has a part of every sum. Of latents (MLA) each rank has its heads' matrices. All else
is whole on every rank, the latents' own projections and their cache too.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from cairn.kernels.base import Packed, Quantized
from cairn.models.quantization.tensor_meta import TensorMeta, outline
from cairn.types.errors import ModelError
from cairn.types.model_spec import ModelSpec

_MLP = r"mlp\.(?:experts\.\d+\.|shared_expert\.)?"
_BY_OUTPUTS = re.compile(
    rf"\.(?:self_attn\.(?:(?:[qkv]|q_b)_proj\.(?:weight|bias)|sinks)|{_MLP}(?:gate|up)_proj\.(?:weight|bias))\Z"
)
_OF_KV = re.compile(r"\.self_attn\.[kv]_proj\.")
_OF_HEAD = re.compile(r"(.*\.self_attn\.[kv]_b_proj\.)(\d+)(\.weight)")
_BY_INPUTS = re.compile(rf"\.(?:self_attn\.o_proj|{_MLP}down_proj)\.(weight|bias)\Z")


def check_parallel(spec: ModelSpec, ranks: int) -> None:
    """Raise `ModelError` for a model that cannot be cut into so many parts."""
    kinds = {
        "recurrent layers": spec.recurrence is not None,
        "layers that differ": spec.uneven is not None,
        "an encoder, or attention in both directions": spec.whole,
        "a norm over all heads together": spec.qk_norm_whole,
        "a norm for each head": spec.qk_norm_apart,
    }
    for kind, there in kinds.items():
        if there:
            raise ModelError(
                f"{spec.name}: tp is {ranks}, but {spec.architecture}, as all models with {kind}, runs on one rank; "
                "leave tp out"
            )
    experts = spec.experts
    widths = {"heads": spec.heads, "columns of the MLP": spec.ffn}
    if spec.latent is None and ranks % spec.kv_heads:  # else ranks share a head of keys
        widths["heads of keys"] = spec.kv_heads
    if experts is not None:
        widths |= {"columns of an expert": experts.ffn, "columns of the shared expert": experts.shared}
    for name, width in widths.items():
        if width % ranks:
            raise ModelError(f"{spec.name}: tp is {ranks}, but the model has {width} {name}, no multiple of it")


def kv_parts(spec: ModelSpec, ranks: int) -> int:
    """Return the number of parts that keys and values are cut into; fewer than ranks if ranks share heads.

    A latent is one part, whole on every rank.
    """
    return 1 if spec.latent is not None else min(ranks, spec.kv_heads)


def shard_spec(spec: ModelSpec, ranks: int) -> ModelSpec:
    """Return the spec of one rank's part. KV keys name the number of ranks: sums over ranks move bits."""
    experts = spec.experts
    if experts is not None:
        experts = msgspec.structs.replace(experts, ffn=experts.ffn // ranks, shared=experts.shared // ranks)
    return msgspec.structs.replace(
        spec,
        heads=spec.heads // ranks,
        kv_heads=spec.kv_heads // kv_parts(spec, ranks),
        ffn=spec.ffn // ranks,
        experts=experts,
        identity=hashlib.sha256(spec.identity + f"tp {ranks}".encode()).digest(),
    )


class ShardedWeights(Mapping[str, Any]):
    """One rank's slices of a model's weights. As those of `HeldWeights`, tensors are made anew each time."""

    def __init__(self, whole: Mapping[str, Any], rank: int, ranks: int, heads: int = 0, kv_parts: int = 0) -> None:
        """Slice the weights for one rank. `heads`: its heads, by whose number latent attention tells matrices apart.

        `kv_parts`: parts of keys and values, by default as many as ranks.
        """
        self._whole, self._rank, self._ranks, self._heads = whole, rank, ranks, heads
        self._kv_parts = kv_parts or ranks
        self._partial: dict[int, Any] = {}
        """Matrices cut by inputs that were asked for since the last `take_partial`."""

    def outline(self, name: str) -> TensorMeta:
        """Return the meta of `[name]`. Reading it takes what reading the whole tensor takes."""
        whole = outline(self._whole, self._name(name))
        shape = list(whole.shape)
        if _BY_OUTPUTS.search(name):
            shape[0] //= self._kv_parts if _OF_KV.search(name) else self._ranks
        elif (found := _BY_INPUTS.search(name)) is not None and found[1] == "weight":
            shape[1] //= self._ranks
        return dataclasses.replace(whole, shape=tuple(shape))

    def _name(self, name: str) -> str:
        """Return the whole model's name of a tensor; heads' matrices are numbered within the rank."""
        of_head = _OF_HEAD.fullmatch(name)
        if of_head is None:
            return name
        number = int(of_head[2]) + self._rank * self._heads
        whole = f"{of_head[1]}{number}{of_head[3]}"
        return whole if whole in self._whole else name  # `__iter__` has the names of all heads

    def __getitem__(self, name: str) -> NDArray[Any] | Packed:
        name = self._name(name)
        tensor: NDArray[Any] | Packed = self._whole[name]
        if _BY_OUTPUTS.search(name):
            return self._rows(tensor, self._kv_parts if _OF_KV.search(name) else self._ranks)
        found = _BY_INPUTS.search(name)
        if found is None:
            return tensor
        if found[1] == "bias":  # added once
            return tensor if self._rank == 0 else np.zeros_like(tensor)
        part = self._columns(name, tensor)
        self._partial[id(part)] = part
        return part

    def __iter__(self) -> Iterator[str]:
        return iter(self._whole)

    def __len__(self) -> int:
        return len(self._whole)

    def __contains__(self, name: object) -> bool:
        return name in self._whole

    def take_partial(self, tensors: list[Any]) -> bool:
        """Tell whether the tensors, just read, are parts of a sum over ranks."""
        partial = any(id(tensor) in self._partial for tensor in tensors)
        self._partial.clear()
        return partial

    def _span(self, size: int, parts: int) -> slice:
        part, number = size // parts, self._rank * parts // self._ranks
        return slice(number * part, (number + 1) * part)

    def _rows(self, tensor: NDArray[Any] | Packed, parts: int) -> NDArray[Any] | Packed:
        span = self._span(len(tensor), parts)
        if isinstance(tensor, np.ndarray):
            return tensor[span]
        return tensor.rows(lambda array: np.ascontiguousarray(array[span]))

    def _columns(self, name: str, tensor: NDArray[Any] | Packed) -> NDArray[Any] | Quantized:
        inner = tensor.shape[1]
        if isinstance(tensor, np.ndarray):
            return np.ascontiguousarray(tensor[:, self._span(inner, self._ranks)])
        if isinstance(tensor, Quantized):
            shares = [inner // array.shape[1] for array in tensor.arrays]
            if not any((inner // self._ranks) % share for share in shares):
                return tensor.rows(
                    lambda array: np.ascontiguousarray(array[:, self._span(array.shape[1], self._ranks)])
                )
        raise ModelError(
            f"{name}: its codes cannot be cut into {self._ranks} parts; use --weights bf16, or leave tp out"
        )
