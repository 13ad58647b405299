"""Kernels that keep a state, against their plain definition, with the same bits however a sequence is cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cairn.kernels.recurrent import kept
from tests.kernels.arguments import random

LENGTH, BLOCKS, LAYERS = 75, 24, 2
CUTS = [[LENGTH], [1] * LENGTH, [16, 16, 16, 16, 11], [5, 2, 40, 28], [31, 1, 1, 42]]


class Case:
    """One kernel with its inputs for LENGTH tokens; `run` computes some of them."""

    out: int
    numbers: int

    def run(self, kernels: Any, tokens: slice, states: Any, rows: Any, tables: Any, out: Any) -> None:
        raise NotImplementedError

    def want(self) -> Any:
        """Return the whole output in float64, from the formulas."""
        raise NotImplementedError


class Conv(Case):
    """A convolution whose inputs stand in the middle of x."""

    def __init__(self, channels: int = 37, reach: int = 4, silu: bool = True, gated: bool = False, bias: bool = True):
        self.out, self.reach, self.silu, self.gated = channels, reach, silu, gated
        self.numbers = (reach - 1) * channels + 5
        self.x = random(LENGTH, 3 * channels, seed=1)
        self.weight, self.bias = random(reach * channels, seed=2), random(channels, seed=3) if bias else None

    def run(self, kernels: Any, tokens: slice, states: Any, rows: Any, tables: Any, out: Any) -> None:
        first = 0 if self.gated else 7
        x = self.x[tokens].copy()
        kernels.convolve(x, first, self.weight, self.bias, self.silu, self.gated, states, 1, rows, tables, out)

    def want(self) -> Any:
        wide, c = self.x.astype(np.float64), self.out
        inputs = wide[:, :c] * wide[:, 2 * c :] if self.gated else wide[:, 7 : 7 + c]
        padded = np.concatenate([np.zeros((self.reach - 1, c)), inputs])
        summed = sum(padded[i : i + LENGTH] * self.weight[i * c : (i + 1) * c] for i in range(self.reach))
        summed = summed if self.bias is None else summed + self.bias
        summed = summed / (1 + np.exp(-summed)) if self.silu else summed
        return summed * wide[:, c : 2 * c] if self.gated else summed


class Delta(Case):
    """The gated delta rule."""

    def __init__(self, heads: int = 4, key_heads: int = 2, key: int = 12, value: int = 20, tiled: bool = False):
        self.shape, self.tiled, self.out = (heads, key_heads, key, value), tiled, heads * value
        self.numbers = 11 + heads * key * value
        self.x, self.gates = (
            random(LENGTH, 2 * key_heads * key + self.out, seed=1),
            random(LENGTH, 3 + 2 * heads, seed=2),
        )
        self.decay, self.bias = -np.exp(random(heads, seed=3)), random(heads, seed=4)

    def run(self, kernels: Any, tokens: slice, states: Any, rows: Any, tables: Any, out: Any) -> None:
        arguments = (self.x[tokens].copy(), self.gates[tokens].copy(), 3, self.decay, self.bias)
        kernels.delta(*arguments, self.shape[1], self.tiled, states, 1, rows, tables, out)

    def want(self) -> Any:
        heads, key_heads, key, value = self.shape
        x, gates = self.x.astype(np.float64), self.gates.astype(np.float64)
        wide, result = key_heads * key, np.zeros((LENGTH, heads, value))
        for head in range(heads):
            own = head % key_heads if self.tiled else head // (heads // key_heads)
            state = np.zeros((key, value))
            for t in range(LENGTH):
                q, k = (x[t, at + own * key : at + (own + 1) * key] for at in (0, wide))
                q, k = (one / np.sqrt((one * one).sum() + 1e-6) for one in (q, k))
                v = x[t, 2 * wide + head * value : 2 * wide + (head + 1) * value]
                b, a = gates[t, 3 + head], gates[t, 3 + heads + head]
                state = state * np.exp(self.decay[head] * np.log1p(np.exp(a + self.bias[head])))
                state = state + np.outer(k, (v - k @ state) / (1 + np.exp(-b)))
                result[t, head] = q @ state / np.sqrt(key)
        return result.reshape(LENGTH, -1)


class Mamba2(Case):
    """Mamba 2's scan."""

    def __init__(self, heads: int = 4, groups: int = 2, key: int = 12, value: int = 10, limits: Any = (0.1, 0.9)):
        self.shape, self.limits, self.out = (heads, groups, key, value), limits, heads * value
        self.numbers = 3 + heads * key * value
        self.x, self.gates = random(LENGTH, 2 * groups * key + self.out, seed=1), random(LENGTH, 2 + heads, seed=2)
        self.decay, self.bias, self.skip = -np.exp(random(heads, seed=3)), random(heads, seed=4), random(heads, seed=5)

    def run(self, kernels: Any, tokens: slice, states: Any, rows: Any, tables: Any, out: Any) -> None:
        arguments = (self.x[tokens].copy(), self.gates[tokens].copy(), 2, self.decay, self.bias, self.skip)
        kernels.mamba2(*arguments, *self.limits, self.shape[1], states, 1, rows, tables, out)

    def want(self) -> Any:
        heads, groups, key, value = self.shape
        x, result = self.x.astype(np.float64), np.zeros((LENGTH, heads, value))
        inner = heads * value
        for head in range(heads):
            own, state = head // (heads // groups), np.zeros((key, value))
            for t in range(LENGTH):
                k, q = (x[t, at + own * key : at + (own + 1) * key] for at in (inner, inner + groups * key))
                v = x[t, head * value : (head + 1) * value]
                step = np.clip(np.log1p(np.exp(self.gates[t, 2 + head] + self.bias[head])), *self.limits)
                state = state * np.exp(self.decay[head] * step) + np.outer(k, step * v)
                result[t, head] = q @ state + self.skip[head] * v
        return result.reshape(LENGTH, -1)


