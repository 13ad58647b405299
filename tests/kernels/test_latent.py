"""Attention over latents on every kernel set, against plain softmax attention over written-out keys and values."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cairn.kernels.base import Quantized
from cairn.kernels.choose import load_kernels
from cairn.kernels.kv_codes import row_bytes
from cairn.types.model_spec import BLOCK_TOKENS
from tests.tiny_models import KERNELS

SHAPES = [(4, 40, 8, 18, 14), (10, 64, 16, 16, 20), (7, 33, 2, 5, 3), (16, 512, 64, 128, 128)]
"""Heads, rank, rotated size, plain size, value size."""
CLOSE = {"float32": 1e-5, "float16": 3e-3, "bfloat16": 3e-2, "int8": 8e-2}
DTYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "int8": np.int8}


class Case:
    """Inputs of one layer for rows of (tokens, start), and the expected attention."""

    def __init__(self, shape: tuple[int, ...], rows: list[tuple[int, int]], seed: int = 0) -> None:
        self.heads, self.rank, self.turned, self.plain, self.value = shape
        rng = np.random.default_rng(seed)
        self.kept, self.rows = self.rank + self.turned, rows
        self.keys = rng.standard_normal((self.heads, self.rank, self.plain), dtype=np.float32) / 4
        self.values = rng.standard_normal((self.heads, self.value, self.rank), dtype=np.float32) / 8
        self.norm = (1 + 0.2 * rng.standard_normal(self.rank)).astype(np.float32)
        width = self.heads * (self.plain + self.turned)
        self.x = [rng.standard_normal((count + start, self.kept), dtype=np.float32) for count, start in rows]
        self.q = [rng.standard_normal((count + start, width), dtype=np.float32) / 2 for count, start in rows]
        self.angles = [
            rng.uniform(-1, 1, (count + start, 2, self.turned // 2)).astype(np.float32) for count, start in rows
        ]

    def turn(self, x: np.ndarray, angles: np.ndarray, neighbours: bool) -> np.ndarray:
        """Rotate the tail of x by multiplying complex numbers."""
        half = self.turned // 2
        pairs = x.reshape(*x.shape[:-1], half, 2) if neighbours else x.reshape(*x.shape[:-1], 2, half).swapaxes(-1, -2)
        factor = (angles[:, 0] + 1j * angles[:, 1]).reshape(len(x), *[1] * (x.ndim - 2), half)
        made = (pairs[..., 0] + 1j * pairs[..., 1]) * factor
        both = np.stack([made.real, made.imag], axis=-1)
        return (both if neighbours else both.swapaxes(-1, -2)).reshape(x.shape)

    def want(self, neighbours: bool, scale: float) -> list[np.ndarray]:
        """Return each row's answer [count, heads * value], in float64 with keys and values written out."""
        answers = []
        for number, (count, start) in enumerate(self.rows):
            x, q, angles = (one[number].astype(np.float64) for one in (self.x, self.q, self.angles))
            latent = x[:, : self.rank] / np.sqrt(np.square(x[:, : self.rank]).mean(1, keepdims=True) + 1e-6) * self.norm
            tail = self.turn(x[:, self.rank :], angles, neighbours)
            split = q.reshape(len(q), self.heads, -1)
            turned = self.turn(split[:, :, self.plain :], angles, neighbours)
            out = np.empty((count, self.heads, self.value))
            for head in range(self.heads):
                key = np.concatenate([latent @ self.keys[head], tail], axis=1)
                value = latent @ self.values[head].T
                query = np.concatenate([split[:, head, : self.plain], turned[:, head]], axis=1)
                scores = query[start:] @ key.T * scale
                scores[np.arange(len(key)) > np.arange(start, start + count)[:, None]] = -np.inf
                weights = np.exp(scores - scores.max(1, keepdims=True))
                out[:, head] = weights @ value / weights.sum(1, keepdims=True)
            answers.append(out.reshape(count, -1))
        return answers

    def run(self, kernels: Any, dtype: str, neighbours: bool, scale: float, fill: float = 0.0) -> list[np.ndarray]:
        """Run the rows together, after writing what precedes them. `fill`: what the pool holds at first."""
        blocks = sum(-(-(count + start) // BLOCK_TOKENS) for count, start in self.rows) + 1
        width = row_bytes(self.kept, once=True) if dtype == "int8" else self.kept
        kv = kernels.allocate((blocks, 3, 1, 1, BLOCK_TOKENS, width), dtype)
        if dtype == "int8":
            kv[:] = -1 if np.isnan(fill) else 0  # scales that are NaN
        else:
            kv[:] = fill
        width = max(-(-(count + start) // BLOCK_TOKENS) for count, start in self.rows)
        tables, at = np.full((len(self.rows), width), -1, np.int32), blocks - 1
        for number, (count, start) in enumerate(self.rows):
            for place in range(-(-(count + start) // BLOCK_TOKENS)):
                tables[number, place] = at  # blocks in descending order, not the natural one
                at -= 1
        every, slots, lines, first = [], [], [], 0
        for number, (count, start) in enumerate(self.rows):
            positions = np.arange(count + start)
            places = tables[number, positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS
            old = slice(0, start)
            if start:
                write = (self.x[number][old], self.angles[number][old], neighbours, self.norm, 1e-6, kv, 1)
                kernels.latent_write(*write, places[old].astype(np.int32))
            every.append(number)
            slots.append(places[start:])
            lines.append((first, count, start))
            first += count

        def new(arrays: list[np.ndarray]) -> np.ndarray:
            return np.ascontiguousarray(
                np.concatenate([arrays[number][start:] for number, (_, start) in enumerate(self.rows)])
            )

        x, q, angles = new(self.x), new(self.q), new(self.angles)
        kernels.latent_write(x, angles, neighbours, self.norm, 1e-6, kv, 1, np.concatenate(slots).astype(np.int32))
        query = np.zeros((first, self.heads, self.kept), np.float32)
        keys = [kernels.matrix([key], [None]) for key in self.keys]
        kernels.latent_queries(q, keys, angles, neighbours, query)
        mixed = np.zeros((first, self.heads, self.rank), np.float32)
        kernels.latent_attention(query, kv, 1, np.array(lines, np.int32), tables, scale, mixed)
        out = np.zeros((first, self.heads * self.value), np.float32)
        kernels.latent_values(mixed, [kernels.matrix([one], [None]) for one in self.values], out)
        return [out[at : at + count] for at, count, _ in lines]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("neighbours", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KERNELS)
def test_latent_attention_equals_attention_over_written_out_keys_and_values(
    kind: str, shape: tuple[int, ...], neighbours: bool, dtype: str
) -> None:
    case = Case(shape, [(1, 130), (70, 0), (1, 0), (9, 60)] if shape[1] < 500 else [(2, 70), (3, 0)])
    kernels = load_kernels(kind, 2)
    got = case.run(kernels, dtype, neighbours, 0.3)
    kernels.close()
    for one, want in zip(got, case.want(neighbours, 0.3), strict=True):
        np.testing.assert_allclose(one, want, rtol=0, atol=CLOSE[dtype] * max(1.0, float(np.abs(want).max())))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", [kind for kind in KERNELS if kind != "reference"])
def test_latents_of_8_bits_are_close_to_exact_ones(kind: str, shape: tuple[int, ...]) -> None:
    """Rounding changes an answer by some hundredths; all kernels round alike."""
    case = Case(shape, [(1, 130), (70, 0), (1, 0), (9, 60)] if shape[1] < 500 else [(2, 70), (3, 0)])
    results = []
    for name in (kind, "reference"):
        kernels = load_kernels(name, 1)
        results.append(case.run(kernels, "int8", True, 0.3))
        kernels.close()
    for one, want in zip(*results, strict=True):
        np.testing.assert_allclose(one, want, rtol=0, atol=2e-3 * max(1.0, float(np.abs(want).max())))


@pytest.mark.parametrize("kind", KERNELS)
def test_long_contexts_cross_segments(kind: str) -> None:
    case = Case((4, 40, 8, 18, 14), [(3, 2100), (50, 1000)])
    kernels = load_kernels(kind, 1)
    got = case.run(kernels, "float32", True, 0.3)
    kernels.close()
    for one, want in zip(got, case.want(True, 0.3), strict=True):
        np.testing.assert_allclose(one, want, rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KERNELS)
def test_a_row_alone_has_the_same_bits_and_reads_nothing_unwritten(kind: str, dtype: str) -> None:
    shape, rows = (10, 64, 16, 16, 20), [(1, 90), (33, 0), (5, 17)]
    case = Case(shape, rows)
    for threads in (1, 3):
        kernels = load_kernels(kind, threads)
        together = case.run(kernels, dtype, True, 0.3, fill=float("nan"))
        for number, want in enumerate(together):
            alone = Case(shape, [rows[number]])
            alone.keys, alone.values, alone.norm = case.keys, case.values, case.norm
            alone.x, alone.q, alone.angles = [case.x[number]], [case.q[number]], [case.angles[number]]
            (got,) = alone.run(kernels, dtype, True, 0.3)
            assert got.tobytes() == want.tobytes()
        kernels.close()


@pytest.mark.parametrize("kind", KERNELS)
def test_a_nan_token_spoils_none_before_it(kind: str) -> None:
    case = Case((4, 40, 8, 18, 14), [(40, 0)])
    kernels = load_kernels(kind, 1)
    (clean,) = case.run(kernels, "float32", True, 0.3)
    case.x[0][25] = np.nan
    with np.errstate(all="ignore"):
        (got,) = case.run(kernels, "float32", True, 0.3)
    kernels.close()
    assert got[:25].tobytes() == clean[:25].tobytes() and np.isnan(got[25:]).all()


@pytest.mark.parametrize("form", ["int8", "int4", "bfloat16"])
@pytest.mark.parametrize("kind", KERNELS)
def test_heads_with_packed_matrices_equal_single_products(kind: str, form: str) -> None:
    """`project` with the head's own matrix gives the same numbers, bit for bit."""
    rng = np.random.default_rng(5)
    heads, plain, turned, rank, count = 3, 64, 8, 40, 21
    every = [packed(rng, form, rank, plain) for _ in range(heads)]
    x = rng.standard_normal((count, heads * (plain + turned)), dtype=np.float32)
    angles = rng.uniform(-1, 1, (count, 2, turned // 2)).astype(np.float32)
    for threads in (1, 2):
        kernels = load_kernels(kind, threads)
        matrices = [kernels.matrix([one], [None]) for one in every]
        query = np.zeros((count, heads, rank + turned), np.float32)
        kernels.latent_queries(x, matrices, angles, True, query)
        for head, matrix in enumerate(matrices):
            want = np.zeros((count, rank), np.float32)
            part = np.ascontiguousarray(x.reshape(count, heads, -1)[:, head, :plain])
            kernels.project(part, matrix, want)
            assert query[:, head, :rank].tobytes() == want.tobytes()
            # `latent_values` multiplies in the same way.
            again = np.zeros((count, heads * rank), np.float32)
            kernels.latent_values(np.ascontiguousarray(np.repeat(part[:, None], heads, 1)), matrices, again)
            assert again.reshape(count, heads, rank)[:, head].tobytes() == want.tobytes()
        kernels.close()


def packed(rng: np.random.Generator, form: str, out: int, inner: int) -> Any:
    """Return a random matrix [out, inner] in one of the forms in which weights are held."""
    if form == "bfloat16":
        return rng.standard_normal((out, inner)).astype(ml_dtypes.bfloat16)
    scale = np.full((out, inner // 32), 0.01, np.float16)
    if form == "int8":
        return Quantized(8, rng.integers(-127, 128, (out, inner), dtype=np.int8), scale)
    return Quantized(4, rng.integers(0, 16, (out, inner), dtype=np.uint8), scale)
