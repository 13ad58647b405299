"""Each kernel against its meaning in plain float64, and the law of the same answer at the level of kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cairn.kernels import reference
from cairn.kernels.reference import SPAN, TILE, ReferenceKernels, rms_norm, tile_rows
from cairn.types import BLOCK_TOKENS

SHAPES = [(1, 1), (7, 5), (48, 160), (63, 65), (64, 1000), (96, 300), (256, 512), (640, 256), (1031, 77)]


@pytest.fixture
def kernels() -> Any:
    made = ReferenceKernels()
    yield made
    made.close()


def random(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize(("inner", "out"), SHAPES)
@pytest.mark.parametrize("rows", [TILE, 1])
def test_projection(inner: int, out: int, rows: int, kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right, and the same bits for a row alone, in any place and in any company; also with one row a call."""
    if rows == 1:
        monkeypatch.setattr(reference, "tile_rows", lambda *shape: 1)
    weight, bias, x = random(out, inner), random(out, seed=1), random(41, inner, seed=2)
    cut = out // 3
    matrix = kernels.matrix([weight[:cut], weight[cut:]], [None, bias[cut:]])
    assert matrix.rows == rows
    whole = kernels._project(x, matrix)
    want = x.astype(np.float64) @ weight.T.astype(np.float64) + np.where(np.arange(out) < cut, 0, bias)
    np.testing.assert_allclose(whole, want, atol=1e-5 * inner**0.5 * 3)
    for low, high in [(0, 1), (3, 11), (40, 41), (5, 41), (17, 18)]:
        assert kernels._project(x[low:high], matrix).tobytes() == whole[low:high].tobytes()


def test_no_shape_needs_one_row_a_call_here_and_the_check_would_see_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {tile_rows(inner, 256) for inner, _ in SHAPES} == {TILE}
    real = np.matmul

    def depends_on_its_place(left: Any, right: Any, **options: Any) -> Any:
        got = real(left, right, **options)
        got[..., -1, :] *= np.float32(1 + 1e-7)
        return got

    monkeypatch.setattr(reference.np, "matmul", depends_on_its_place)
    assert tile_rows(91, 16) == 1


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


def naive_attention(query: Any, keys: Any, values: Any, at: int, window: int, scale: float) -> Any:
    """One position in float64: query [Q, D]; keys, values [tokens, K, D]."""
    low = max(0, at - window + 1) if window else 0
    fan = query.shape[0] // keys.shape[1]
    out = []
    for head in range(query.shape[0]):
        k, v = (x[low : at + 1, head // fan].astype(np.float64) for x in (keys, values))
        scores = k @ query[head].astype(np.float64) * scale
        weights = np.exp(scores - scores.max())
        out.append(weights @ v / weights.sum())
    return np.concatenate(out)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 4, 16), (6, 2, 10), (8, 1, 6), (9, 1, 32), (4, 2, 64)])
@pytest.mark.parametrize("window", [0, 1, 5, 16, 70])
def test_attention(heads: int, kv_heads: int, size: int, window: int, kernels: Any) -> None:
    """Known failure 36: chunks and decodes in one call, each with its own mask, in blocks out of order."""
    rng = np.random.default_rng(0)
    rows = [(0, 1, 0), (1, 1, 131), (2, 37, 50), (39, 1, 63), (40, 64, 0), (104, 1, 64), (105, 3, 126)]
    tokens, width = 108, 12
    kv = np.full((width * len(rows), 3, 2, kv_heads, BLOCK_TOKENS, size), np.nan, np.float32)
    tables = np.full((len(rows), width), -1, np.int32)
    ids = rng.permutation(len(kv))
    query, out = random(tokens, heads, size, seed=4), np.empty((tokens, heads * size), np.float32)
    want = np.empty_like(out)
    for number, (first, count, start) in enumerate(rows):
        end = start + count
        keys, values = random(end, kv_heads, size, seed=number), random(end, kv_heads, size, seed=number + 50)
        low = max(0, start - window + 1) // BLOCK_TOKENS if window else 0
        for block in range(low, -(-end // BLOCK_TOKENS)):
            tables[number, block] = one = ids[number * width + block]
            part = slice(block * BLOCK_TOKENS, min(end, (block + 1) * BLOCK_TOKENS))
            kv[one, 1, 0, :, : part.stop - part.start] = keys[part].transpose(1, 0, 2)
            kv[one, 1, 1, :, : part.stop - part.start] = values[part].transpose(1, 0, 2)
        for place in range(count):
            want[first + place] = naive_attention(query[first + place], keys, values, start + place, window, 0.3)
    kernels.attention(query, kv, 1, np.array(rows, np.int32), tables, window, 0.3, out)
    np.testing.assert_allclose(out, want, atol=2e-6)
    for number, (first, count, start) in enumerate(rows):
        alone = np.empty((count, heads * size), np.float32)
        row = np.array([(0, count, start)], np.int32)
        kernels.attention(query[first : first + count], kv, 1, row, tables[number : number + 1], window, 0.3, alone)
        assert alone.tobytes() == out[first : first + count].tobytes()


def test_attention_is_cut_into_pieces_without_a_trace(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kv, query = random(20, 1, 2, 2, BLOCK_TOKENS, 16), random(300, 4, 16)
    tables, rows = np.arange(20, dtype=np.int32)[None], np.array([(0, 300, 0)], np.int32)
    whole, pieces = np.empty((300, 64), np.float32), np.empty((300, 64), np.float32)
    kernels.attention(query, kv, 0, rows, tables, 0, 0.25, whole)
    monkeypatch.setattr(reference, "_SCORES", 1)
    assert len(list(reference._pieces(rows.tolist(), 4, 0))) > 30
    kernels.attention(query, kv, 0, rows, tables, 0, 0.25, pieces)
    assert whole.tobytes() == pieces.tobytes()


def test_adding_span_results_is_a_sum_in_order() -> None:
    """What a short context gives does not change when the spans of a longer one are empty."""
    q, keys, values = random(1, 2, 1, TILE, 16), random(1, 2, 5, SPAN, 16), random(1, 2, 5, SPAN, 16, seed=1)
    seen = np.zeros((1, 1, 5, TILE, SPAN), bool)
    seen[:, :, 1:3] = True
    seen[:, :, 3, :, :9] = True
    long = reference._attend(q, keys, values, seen, 0.2)
    short = reference._attend(q, keys[:, :, 1:4], values[:, :, 1:4], seen[:, :, 1:4], 0.2)
    assert long.tobytes() == short.tobytes()


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


def test_logits_are_those_of_the_wanted_rows_in_order(kernels: Any) -> None:
    hidden, norm, head = random(9, 24), 1 + random(24, seed=1), random(50, 24, seed=2)
    out = np.empty((3, 50), np.float32)
    kernels.logits(hidden, np.array([8, 0, 8], np.int32), norm, 1e-6, kernels.matrix([head], [None]), out)
    np.testing.assert_allclose(out, rms_norm(hidden[[8, 0, 8]], norm, 1e-6) @ head.T, atol=1e-4)
    assert out[0].tobytes() == out[2].tobytes()