CASES: dict[str, Case] = {
    "convolution": Conv(),
    "convolution, gated": Conv(channels=32, reach=3, silu=False, gated=True, bias=False),
    "convolution, long": Conv(channels=5, reach=16),
    "delta": Delta(),
    "delta, tiled": Delta(heads=6, key_heads=3, key=16, value=32, tiled=True),
    "delta, real sizes": Delta(heads=2, key_heads=1, key=128, value=128),
    "delta, a head more than registers": Delta(heads=1, key_heads=1, key=7, value=150),
    "mamba 2": Mamba2(),
    "mamba 2, real sizes": Mamba2(heads=4, groups=1, key=128, value=64, limits=(0.0, np.inf)),
}


def rows_of(*spans: tuple[int, int, int]) -> Any:
    return np.array(spans, np.int32)


def table(*blocks: int) -> Any:
    return np.array([blocks], np.int32)


@pytest.mark.parametrize("name", CASES)
@np.errstate(all="ignore")
def test_the_formula(kernels: Any, name: str) -> None:
    case = CASES[name]
    states, out = random(BLOCKS, LAYERS, case.numbers), np.full((LENGTH, case.out), np.nan, np.float32)
    case.run(kernels, slice(0, LENGTH), states, rows_of((0, LENGTH, 0)), table(-1, -1, -1, -1, 3), out)
    want = case.want()
    np.testing.assert_allclose(out, want, rtol=0, atol=2e-5 * np.abs(want).max())


@pytest.mark.parametrize("name", CASES)
@np.errstate(all="ignore")
def test_any_cut_gives_the_same_bits_and_states(kernels: Any, name: str) -> None:
    """Also with states in one place or in many, and beside those of other rows."""
    case = CASES[name]
    whole = None
    for number, cut in enumerate(CUTS):
        for blocks in ((4, 9, 2, 7, 11), (4, 4, 4, 4, 4)):
            # unwritten memory must never be read
            states, out = (
                np.full((BLOCKS, LAYERS, case.numbers), np.nan, np.float32),
                np.zeros((LENGTH, case.out), np.float32),
            )
            at = 0
            for size in cut:
                part = np.full((size, case.out), np.nan, np.float32)
                case.run(kernels, slice(at, at + size), states, rows_of((0, size, at)), table(*blocks), part)
                out[at : at + size] = part
                at += size
            result = (out.tobytes(), states[blocks[-1], 1].tobytes())
            whole = whole or result
            assert result == whole, (number, blocks)
    assert whole is not None and np.isfinite(np.frombuffer(whole[0], np.float32)).all()


