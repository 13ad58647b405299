"""One layer on a device beside the same layer in numpy, so that a device that computes wrong numbers never serves."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cairn.kernels.base import GROUP, Kernels, Quantized
from cairn.kernels.reference import ReferenceKernels
from cairn.types.model_spec import BLOCK_TOKENS, RopeScaling

ALLOWED = 2e-3
"""Tolerated difference, as a share of the largest number in the array."""
_PACKED = "project of 8 bits"
_ALLOWED_PACKED = 2e-2
"""The same for products with packed weights: numpy rounds activations to 8 bits, and a device may round them less."""
_HIDDEN, _HEADS, _KV_HEADS, _SIZE, _TOKENS = 64, 4, 2, 16, 21


def worst(kernels: Kernels) -> tuple[str, float]:
    """Return the kernel with the largest difference from numpy in a layer, and the difference in tolerances."""
    reference = ReferenceKernels()
    try:
        pairs = zip(_layer(kernels), _layer(reference), strict=True)
        found = [(name, _off(name, ours, theirs)) for (name, ours), (_, theirs) in pairs]
    finally:
        reference.close()
    return max(found, key=lambda one: one[1])


def _off(name: str, ours: NDArray[Any], theirs: NDArray[Any]) -> float:
    """Return the largest difference as a multiple of the tolerance; infinity if a number is not finite."""
    difference = np.abs(ours.astype(np.float64) - theirs.astype(np.float64)).max()
    allowed = _ALLOWED_PACKED if name == _PACKED else ALLOWED
    return float(difference / (allowed * np.abs(theirs).max())) if np.isfinite(difference) else float("inf")


def _layer(k: Kernels) -> list[tuple[str, NDArray[Any]]]:
    """Compute a layer over one row of tokens; return each kernel's name and result."""
    rng = np.random.default_rng(7)
    found: list[tuple[str, NDArray[Any]]] = []

    def floats(*shape: int) -> NDArray[np.float32]:
        return rng.standard_normal(shape).astype(np.float32)

    def given(numbers: NDArray[Any]) -> Any:
        array = k.allocate(numbers.shape, str(numbers.dtype))
        mirror = k.mirror(array)
        mirror[...] = numbers
        k.upload([(array, mirror)])
        return array

    def empty(*shape: int) -> Any:
        return k.allocate(shape, "float32")

    def run(kernel: str, out: Any, call: Callable[..., None], *arguments: Any) -> Any:
        call(*arguments)
        found.append((kernel, np.array(k.fetch(out))))
        return out

    blocks = -(-_TOKENS // BLOCK_TOKENS)
    wide = (_HEADS + 2 * _KV_HEADS) * _SIZE
    codes = rng.integers(-127, 128, (_HIDDEN, _HIDDEN)).astype(np.int8)
    packed = Quantized(8, codes, np.full((_HIDDEN, _HIDDEN // GROUP), 2.0**-9, np.float32))
    tokens, positions = given(rng.integers(0, 32, _TOKENS).astype(np.int32)), np.arange(_TOKENS, dtype=np.int32)
    hidden, normed = empty(_TOKENS, _HIDDEN), empty(_TOKENS, _HIDDEN)
    run("embed", hidden, k.embed, k.table(floats(32, _HIDDEN)), tokens, hidden)
    run("norm", normed, k.norm, hidden, k.vector(floats(_HIDDEN)), 1e-6, normed)
    qkv, angles = empty(_TOKENS, wide), empty(_TOKENS, 2, _SIZE // 2)
    run("project", qkv, k.project, normed, k.matrix([floats(wide, _HIDDEN) / 8], [None]), qkv)
    run("rope_angles", angles, k.rope_angles, k.rope(_SIZE, 10000.0, RopeScaling()), given(positions), angles)
    kv, query = empty(blocks + 1, 1, 2, _KV_HEADS, BLOCK_TOKENS, _SIZE), empty(_TOKENS, _HEADS, _SIZE)
    slots = given(positions + BLOCK_TOKENS)
    run("rope_write", kv, k.rope_write, qkv, angles, None, None, 1e-6, kv, 0, slots, query)
    rows, members = given(np.array([[0, _TOKENS, 0]], np.int32)), given(np.zeros(_TOKENS, np.int32))
    table = given(np.arange(1, blocks + 1, dtype=np.int32)[None])
    attended, apart = empty(_TOKENS, _HEADS * _SIZE), empty(_TOKENS, _HIDDEN)
    places = (query, kv, 0, rows, table, 0, 1 / math.sqrt(_SIZE), attended, 0.0, False, None, members)
    run("attention", attended, k.attention, *places)
    run(_PACKED, apart, k.project, attended, k.matrix([packed], [None]), apart)
    run("project", normed, k.project, attended, k.matrix([floats(_HIDDEN, _HIDDEN) / 8], [None]), normed)
    run("add", hidden, k.add, normed, hidden)
    gates, gated = empty(_TOKENS, 4 * _HIDDEN), empty(_TOKENS, 2 * _HIDDEN)
    run("project", gates, k.project, hidden, k.matrix([floats(4 * _HIDDEN, _HIDDEN) / 8], [None]), gates)
    run("gate", gated, k.gate, gates, "silu", gated)
    heads, weight, bias = k.vector(floats(_HEADS * _SIZE)), k.vector(floats(_HIDDEN)), k.vector(floats(_HIDDEN))
    run("layer_norm", normed, k.layer_norm, hidden, weight, bias, 1e-5, normed)
    run("layer_norm_heads", qkv, k.layer_norm_heads, qkv, 0, _HEADS, _SIZE, heads, None, 1e-5)
    last, head = empty(2, 32), k.matrix([floats(32, _HIDDEN) / 8], [floats(32)])
    wanted = given(np.array([_TOKENS - 1, 3], np.int32))
    run("layer_logits", last, k.layer_logits, hidden, wanted, weight, bias, 1e-5, head, last)
    return found
