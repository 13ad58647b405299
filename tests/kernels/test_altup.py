"""AltUp streams, sparse gates and shares of experts, on every kernel set."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.kernels.arguments import random

TOKENS, STREAMS, WIDTH = 7, 3, 37


def test_streams_are_mixed_and_corrected(kernels: Any) -> None:
    x, parts = random(TOKENS, STREAMS, WIDTH), random(TOKENS, STREAMS * STREAMS, seed=1)
    out = np.empty_like(x)
    kernels.mix_streams(x, parts, out)
    want = x + np.einsum("mji,mih->mjh", parts.reshape(TOKENS, STREAMS, STREAMS), x)
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-5)
    inputs, shares = random(TOKENS, WIDTH, seed=2), random(TOKENS, STREAMS, seed=3)
    want = out + (shares[:, :, None] + 1) * (inputs - out[:, 1])[:, None]
    kernels.correct_streams(inputs, shares, 1, out)
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-5)


def test_a_stream_is_read_written_and_added(kernels: Any) -> None:
    x, one = random(TOKENS, STREAMS, WIDTH), random(TOKENS, WIDTH, seed=1)
    taken, want = np.empty((TOKENS, WIDTH), np.float32), x.copy()
    kernels.take_stream(x, 2, taken)
    assert (taken == x[:, 2]).all()
    kernels.put_stream(one, 1, x)
    want[:, 1] = one
    assert (x == want).all()
    kernels.add_streams(one, 1, x)
    want[:, 1:] += one[:, None]
    np.testing.assert_allclose(x, want, rtol=1e-6)


def test_a_stream_becomes_as_long_as_another(kernels: Any) -> None:
    x, like = random(TOKENS, WIDTH), 5 * random(TOKENS, WIDTH, seed=1)
    x[3] = 1e-5  # which is taken for longer than it is
    magnitude = np.maximum(np.square(x).mean(1, keepdims=True), 1e-5)
    want = x * np.sqrt(np.square(like).mean(1, keepdims=True)) / np.sqrt(magnitude)
    kernels.match_magnitude(like, x)
    np.testing.assert_allclose(x, want, rtol=1e-5)


def test_gates_far_enough_above_their_mean_pass(kernels: Any) -> None:
    gates = random(TOKENS, 2 * WIDTH) + 0.3
    own, others = gates[:, :WIDTH].copy(), gates[:, WIDTH:].copy()
    least = own.mean(1, keepdims=True) + 0.8 * own.std(1, keepdims=True)
    kernels.sparsify(gates, 0.8)
    np.testing.assert_allclose(gates[:, :WIDTH], np.maximum(own - least, 0), rtol=1e-4, atol=1e-6)
    assert (gates[:, WIDTH:] == others).all() and 0.05 < (gates[:, :WIDTH] > 0).mean() < 0.4


def test_columns_tokens_and_shares_are_scaled(kernels: Any) -> None:
    x, weight, out = random(TOKENS, WIDTH), random(WIDTH, seed=1), np.empty((TOKENS, WIDTH), np.float32)
    kernels.scale_columns(x, weight, out)
    assert (out == x * weight).all()
    shares = random(TOKENS, 1, seed=2)
    want = x * shares
    kernels.scale_tokens(x, shares, out)
    assert (out == want).all() and (shares == 1).all()
    chosen = np.random.default_rng(3).integers(0, 5, (TOKENS, 2)).astype(np.int32)
    shares, factors = random(TOKENS, 2, seed=4), random(5, seed=5)
    want = shares * factors[chosen]
    kernels.scale_shares(shares, chosen, factors)
    assert (shares == want).all()
