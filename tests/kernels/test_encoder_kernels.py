"""Layer norm, activations and bidirectional attention on every kernel set, against their plain definition."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest

from cairn.types.model_spec import BLOCK_TOKENS
from tests.kernels.arguments import random

HEADS, SIZE = 3, 20


@pytest.mark.parametrize("width", [1, 15, 16, 17, 48, 100])
def test_layer_norm(kernels: Any, width: int) -> None:
    x, weight, bias = 3 * random(5, width) + 100, random(width, seed=1), random(width, seed=2)
    exact = x.astype(np.float64)
    moved = exact - exact.mean(axis=1, keepdims=True)
    normed = moved / np.sqrt((moved**2).mean(axis=1, keepdims=True) + 1e-5)
    out = kernels.allocate(x.shape, "float32")
    kernels.layer_norm(x, weight, bias, 1e-5, out)
    np.testing.assert_allclose(out, normed * weight + bias, atol=2e-4)
    kernels.layer_norm(x, weight, None, 1e-5, out)
    np.testing.assert_allclose(out, normed * weight, atol=2e-4)
    kernels.layer_norm(x, weight, None, 1e-5, x)
    assert x.tobytes() == out.tobytes(), "in place"


MEANING: dict[str, Any] = {
    "gelu": lambda x: x * 0.5 * math.erfc(-x / math.sqrt(2)),
    "gelu_tanh": lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x / (1 + math.exp(-x)),
    "tanh": math.tanh,
}


@pytest.mark.parametrize("name", MEANING)
def test_activations(kernels: Any, name: str) -> None:
    x = np.concatenate([np.linspace(-12, 12, 977), [0, -0.0, 1e-20]]).astype(np.float32)[None].repeat(3, axis=0)
    out = kernels.allocate(x.shape, "float32")
    kernels.activate(x, name, out)
    want = np.array([[MEANING[name](float(one)) for one in x[0]]])
    np.testing.assert_allclose(out, want.repeat(3, axis=0), atol=4e-7, rtol=4e-7)
    gated = kernels.allocate((1, 490), "float32")
    kernels.gate(x[:1], name, gated)
    np.testing.assert_allclose(gated, want[:, :490] * x[:1, 490:], atol=1e-5)


def packed(lengths: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return rows, tables and slots of concatenated texts, each in blocks of its own in shuffled order."""
    rows, tables, slots, first, block = [], np.full((len(lengths), 160), -1, np.int32), list[int](), 0, 0
    total = sum(-(-length // BLOCK_TOKENS) for length in lengths)
    for number, length in enumerate(lengths):
        blocks = [total - 1 - one for one in range(block, block - (-length // BLOCK_TOKENS))]
        tables[number, : len(blocks)] = blocks
        rows.append((first, length, 0))
        slots += [blocks[at // BLOCK_TOKENS] * BLOCK_TOKENS + at % BLOCK_TOKENS for at in range(length)]
        first, block = first + length, block + len(blocks)
    return np.array(rows, np.int32), tables, np.array(slots, np.int32)


def attended(kernels: Any, lengths: list[int], qkv: np.ndarray, window: int, dtype: str = "float32") -> np.ndarray:
    """Return the attention of texts with concatenated q, k, v; every unused slot holds garbage."""
    rows, tables, slots = packed(lengths)
    count, blocks = len(qkv), int(tables.max()) + 1
    kv = kernels.allocate((blocks, 1, 2, HEADS, BLOCK_TOKENS, SIZE), dtype)
    kv[:] = np.nan
    angles, query = np.zeros((count, 2, SIZE // 2), np.float32), np.zeros((count, HEADS, SIZE), np.float32)
    angles[:, 0] = 1
    kernels.rope_write(qkv, angles, None, None, 1e-6, kv, 0, slots, query)
    out = np.zeros((count, HEADS * SIZE), np.float32)
    kernels.attention(query, kv, 0, rows, tables, window, 0.3, out, 0.0, True)
    return out


def meaning(lengths: list[int], qkv: np.ndarray, window: int) -> np.ndarray:
    out, first = np.zeros((len(qkv), HEADS * SIZE)), 0
    for length in lengths:
        q, k, v = qkv[first : first + length].reshape(length, 3, HEADS, SIZE).astype(np.float64).swapaxes(0, 1)
        scores = 0.3 * np.einsum("qhd,khd->hqk", q, k)
        if window:
            at = np.arange(length)
            scores[:, np.abs(at[:, None] - at) >= window] = -np.inf
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        weights /= weights.sum(axis=2, keepdims=True)
        out[first : first + length] = np.einsum("hqk,khd->qhd", weights, v).reshape(length, -1)
        first += length
    return out


@functools.cache
def meaning_of_normal(lengths: tuple[int, ...], window: int) -> np.ndarray:
    """Compute the expected attention once, since it is the same for every kernel set."""
    return meaning(list(lengths), random(sum(lengths), 3 * HEADS * SIZE), window)


LENGTHS = [1, 7, 16, 17, 48, 49, 64, 65, 130, 300]


@pytest.mark.parametrize("window", [0, 1, 5, 65, 128, 1000])
def test_attention_in_both_directions(kernels: Any, window: int) -> None:
    qkv = random(sum(LENGTHS), 3 * HEADS * SIZE)
    out = attended(kernels, LENGTHS, qkv, window)
    np.testing.assert_allclose(out, meaning_of_normal(tuple(LENGTHS), window), atol=2e-5)
    first = 0
    for length in LENGTHS:  # alone, bit for bit
        alone = attended(kernels, [length], qkv[first : first + length], window)
        assert alone.tobytes() == out[first : first + length].tobytes()
        first += length


@pytest.mark.parametrize("window", [0, 1050])
def test_texts_of_several_segments(kernels: Any, window: int) -> None:
    lengths = [1023, 1090]
    qkv = random(sum(lengths), 3 * HEADS * SIZE)
    out = attended(kernels, lengths, qkv, window)
    np.testing.assert_allclose(out, meaning_of_normal(tuple(lengths), window), atol=2e-5)
    assert attended(kernels, lengths[1:], qkv[1023:], window).tobytes() == out[1023:].tobytes()


@pytest.mark.parametrize("dtype", ["float16"])
def test_narrow_keys_and_values(kernels: Any, dtype: str) -> None:
    qkv = random(sum(LENGTHS), 3 * HEADS * SIZE)
    np.testing.assert_allclose(attended(kernels, LENGTHS, qkv, 20, dtype), meaning(LENGTHS, qkv, 20), atol=5e-3)


def test_no_masked_value_reaches_an_output(kernels: Any) -> None:
    qkv = random(100, 3 * HEADS * SIZE)
    before = attended(kernels, [100], qkv, 9)
    qkv[50] = np.nan
    after = attended(kernels, [100], qkv, 9)
    far = np.abs(np.arange(100) - 50) >= 9
    assert after[far].tobytes() == before[far].tobytes() and np.isnan(after[~far]).all()
