"""Mixtures of experts: routing against plain sorting, products against each token's own sum, in any batch."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cairn.kernels.native import NativeKernels
from cairn.kernels.reference import ReferenceKernels, gated
from tests.kernels.arguments import random
from tests.kernels.test_quantized import in_blocks, meaning, quantized
from tests.tiny_models import KERNELS

EXPERTS, EACH, HIDDEN, WIDTH = 7, 3, 64, 40


def route(kernels: Any, scores: Any, each: int, kind: str = "softmax", **options: Any) -> tuple[Any, Any]:
    settings: dict[str, Any] = {"bias": None, "normed": False, "scale": 1.0, "groups": 1, "chosen_groups": 1, **options}
    chosen, shares = np.full((len(scores), each), -1, np.int32), np.zeros((len(scores), each), np.float32)
    order = (settings["normed"], settings["scale"], settings["groups"], settings["chosen_groups"])
    kernels.route(scores, settings["bias"], kind, *order, chosen, shares)
    return chosen, shares


@pytest.mark.parametrize("kind", ["softmax", "sigmoid", "chosen"])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_the_largest_parts_are_chosen_and_shared(kernels: Any, kind: str, normed: bool, biased: bool) -> None:
    scores = random(33, 24)
    bias = random(24, seed=1) if biased else None
    chosen, shares = route(kernels, scores, 5, kind, bias=bias, normed=normed, scale=1.5)
    wide = scores.astype(np.float64)
    parts = {
        "softmax": np.exp(wide) / np.exp(wide).sum(1, keepdims=True),
        "sigmoid": 1 / (1 + np.exp(-wide)),
        "chosen": wide,
    }[kind]
    for row in range(33):
        best = sorted(np.argsort(-(parts[row] + (0 if bias is None else bias)))[:5].tolist())
        assert chosen[row].tolist() == best
        want = parts[row][best]
        want = np.exp(want) / np.exp(want).sum() if kind == "chosen" else want
        want = 1.5 * (want / want.sum() if normed else want)
        np.testing.assert_allclose(shares[row], want, rtol=1e-5)


def test_only_the_best_groups_are_chosen_from(kernels: Any) -> None:
    """Four groups of three.

    The two with the largest sum of their best two are used, whatever other scores are large.
    """
    scores = np.array([[9, -9, -9, 2, 2, 1, 3, 3, -9, 4, -9, 2]], np.float32)
    scores = np.log(1 / (1 + np.exp(-scores)) / (1 - 1 / (1 + np.exp(-scores))))
    chosen, _ = route(kernels, scores, 4, "sigmoid", groups=4, chosen_groups=2)
    assert chosen.tolist() == [[6, 7, 9, 11]] or chosen.tolist() == [[3, 4, 6, 7]]
    sums = np.sort((1 / (1 + np.exp(-scores))).reshape(4, 3), axis=1)[:, -2:].sum(axis=1)
    assert sorted(set((chosen // 3).ravel().tolist())) == sorted(np.argsort(-sums)[:2].tolist())


@np.errstate(all="ignore")
def test_equal_scores_choose_the_first_and_no_number_chooses_some(kernels: Any) -> None:
    scores = np.zeros((3, 6), np.float32)
    scores[1] = np.nan
    scores[2, 2] = np.nan
    chosen, shares = route(kernels, scores, 4, "sigmoid")
    assert chosen.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 3, 4]]
    assert np.isfinite(shares[[0, 2]]).all() and np.isnan(shares[1]).all()


def test_each_row_is_routed_alone_as_in_a_batch(kernels: Any) -> None:
    scores, bias = random(300, 32), random(32, seed=5)
    options = {"bias": bias, "normed": True, "groups": 4, "chosen_groups": 2}
    chosen, shares = route(kernels, scores, 6, "sigmoid", **options)
    for low, high in [(0, 1), (1, 3), (3, 120), (120, 300)]:
        some, part = route(kernels, scores[low:high].copy(), 6, "sigmoid", **options)
        assert some.tobytes() == chosen[low:high].tobytes() and part.tobytes() == shares[low:high].tobytes()


FORMS: dict[str, Any] = {
    "f32": lambda out, inner, seed: random(out, inner, seed=seed) / 8,
    "f16": lambda out, inner, seed: (random(out, inner, seed=seed) / 8).astype(np.float16),
    "bf16": lambda out, inner, seed: (random(out, inner, seed=seed) / 8).astype(ml_dtypes.bfloat16),
    "int4": lambda out, inner, seed: quantized(out, inner, 4, np.float16, None, seed),
    "int8": lambda out, inner, seed: quantized(out, inner, 8, np.float32, None, seed),
    "q4_k": lambda out, inner, seed: in_blocks(out, inner, 4, seed),
    "q6_k": lambda out, inner, seed: in_blocks(out, inner, 6, seed),
}


def mixture(form: str, hidden: int, width: int, experts: int = EXPERTS) -> tuple[list[Any], list[Any]]:
    """Return (gate, up) and their bias, and down and its bias, for each expert."""
    make = FORMS[form]
    wide = [
        ([make(width, hidden, 10 * e), make(width, hidden, 10 * e + 1)], random(2 * width, seed=e))
        for e in range(experts)
    ]
    back = [(make(hidden, width, 10 * e + 2), random(hidden, seed=e + 50)) for e in range(experts)]
    return wide, back


def built(kernels: Any, wide: list[Any], back: list[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    half = len(wide[0][1]) // 2
    gate_up = tuple(kernels.matrix(parts, [bias[:half], bias[half:]]) for parts, bias in wide)
    return gate_up, tuple(kernels.matrix([part], [bias]) for part, bias in back)


def answered(kernels: Any, x: Any, chosen: Any, shares: Any, matrices: Any, activation: str = "silu") -> Any:
    out = np.full_like(x, np.nan)
    kernels.experts(x, chosen, shares, matrices[0], activation, matrices[1], out)
    return out


def choices(rows: int, experts: int = EXPERTS, each: int = EACH, seed: int = 3) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    chosen = np.stack([np.sort(rng.permutation(experts)[:each]) for _ in range(rows)]).astype(np.int32)
    return chosen, rng.random((rows, each), np.float32)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("activation", ["silu", "clamped_silu"])
@np.errstate(all="ignore")
def test_experts_give_each_token_its_own_sum(kernels: Any, form: str, activation: str) -> None:
    hidden, width = (256, 256) if form in ("q4_k", "q6_k") else (64, 96)
    wide, back = mixture(form, hidden, width)
    x, (chosen, shares) = random(21, hidden), choices(21)
    got = answered(kernels, x, chosen, shares, built(kernels, wide, back), activation)
    want = np.zeros_like(x, np.float64)
    for row in range(21):
        for expert, share in zip(chosen[row], shares[row], strict=True):
            gates = (meaning(x[row : row + 1], wide[expert][0]) + wide[expert][1]).astype(np.float32)
            passed = gated(gates, activation)
            want[row] += share * (meaning(passed, [back[expert][0]])[0] + back[expert][1])
    # A rounding near a tie may shift gated codes by one; bfloat16 pairs round activations.
    close = 0.05 if form not in ("f32", "f16") else 1e-4
    np.testing.assert_allclose(got, want, atol=close * np.abs(want).max(), rtol=0)


@pytest.mark.parametrize("form", FORMS)
@np.errstate(all="ignore")
def test_a_token_s_sum_does_not_know_its_batch(kernels: Any, form: str) -> None:
    """Alone, among few and among many, all to one expert or spread: every bit is the same (known failure 36)."""
    hidden, width = (256, 256) if form in ("q4_k", "q6_k") else (64, 96)
    matrices = built(kernels, *mixture(form, hidden, width))
    x, (chosen, shares) = random(700, hidden, seed=9), choices(700)
    chosen[:200] = [0, 2, 6]  # experts with many rows beside some with few
    whole = answered(kernels, x, chosen, shares, matrices)
    for low, high in [(0, 1), (1, 2), (2, 19), (150, 260), (260, 700)]:
        some = slice(low, high)
        alone = answered(kernels, x[some].copy(), chosen[some].copy(), shares[some].copy(), matrices)
        assert alone.tobytes() == whole[some].tobytes(), (low, high)


@pytest.mark.parametrize("variant", [name for name in KERNELS if name != "reference"])
def test_any_number_of_threads_gives_the_same_bits(variant: str) -> None:
    results = []
    for threads in (1, 2, 3):
        kernels = NativeKernels(variant, threads)
        matrices = built(kernels, *mixture("int4", 128, 160))
        x, (chosen, shares) = random(90, 128, seed=9), choices(90)
        results.append(answered(kernels, x, chosen, shares, matrices).tobytes())
        kernels.close()
    assert len(set(results)) == 1


@np.errstate(all="ignore")
def test_a_token_without_numbers_harms_no_other(kernels: Any) -> None:
    matrices = built(kernels, *mixture("int4", 64, 96))
    x, (chosen, shares) = random(12, 64), choices(12)
    clean = answered(kernels, x, chosen, shares, matrices)
    x[5, 3] = np.nan
    got = answered(kernels, x, chosen, shares, matrices)
    assert np.isnan(got[5]).any()
    assert np.delete(got, 5, axis=0).tobytes() == np.delete(clean, 5, axis=0).tobytes()


def test_a_gate_decides_how_much_of_a_shared_expert_is_added(kernels: Any) -> None:
    x, gate, hidden = random(5, 48), random(5, 1, seed=1), random(5, 48, seed=2)
    want = hidden + x / (1 + np.exp(-gate))
    kernels.add_gated(x, gate, hidden)
    np.testing.assert_allclose(hidden, want, rtol=1e-5, atol=1e-6)


def heads(kernels: Any, qkv: Any, angles: Any, q_norm: Any, k_norm: Any, q_heads: int, size: int) -> tuple[Any, Any]:
    """Return q [M, Q, D] as produced, and k as attention sees it: scores of unit queries with keys."""
    tokens, kv_heads = len(qkv), (qkv.shape[1] // size - q_heads) // 2
    kv = np.zeros((1, 1, 2, kv_heads, 16, size), np.float32)
    query = np.zeros((tokens, q_heads, size), np.float32)
    kernels.rope_write(qkv, angles, q_norm, k_norm, 1e-6, kv, 0, np.arange(tokens, dtype=np.int32), query)
    page = kv[0, 0, 0]
    keys = page if isinstance(kernels, ReferenceKernels) else page.reshape(kv_heads, size, 16).swapaxes(1, 2)
    return query, keys[:, :tokens].swapaxes(0, 1)


@pytest.mark.parametrize("turned", [0, 4, 18, 36, 40])
@pytest.mark.parametrize("whole", [False, True])
def test_heads_are_turned_in_part_and_normed_together(kernels: Any, turned: int, whole: bool) -> None:
    q_heads, kv_heads, size, tokens = 4, 2, 40, 9
    qkv = random(tokens, (q_heads + 2 * kv_heads) * size)
    angles = random(tokens, 2, turned // 2, seed=1) if turned else None
    q_norm, k_norm = (random(n * size if whole else size, seed=n) for n in (q_heads, kv_heads))
    query, keys = heads(kernels, qkv, angles, q_norm, k_norm, q_heads, size)
    for got, first, weight, count in ((query, 0, q_norm, q_heads), (keys, q_heads, k_norm, kv_heads)):
        x = qkv.reshape(tokens, -1, size)[:, first : first + count].astype(np.float64)
        axes: Any = (1, 2) if whole else 2
        x = x / np.sqrt((x**2).mean(axis=axes, keepdims=True) + 1e-6) * weight.reshape(-1, size)
        want = x.copy()
        if angles is not None:
            half = turned // 2
            cos, sin = angles[:, None, 0], angles[:, None, 1]
            want[..., :half] = x[..., :half] * cos - x[..., half:turned] * sin
            want[..., half:turned] = x[..., half:turned] * cos + x[..., :half] * sin
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("window", [0, 33])
def test_a_sink_takes_its_share(kernels: Any, window: int) -> None:
    """Also when it is the largest score or far below, across a span's end, and for one token or many."""
    q_heads, kv_heads, size, tokens = 4, 2, 24, 80
    sinks = np.array([-30.0, 0.5, 3.0, 40.0], np.float32)
    qkv = random(tokens, (q_heads + 2 * kv_heads) * size)
    kv = np.zeros((5, 1, 2, kv_heads, 16, size), np.float32)
    query = np.zeros((tokens, q_heads, size), np.float32)
    kernels.rope_write(qkv, None, None, None, 1e-6, kv, 0, np.arange(tokens, dtype=np.int32), query)
    table = np.arange(5, dtype=np.int32)[None]
    out = np.zeros((tokens, q_heads * size), np.float32)
    kernels.attention(query, kv, 0, np.array([[0, tokens, 0]], np.int32), table, window, 0.2, out, 0.0, False, sinks)
    split = qkv.reshape(tokens, -1, size).astype(np.float64)
    for head in range(q_heads):
        k, v = split[:, q_heads + head // 2], split[:, q_heads + kv_heads + head // 2]
        for at in range(tokens):
            low = max(0, at - window + 1) if window else 0
            weights = np.exp(np.append(0.2 * split[at, head] @ k[low : at + 1].T, sinks[head]) - 41)
            want = weights[:-1] @ v[low : at + 1] / weights.sum()
            np.testing.assert_allclose(out[at].reshape(q_heads, size)[head], want, rtol=1e-4, atol=1e-5)
    for at in (0, 63, 79):
        alone = np.zeros((1, q_heads * size), np.float32)
        row = np.array([[0, 1, at]], np.int32)
        kernels.attention(query[at : at + 1].copy(), kv, 0, row, table, window, 0.2, alone, 0.0, False, sinks)
        assert alone.tobytes() == out[at : at + 1].tobytes()


def test_queries_grow_with_their_positions_and_logits_are_scaled(kernels: Any) -> None:
    positions = np.array([0, 99, 100, 12345], np.int32)
    query = random(4, 2, 8)
    want = query * (1 + 0.1 * np.log1p(np.array([0, 0, 1, 123.0])))[:, None, None]
    kernels.scale_queries(query, positions, 0.1, 100.0)
    np.testing.assert_allclose(query, want, rtol=1e-5)
    query = random(4, 2, 8)
    want = query * (1 + 0.1 * np.log1p(np.array([0, 1, 1, 123.0])))[:, None, None]
    kernels.scale_queries(query, positions, 0.1, 100.0, 1)
    np.testing.assert_allclose(query, want, rtol=1e-5)
    logits = random(3, 40)
    want = logits * np.float32(0.25)
    kernels.scale_logits(logits, 0.25)
    assert logits.tobytes() == want.tobytes()
