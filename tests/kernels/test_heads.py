"""Norms, rotations and gates of heads in wider rows, on every kernel set, and the frequencies of rotations."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cairn.kernels.choose import load_kernels
from cairn.kernels.reference import layer_norm, rms_norm
from cairn.kernels.rope import frequencies
from cairn.types.model_spec import RopeScaling
from tests.tiny_models import KERNELS


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("size", [2, 16, 37, 256])
@pytest.mark.parametrize("kind", KERNELS)
def test_heads_are_normed_where_they_lie(kind: str, size: int, weighted: bool) -> None:
    rng = np.random.default_rng(size)
    x = rng.standard_normal((19, 7 * size), dtype=np.float32)
    weight = rng.standard_normal(size, dtype=np.float32) if weighted else None
    want = x.copy().reshape(19, 7, size)
    want[:, 2:5] = rms_norm(want[:, 2:5], np.ones(size, np.float32) if weight is None else weight, 1e-5)
    kernels = load_kernels(kind, 2)
    kernels.norm_heads(x, 2, 3, size, weight, 1e-5)
    kernels.close()
    np.testing.assert_allclose(x, want.reshape(x.shape), rtol=1e-5, atol=1e-6)
    assert (x.reshape(19, 7, size)[:, [0, 1, 5, 6]] == want[:, [0, 1, 5, 6]]).all()


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("size", [2, 16, 37, 256])
@pytest.mark.parametrize("kind", KERNELS)
def test_layer_norms_of_heads(kind: str, size: int, apart: bool, biased: bool) -> None:
    rng = np.random.default_rng(size)
    x = rng.standard_normal((19, 7 * size), dtype=np.float32) + np.float32(3)
    weight = rng.standard_normal(size * (3 if apart else 1), dtype=np.float32)
    bias = rng.standard_normal(size, dtype=np.float32) if biased else None
    want = x.astype(np.float64).reshape(19, 7, size)
    moved = want[:, 2:5] - want[:, 2:5].mean(axis=-1, keepdims=True)
    want[:, 2:5] = moved / np.sqrt(np.square(moved).mean(axis=-1, keepdims=True) + 1e-5) * weight.reshape(-1, size)
    want[:, 2:5] += 0 if bias is None else bias
    kernels = load_kernels(kind, 2)
    alone = x[3:4].copy()
    kernels.layer_norm_heads(x, 2, 3, size, weight, bias, 1e-5)
    kernels.layer_norm_heads(alone, 2, 3, size, weight, bias, 1e-5)
    kernels.close()
    np.testing.assert_allclose(x, want.reshape(x.shape), rtol=1e-5, atol=1e-5)
    assert (x.reshape(19, 7, size)[:, [0, 1, 5, 6]] == want[:, [0, 1, 5, 6]]).all()
    np.testing.assert_array_equal(alone[0], x[3])


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("width", [48, 70, 512])
@pytest.mark.parametrize("kind", KERNELS)
def test_logits_of_a_layer_norm(kind: str, width: int, biased: bool) -> None:
    """Computed from its parts, with the head's bias; other outputs of the call do not change the bits."""
    rng = np.random.default_rng(width)
    hidden = rng.standard_normal((9, width), dtype=np.float32) - np.float32(2)
    weight, bias = rng.standard_normal((2, width), dtype=np.float32)
    head = rng.standard_normal((33, width), dtype=np.float32), rng.standard_normal(33, dtype=np.float32)
    wanted, own = np.array([7, 0, 7, 3], np.int32), bias if biased else None
    kernels = load_kernels(kind, 2)
    matrix = kernels.matrix([head[0]], [head[1]])
    together, alone = np.zeros((4, 33), np.float32), np.zeros((1, 33), np.float32)
    kernels.layer_logits(hidden, wanted, weight, own, 1e-5, matrix, together)
    kernels.layer_logits(hidden, wanted[3:], weight, own, 1e-5, matrix, alone)
    kernels.close()
    want = layer_norm(hidden.astype(np.float64), weight, own, 1e-5)[wanted] @ head[0].T + head[1]  # type: ignore[arg-type]
    np.testing.assert_allclose(together, want, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(alone[0], together[3])
    np.testing.assert_array_equal(together[0], together[2])


@pytest.mark.parametrize("turned", [2, 10, 16])
@pytest.mark.parametrize("kind", KERNELS)
def test_heads_are_rotated_as_written_keys_are(kind: str, turned: int) -> None:
    rng = np.random.default_rng(turned)
    x = rng.standard_normal((9, 3 * 16), dtype=np.float32)
    angles = rng.standard_normal((9, 2, turned // 2), dtype=np.float32)
    got, want = np.zeros((9, 3, 16), np.float32), np.zeros((9, 3, 16), np.float32)
    kernels = load_kernels(kind, 1)
    kernels.turn_heads(x, angles, got)
    kv = kernels.allocate((1, 1, 2, 3, 16, 16), "float32")
    whole = np.concatenate([x, np.zeros((9, 2 * 3 * 16), np.float32)], axis=1)
    kernels.rope_write(whole, angles, None, None, 1e-6, kv, 0, np.arange(9, dtype=np.int32), want)
    kernels.close()
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", KERNELS)
def test_late_norms_follow_the_rotation(kind: str) -> None:
    rng = np.random.default_rng(1)
    qkv = rng.standard_normal((5, 4 * 20), dtype=np.float32)
    angle = rng.uniform(-3, 3, (5, 10))
    angles = np.stack([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)
    weight = (1 + 0.3 * rng.standard_normal(20)).astype(np.float32)
    turned, query = np.zeros((5, 2, 20), np.float32), np.zeros((5, 2, 20), np.float32)
    kernels = load_kernels(kind, 1)
    kv = kernels.allocate((1, 1, 2, 1, 16, 20), "float32")
    places = (1e-6, kv, 0, np.arange(5, dtype=np.int32))
    kernels.rope_write(qkv, angles, None, None, *places, turned)
    kernels.rope_write(qkv, angles, weight, weight, *places, query, True)
    kernels.close()
    np.testing.assert_allclose(query, rms_norm(turned, weight, 1e-6), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KERNELS)
def test_a_gate_and_a_factor(kind: str) -> None:
    rng = np.random.default_rng(2)
    x, by = rng.standard_normal((6, 21), dtype=np.float32), rng.standard_normal((6, 70), dtype=np.float32)
    wide = np.concatenate([x, by[:, 33:54]], axis=1)
    want, got, hidden = np.zeros_like(x), np.zeros_like(x), x.copy()
    kernels = load_kernels(kind, 1)
    kernels.gate(wide, "gelu_tanh", want)
    kernels.gate_with(x, "gelu_tanh", by, 33, got)
    kernels.scale_by(hidden, np.array([0.7], np.float32))
    kernels.close()
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(hidden, x * np.float32(0.7))


@pytest.mark.parametrize("kind", KERNELS)
def test_an_activation_with_two_numbers(kind: str) -> None:
    x = np.concatenate([np.linspace(-30, 30, 601), [0.0, -1e-7, -1e-6, 1e-6]]).astype(np.float32)[None]
    kernels = load_kernels(kind, 1)
    got = np.zeros_like(x)
    kernels.xielu(x, np.array([0.3], np.float32), np.array([-0.8], np.float32), got)
    kernels.close()
    wide, above, below = x.astype(np.float64), np.log1p(np.exp(0.3)), 0.5 + np.log1p(np.exp(-0.8))
    low = (np.expm1(np.minimum(wide, -1e-6)) - wide) * below
    np.testing.assert_allclose(got, np.where(wide > 0, above * wide * wide, low) + wide / 2, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("theta", [math.nextafter(1, 2), 1.5, 1e6])
def test_yarn_has_finite_frequencies_for_every_base(theta: float, truncate: bool) -> None:
    """Also for one hardly above 1, as a model file may have it."""
    scaling = RopeScaling(kind="yarn", factor=4.0, original_context=1 << 20, truncate=truncate)
    assert np.isfinite(frequencies(1024, theta, scaling).frequencies).all()