@pytest.mark.parametrize("name", CASES)
@np.errstate(all="ignore")
def test_rows_of_a_step_share_nothing(kernels: Any, name: str) -> None:
    """Two rows begin at one snapshot, which stays; others begin with nothing, end early, or pass a block."""
    case = CASES[name]
    states = np.full((BLOCKS, LAYERS, case.numbers), np.nan, np.float32)
    alone = np.zeros((LENGTH, case.out), np.float32)
    case.run(kernels, slice(0, 32), states, rows_of((0, 32, 0)), table(-1, 5), alone[:32])
    snapshot = states[5].copy()
    case.run(kernels, slice(32, LENGTH), states, rows_of((0, LENGTH - 32, 32)), table(-1, 5, 6, 7, 8), alone[32:])
    assert states[5].tobytes() == snapshot.tobytes() and np.isnan(states[:, 0]).all()
    rows = [(32, 75), (0, 3), (32, 33), (0, 40), (32, 64)]
    tables = [(-1, 5, -1, 12, 13), (14, -1, -1, -1, -1), (-1, 5, 15, -1, -1), (16, 17, 18, -1, -1), (-1, 5, 19, 20, -1)]
    order = np.concatenate([np.arange(*row) for row in rows])
    firsts = np.cumsum([0, *(end - start for start, end in rows)])
    places = rows_of(*((first, end - start, start) for first, (start, end) in zip(firsts, rows, strict=False)))
    out = np.full((len(order), case.out), np.nan, np.float32)
    case.run(kernels, order, states, places, np.array(tables, np.int32), out)  # type: ignore[arg-type]
    for first, (start, end) in zip(firsts, rows, strict=False):
        assert out[first : first + end - start].tobytes() == alone[start:end].tobytes(), (start, end)
    assert states[5].tobytes() == snapshot.tobytes()
    for one, same in ((17, 5), (20, 7), (12, 7), (13, 8)):
        assert states[one, 1].tobytes() == states[same, 1].tobytes(), one
    assert np.isnan(states[[0, 1, 2, 3, 4, 9, 10, 11]]).all()


def test_where_states_are_kept() -> None:
    blocks = np.array([3, -1, 4, 5], np.int32)
    assert list(kept(blocks, 0, 16)) == [(16, 3)]
    assert list(kept(blocks, 10, 30)) == [(16, 3), (40, 4)]
    assert list(kept(blocks, 16, 48)) == [(48, 4), (64, 5)]
    assert list(kept(blocks, 47, 1)) == [(48, 4)]


@pytest.mark.parametrize(("size", "whole"), [(20, False), (20, True), (60, True)])
@pytest.mark.parametrize("gate_first", [False, True])
@np.errstate(all="ignore")
def test_norms_with_gates(kernels: Any, size: int, whole: bool, gate_first: bool) -> None:
    x, gates, weight = random(9, 60), random(9, 70, seed=1), random(60 if whole else size, seed=2)
    gate = gates[:, 4:64].astype(np.float64)
    gate = gate / (1 + np.exp(-gate))
    wide = (x * gate if gate_first else x.astype(np.float64)).reshape(9, -1, size)
    want = wide / np.sqrt(np.square(wide).mean(-1, keepdims=True) + 1e-5) * weight.reshape(-1, size)
    want = want.reshape(9, 60) * (1 if gate_first else gate)
    out = np.empty_like(x)
    kernels.gated_norm(x, gates, 4, weight, size, 1e-5, gate_first, out)
    np.testing.assert_allclose(out, want, rtol=0, atol=1e-5)
    kernels.gated_norm(x, gates, 4, weight, size, 1e-5, gate_first, x)
    assert x.tobytes() == out.tobytes()


@np.errstate(all="ignore")
def test_heads_go_through_their_gates(kernels: Any) -> None:
    x, qkv = random(7, 3 * 20), random(7, (2 * 3 + 2) * 20, seed=1)
    gate = qkv[:, :120].reshape(7, 3, 2, 20)[:, :, 1].reshape(7, 60).astype(np.float64)
    want = x / (1 + np.exp(-gate))
    kernels.gate_heads(x, qkv, 20)
    np.testing.assert_allclose(x, want, rtol=0, atol=1e-6)


@np.errstate(all="ignore")
def test_a_query_with_a_gate_behind_it_is_that_query(kernels: Any) -> None:
    heads, kv_heads, size, tokens = 4, 2, 20, 9
    qkv = random(tokens, (2 * heads + 2 * kv_heads) * size)
    queries = qkv[:, : 2 * heads * size].reshape(tokens, heads, 2, size)[:, :, 0].reshape(tokens, -1)
    plain = np.ascontiguousarray(np.concatenate([queries, qkv[:, 2 * heads * size :]], axis=1))
    norms = random(size, seed=1), random(size, seed=2)
    angles, slots = random(tokens, 2, 5, seed=3), np.arange(tokens, dtype=np.int32)
    results = []
    for source in (qkv, plain):
        kv, query = (
            kernels.allocate((1, 1, 2, kv_heads, 16, size), "float32"),
            np.zeros((tokens, heads, size), np.float32),
        )
        kernels.rope_write(source, angles, *norms, 1e-6, kv, 0, slots, query)
        results.append(query.tobytes() + kv.tobytes())
    assert results[0] == results[1]
