"""Each reference kernel against its definition in plain numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cairn.kernels import reference
from cairn.kernels.reference import ReferenceKernels, rms_norm
from cairn.types.model_spec import BLOCK_TOKENS
from tests.kernels.arguments import random


@pytest.fixture
def kernels() -> Any:
    made = ReferenceKernels()
    yield made
    made.close()


def test_norm_is_the_same_bits_for_a_row_alone() -> None:
    for size in (1, 2, 7, 8, 48, 129, 256, 1000, 4097):
        x, weight = random(19, size), random(size, seed=1)
        whole = rms_norm(x, weight, 1e-6)
        wide = x.astype(np.float64)
        want = weight * wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6)
        np.testing.assert_allclose(whole, want, rtol=2e-5, atol=1e-6)
        assert all(rms_norm(x[row : row + 1], weight, 1e-6).tobytes() == whole[row].tobytes() for row in range(19))


@pytest.mark.parametrize("name", ["silu", "gelu_tanh"])
def test_activation_is_the_same_bits_wherever_a_number_stands(name: str) -> None:
    x = 9 * random(1001)
    act = reference.ACTIVATIONS[name]
    whole = act(x)
    for low, high in [(0, 1), (1, 18), (500, 533), (1000, 1001)]:
        assert act(x[low:high].copy()).tobytes() == whole[low:high].tobytes()
    with np.errstate(all="ignore"):
        far = act(np.array([-1000, -90, 90, 1000], np.float32))
    np.testing.assert_array_equal(far, [0, 0, 90, 1000])


def test_rope_write_touches_its_slots_only(kernels: Any) -> None:
    heads, kv_heads, size, tokens = 6, 2, 8, 5
    qkv, angles = random(tokens, (heads + 2 * kv_heads) * size), random(tokens, 2, size // 2, seed=1)
    slots = np.array([3, 0, 37, 17, 31], np.int32)
    kv = np.full((3, 2, 2, kv_heads, BLOCK_TOKENS, size), 7, np.float32)
    query = np.empty((tokens, heads, size), np.float32)
    kernels.rope_write(qkv, angles, None, None, 1e-6, kv, 1, slots, query)
    split = qkv.reshape(tokens, heads + 2 * kv_heads, size)

    def turned(x: Any, token: int) -> Any:
        cos, sin = angles[token]
        a, b = x[..., : size // 2], x[..., size // 2 :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    want = np.full_like(kv, 7)
    for token, slot in enumerate(slots):
        want[slot // 16, 1, 0, :, slot % 16] = turned(split[token, heads : heads + kv_heads], token)
        want[slot // 16, 1, 1, :, slot % 16] = split[token, heads + kv_heads :]
        np.testing.assert_allclose(query[token], turned(split[token, :heads], token), atol=1e-6)
    np.testing.assert_allclose(kv, want, atol=1e-6)


def test_head_norms_come_before_rotation(kernels: Any) -> None:
    qkv, weight = random(3, 4 * 8), 1 + random(8, seed=3)
    angles = np.zeros((3, 2, 4), np.float32)
    angles[:, 0] = 1  # a rotation by nothing
    kv, query = np.zeros((1, 1, 2, 1, BLOCK_TOKENS, 8), np.float32), np.empty((3, 2, 8), np.float32)
    kernels.rope_write(qkv, angles, weight, 2 * weight, 1e-6, kv, 0, np.arange(3, dtype=np.int32), query)
    split = qkv.reshape(3, 4, 8)
    np.testing.assert_allclose(query, rms_norm(split[:, :2], weight, 1e-6), atol=1e-6)
    np.testing.assert_allclose(kv[0, 0, 0, 0, :3], rms_norm(split[:, 2], 2 * weight, 1e-6), atol=1e-6)
    np.testing.assert_array_equal(kv[0, 0, 1, 0, :3], split[:, 3])


def test_residual_kernels_add(kernels: Any) -> None:
    hidden, norm, x = random(11, 24), 1 + random(24, seed=1), random(11, 30, seed=2)
    gate, up, down, out = (
        random(*shape, seed=n) for n, shape in enumerate([(40, 24), (40, 24), (24, 40), (24, 30)], 3)
    )
    got = hidden.copy()
    kernels.project_add(x, kernels.matrix([out], [None]), got)
    np.testing.assert_allclose(got, hidden + x @ out.T, atol=1e-4)
    got = hidden.copy()
    kernels.gated_mlp(got, norm, 1e-6, kernels.matrix([gate, up], [None, None]), "silu", kernels.matrix([down], [None]))
    normed = rms_norm(hidden, norm, 1e-6)
    g = normed @ gate.T
    np.testing.assert_allclose(got, hidden + (g / (1 + np.exp(-g)) * (normed @ up.T)) @ down.T, atol=1e-3)


def test_logits_follow_the_requested_rows_in_order(kernels: Any) -> None:
    hidden, norm, head = random(9, 24), 1 + random(24, seed=1), random(50, 24, seed=2)
    out = np.empty((3, 50), np.float32)
    kernels.logits(hidden, np.array([8, 0, 8], np.int32), norm, 1e-6, kernels.matrix([head], [None]), out)
    np.testing.assert_allclose(out, rms_norm(hidden[[8, 0, 8]], norm, 1e-6) @ head.T, atol=1e-4)
    assert out[0].tobytes() == out[2].tobytes()
