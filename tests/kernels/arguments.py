"""Sample arguments for every kernel, described in numpy, so that all kernel sets can be called with the same ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from cairn.kernels.base import Kernels, LowRank, LowRankUp, Quantized
from cairn.types.model_spec import BLOCK_TOKENS, RopeScaling

BFLOAT16 = ml_dtypes.bfloat16


def random(*shape: int, seed: int = 0) -> Any:
    """Return normally distributed float32 numbers."""
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


@dataclass(frozen=True)
class Weights:
    """Parts of one matrix, and their biases."""

    parts: Sequence[Any]
    biases: Sequence[Any] | None = None

    def made(self, kernels: Kernels) -> Any:
        return kernels.matrix(list(self.parts), list(self.biases or [None] * len(self.parts)))


@dataclass(frozen=True)
class Vector:
    numbers: np.ndarray

    def made(self, kernels: Kernels) -> Any:
        return kernels.vector(self.numbers)


@dataclass(frozen=True)
class Table:
    numbers: Any

    def made(self, kernels: Kernels) -> Any:
        return kernels.table(self.numbers)


@dataclass(frozen=True)
class Turns:
    size: int

    def made(self, kernels: Kernels) -> Any:
        return kernels.rope(self.size, 10000.0, RopeScaling())


@dataclass(frozen=True)
class Adapter:
    """The low-rank matrices of one adapter: `downs`, and `ups` with the first column that each writes."""

    slot: int
    downs: Sequence[np.ndarray]
    ups: Sequence[tuple[int, np.ndarray]]

    def made(self, kernels: Kernels) -> LowRank:
        ups, first = [], 0
        for (column, up), down in zip(self.ups, self.downs, strict=True):
            ups.append(LowRankUp(first, len(down), column, len(up), kernels.matrix([up], [None])))
            first += len(down)
        return LowRank(self.slot, kernels.matrix(list(self.downs), [None] * len(self.downs)), tuple(ups))


@dataclass(frozen=True)
class Call:
    kernel: str
    arguments: tuple[Any, ...]
    """numpy arrays, constants, and what a kernel set packs itself: `Weights`, `Vector`, `Table`, `Turns`."""

    def given(self, kernels: Kernels) -> list[Any]:
        """Return the arguments in this kernel set's own form; arrays are copied."""

        def given(one: Any) -> Any:
            if isinstance(one, np.ndarray):
                array = kernels.allocate(one.shape, str(one.dtype))
                mirror = kernels.mirror(array)
                mirror[...] = one
                kernels.upload([(array, mirror)])
                return array
            if isinstance(one, list):
                return [given(part) for part in one]
            if isinstance(one, tuple):
                return tuple(given(part) for part in one)
            return one.made(kernels) if hasattr(one, "made") else one

        return [given(argument) for argument in self.arguments]

    def arrays(self) -> list[int]:
        """Return the positions of the arrays."""
        return [place for place, one in enumerate(self.arguments) if isinstance(one, np.ndarray)]


def quantized(rng: np.random.Generator, out: int, inner: int, kind: str) -> Quantized:
    """Return random weights of one packed form."""
    groups = (out, inner // 32)

    def scales(shape: tuple[int, int], low: float = 0.01) -> np.ndarray:
        return (low * (1 + rng.random(shape))).astype(np.float16)

    if kind == "q8_0":
        return Quantized(8, rng.integers(-127, 128, (out, inner), dtype=np.int8), scales(groups, 0.001))
    if kind == "q8 minimum":
        codes = rng.integers(-127, 128, (out, inner), dtype=np.int8)
        return Quantized(8, codes, scales(groups, 0.001).astype(np.float32), -scales(groups).astype(np.float32))
    if kind in ("q4_0", "q4_1"):
        codes = rng.integers(0, 16, (out, inner), dtype=np.uint8)
        return Quantized(4, codes, scales(groups), None if kind == "q4_0" else -scales(groups, 0.05))
    block = (out, inner // 256)
    if kind == "q6_k":
        codes = rng.integers(0, 64, (out, inner), dtype=np.uint8)
        whole = rng.integers(-32, 32, (out, inner // 16), dtype=np.int8)
        return Quantized(6, codes, whole, None, scales(block, 1e-4))
    bits = {"q4_k": 4, "q5_k": 5}[kind]
    codes = rng.integers(0, 1 << bits, (out, inner), dtype=np.uint8)
    scale, minimum = (rng.integers(0, 64, groups, dtype=np.uint8) for _ in range(2))
    return Quantized(bits, codes, scale, minimum, scales(block, 1e-4), -scales(block, 1e-4))  # type: ignore[arg-type]


ROWS = ((0, 1, 40), (1, 4, 0), (5, 3, 14), (8, 18, 15), (26, 1, 0))
"""First token in the step, token count and first position of each row: single tokens, beginnings, block borders."""


class Step:
    """The inputs of a step: rows, tables, slots, positions and the row of each token."""

    def __init__(self, rng: np.random.Generator, rows: Sequence[tuple[int, int, int]] = ROWS, width: int = 4) -> None:
        self.rows = np.array(rows, np.int32)
        self.tokens = int(self.rows[:, 1].sum())
        self.blocks = len(rows) * width + 3
        ids = rng.permutation(self.blocks)[: len(rows) * width].reshape(len(rows), width)
        self.tables = ids.astype(np.int32)
        self.positions = np.concatenate([np.arange(start, start + count) for _, count, start in rows]).astype(np.int32)
        self.members = np.repeat(np.arange(len(rows)), self.rows[:, 1]).astype(np.int32)
        places = self.tables[self.members, self.positions // BLOCK_TOKENS]
        self.slots = (places * BLOCK_TOKENS + self.positions % BLOCK_TOKENS).astype(np.int32)

    def holes(self) -> np.ndarray:
        """Return the tables without blocks behind a window of 20 positions, and without blocks past the row's end."""
        tables = self.tables.copy()
        for line, (_, count, start) in zip(tables, self.rows.tolist(), strict=True):
            line[: max(0, start - 19) // BLOCK_TOKENS] = -1
            line[-(-(start + count) // BLOCK_TOKENS) :] = -1
        return tables

    def states(self) -> np.ndarray:
        """Return the tables of a state group: states that rows start from and leave, and one in between."""
        tables = np.full_like(self.tables, -1)
        for line, ids, (_, count, start) in zip(tables, self.tables, self.rows.tolist(), strict=True):
            for position in (start - 1, start + count - 1, 15):
                if position >= 0 and (position != 15 or start <= 15 < start + count):
                    line[position // BLOCK_TOKENS] = ids[position // BLOCK_TOKENS]
        return tables


def floats(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def calls(seed: int = 0) -> Iterator[Call]:
    """Yield at least one call of every kernel, and several of kernels with many modes."""
    for make in (_plain, _matrices, _attention, _recurrent, _latent, _experts, _streams):
        yield from make(np.random.default_rng(seed))


def _plain(rng: np.random.Generator) -> Iterator[Call]:
    m, h = 7, 24

    def f(*shape: int) -> np.ndarray:
        return floats(rng, *shape)

    tokens = rng.integers(0, 30, m).astype(np.int32)
    for dtype in (np.float32, np.float16, BFLOAT16):
        yield Call("embed", (Table(f(30, h).astype(dtype)), tokens, f(m, h)))
    yield Call("rope_angles", (Turns(16), rng.integers(0, 4000, m).astype(np.int32), f(m, 2, 8)))
    yield Call("scale", (f(m, h), 0.37))
    yield Call("norm", (f(m, h), Vector(f(h)), 1e-6, f(m, h)))
    for bias in (None, Vector(f(h))):
        yield Call("layer_norm", (f(m, h), Vector(f(h)), bias, 1e-6, f(m, h)))
    for activation in ("silu", "tanh", "relu2", "gelu_tanh", "gelu"):
        yield Call("activate", (2 * f(m, h), activation, f(m, h)))
        yield Call("gate", (2 * f(m, 2 * h), activation, f(m, h)))
    yield Call("gate", (5 * f(m, 2 * h), "clamped_silu", f(m, h)))
    yield Call("add", (f(m, h), f(m, h)))
    yield Call("scale_by", (f(m, h), Vector(f(1))))
    yield Call("xielu", (f(m, h), Vector(f(1)), Vector(f(1)), f(m, h)))
    yield Call("gate_with", (f(m, 6), "gelu_tanh", f(m, h), 12, f(m, 6)))
    yield Call("softcap", (f(m, h), 3.0))
    yield Call("scale_logits", (f(m, h), 0.7))
    positions = rng.integers(0, 5000, m).astype(np.int32)
    yield Call("scale_queries", (f(m, 2, 8), positions, 0.1, 64.0))
    yield Call("scale_queries", (f(m, 2, 8), positions, 0.1, 64.0, 1))
    for weight in (None, Vector(f(8))):
        yield Call("norm_heads", (f(m, 40), 1, 3, 8, weight, 1e-6))
        yield Call("layer_norm_heads", (f(m, 40), 1, 3, 8, Vector(f(8)), weight, 1e-6))
    yield Call("layer_norm_heads", (f(m, 40), 1, 3, 8, Vector(f(24)), None, 1e-6))
    yield Call("turn_heads", (f(m, 24), f(m, 2, 3), f(m, 3, 8)))
    yield Call("gate_heads", (f(m, 32), f(m, 64 + 16), 8))
    yield Call("add_gated", (f(m, h), f(m, 1), f(m, h)))
    yield Call("scale_columns", (f(m, h), Vector(f(h)), f(m, h)))


def _matrices(rng: np.random.Generator) -> Iterator[Call]:
    m, inner, out = 7, 256, 70

    def f(*shape: int) -> np.ndarray:
        return floats(rng, *shape)

    def matrix(*shape: int) -> np.ndarray:
        return f(*shape) / np.sqrt(np.float32(shape[-1]))

    x = f(m, inner)
    for dtype in (np.float32, np.float16, BFLOAT16):
        yield Call("project", (x, Weights([matrix(out, inner).astype(dtype)], [f(out)]), f(m, out)))
    mixed = Weights(
        [
            matrix(20, inner).astype(np.float32),
            quantized(rng, 18, inner, "q4_0"),
            matrix(21, inner).astype(BFLOAT16),
            quantized(rng, 11, inner, "q8_0"),
        ],
        [f(20), None, f(21), None],
    )
    yield Call("project", (x, mixed, f(m, out)))
    for kind in ("q8_0", "q8 minimum", "q4_0", "q4_1", "q4_k", "q5_k", "q6_k"):
        yield Call("project", (x, Weights([quantized(rng, out, inner, kind)]), f(m, out)))
        yield Call(
            "embed", (Weights([quantized(rng, 30, inner, kind)]), np.arange(0, 28, 4, dtype=np.int32), f(m, inner))
        )
    norm, square = Vector(f(inner)), Weights([matrix(inner, inner)])
    yield Call("norm_project", (x, norm, 1e-6, square, f(m, inner)))
    rows = np.array([(0, 2, 5), (2, 1, 9), (3, 3, 0), (6, 1, 2)], np.int32)
    slots = np.array([(3, -1), (-1, -1), (0, 3), (7, 3)], np.int32)
    first = Adapter(0, [matrix(5, inner)], [(30, matrix(40, 5))])
    other = Adapter(3, [matrix(16, inner), matrix(3, inner)], [(0, matrix(20, 16)), (38, matrix(32, 3))])
    yield Call("adapt", (x, rows, slots, f(4, 2), (first, other), f(m, out)))
    yield Call("project_add", (x, square, f(m, inner)))
    yield Call("norm_add", (x, norm, 1e-6, f(m, inner)))
    up, down = Weights([matrix(32, inner), matrix(32, inner)]), Weights([matrix(inner, 32)])
    yield Call("gated_project", (x, norm, 1e-6, up, "silu", down, f(m, inner)))
    yield Call("gated_mlp", (x, norm, 1e-6, up, "silu", down))
    wanted = np.array([0, 3, 6, 3], np.int32)
    head = Weights([matrix(90, inner)], [f(90)])
    yield Call("logits", (x, wanted, norm, 1e-6, Weights([matrix(90, inner)]), f(4, 90)))
    for bias in (None, Vector(f(inner))):
        yield Call("layer_logits", (x, wanted, norm, bias, 1e-6, head, f(4, 90)))


def _attention(rng: np.random.Generator) -> Iterator[Call]:
    step = Step(rng)
    heads, kv_heads, size, m = 4, 2, 16, step.tokens

    def f(*shape: int) -> np.ndarray:
        return floats(rng, *shape)

    def pool(dtype: Any) -> np.ndarray:
        return f(step.blocks, 3, 2, kv_heads, BLOCK_TOKENS, size).astype(dtype)

    qkv, query = f(m, (heads + 2 * kv_heads) * size), f(m, heads, size)
    for dtype in (np.float32, np.float16, BFLOAT16):
        yield Call("rope_write", (qkv, f(m, 2, 8), None, None, 1e-6, pool(dtype), 1, step.slots, query))
    norms = Vector(f(size)), Vector(f(size))
    yield Call("rope_write", (qkv, f(m, 2, 5), *norms, 1e-6, pool(np.float32), 0, step.slots, query))
    yield Call("rope_write", (qkv, f(m, 2, 8), *norms, 1e-6, pool(np.float32), 2, step.slots, query, True))
    wide = Vector(f(heads * size)), Vector(f(kv_heads * size))
    yield Call("rope_write", (qkv, None, *wide, 1e-6, pool(np.float32), 2, step.slots, query))
    gated = f(m, (2 * heads + 2 * kv_heads) * size)
    yield Call("rope_write", (gated, f(m, 2, 8), None, None, 1e-6, pool(np.float32), 2, step.slots, query))
    out = f(m, heads * size)

    def attend(kv: np.ndarray, tables: np.ndarray, window: int, *more: Any) -> Call:
        return Call("attention", (query, kv, 1, step.rows, tables, window, 0.3, out, *more))

    for dtype in (np.float32, np.float16, BFLOAT16):
        yield attend(pool(dtype), step.tables, 0)
    yield attend(pool(np.float32), step.holes(), 20)
    yield attend(pool(np.float32), step.tables, -12, 2.0)
    yield attend(pool(np.float32), step.tables, 0, 0.0, False, Vector(f(heads)))
    whole = Step(rng, ((0, 5, 0), (5, 20, 0), (25, 1, 0)))
    query, out = f(whole.tokens, heads, size), f(whole.tokens, heads * size)
    for window in (0, 7):
        places = (whole.rows, whole.tables, window)
        kv = f(whole.blocks, 1, 2, kv_heads, BLOCK_TOKENS, size)
        yield Call("attention", (query, kv, 0, *places, 0.3, out, 0.0, True))


def _recurrent(rng: np.random.Generator) -> Iterator[Call]:
    step = Step(rng)
    m, tables = step.tokens, step.states()

    def f(*shape: int) -> np.ndarray:
        return floats(rng, *shape)

    channels, key_heads, heads, keys, values = 40, 2, 4, 6, 4
    for reach, bias, silu in ((4, Vector(f(channels)), True), (3, None, False), (2, None, True)):
        states = f(step.blocks, 2, 3 * channels + 7)
        places = (states, 1, step.rows, tables)
        yield Call("convolve", (f(m, 60), 11, Vector(f(reach * channels)), bias, silu, False, *places, f(m, channels)))
    places = (f(step.blocks, 2, 3 * channels), 1, step.rows, tables)
    yield Call("convolve", (f(m, 3 * channels), 0, Vector(f(4 * channels)), None, False, True, *places, f(m, channels)))
    width = 2 * key_heads * keys + heads * values
    decay, bias = Vector(-np.exp(f(heads))), Vector(f(heads))
    for tiled in (False, True):
        places = (f(step.blocks, 2, 5 + heads * keys * values), 0, step.rows, tables)
        gates = (f(m, width), f(m, 20), 5, decay, bias)
        yield Call("delta", (*gates, key_heads, tiled, *places, f(m, heads * values)))
    places = (f(step.blocks, 2, 5 + heads * keys * values), 0, step.rows, tables)
    gates = (f(m, width), f(m, 20), 5, decay, bias)
    yield Call("mamba2", (*gates, Vector(f(heads)), 0.1, 2.0, key_heads, *places, f(m, heads * values)))
    for first in (True, False):
        yield Call("gated_norm", (f(m, 24), f(m, 40), 9, Vector(f(8)), 8, 1e-6, first, f(m, 24)))
    yield Call("gated_norm", (f(m, 24), f(m, 40), 9, Vector(f(24)), 8, 1e-6, True, f(m, 24)))


def _latent(rng: np.random.Generator) -> Iterator[Call]:
    step = Step(rng)
    m, heads, rank, turned, plain, value = step.tokens, 3, 20, 8, 12, 10

    def f(*shape: int) -> np.ndarray:
        return floats(rng, *shape)

    def matrices(*shape: int) -> list[Weights]:
        return [Weights([f(*shape) / np.sqrt(np.float32(shape[1]))]) for _ in range(heads)]

    for dtype in (np.float32, BFLOAT16):
        kv = f(step.blocks, 2, 1, 1, BLOCK_TOKENS, rank + turned).astype(dtype)
        for neighbours in (False, True):
            angles = f(m, 2, turned // 2)
            place = (Vector(f(rank)), 1e-6, kv, 1, step.slots)
            yield Call("latent_write", (f(m, rank + turned), angles, neighbours, *place))
            x, query = f(m, heads * (plain + turned)), f(m, heads, rank + turned)
            yield Call("latent_queries", (x, matrices(rank, plain), angles, neighbours, query))
        places = (kv, 1, step.rows, step.tables)
        yield Call("latent_attention", (f(m, heads, rank + turned), *places, 0.2, f(m, heads, rank)))
    yield Call("latent_values", (f(m, heads, rank), matrices(value, rank), f(m, heads * value)))


def _experts(rng: np.random.Generator) -> Iterator[Call]:
    m, hidden, count, ffn = 9, 24, 6, 16

    def f(*shape: int) -> np.ndarray:
        return floats(rng, *shape)

    def matrices(out: int, inner: int) -> list[Weights]:
        return [Weights([f(out, inner) / np.sqrt(np.float32(inner))], [f(out)]) for _ in range(count)]

    def choices(each: int) -> np.ndarray:
        return np.sort(rng.permuted(np.tile(np.arange(count), (m, 1)), axis=1)[:, :each], axis=1).astype(np.int32)

    for kind, normed, bias in (("softmax", True, None), ("sigmoid", True, Vector(f(count))), ("chosen", False, None)):
        yield Call("route", (f(m, count), bias, kind, normed, 1.5, 1, 1, choices(3), f(m, 3)))
    yield Call("route", (f(m, count), None, "sigmoid", False, 1.0, 3, 2, choices(2), f(m, 2)))
    equal = np.zeros((m, count), np.float32)
    yield Call("route", (equal, None, "softmax", False, 1.0, 1, 1, choices(2), f(m, 2)))
    shares = rng.random((m, 2)).astype(np.float32)
    up = matrices(2 * ffn, hidden), "silu", matrices(hidden, ffn)
    yield Call("experts", (f(m, hidden), choices(2), shares, *up, f(m, hidden)))
    yield Call("experts", (f(m, hidden), choices(2), shares, matrices(ffn, hidden), "relu2", up[2], f(m, hidden)))
    yield Call("scale_shares", (shares, choices(2), Vector(f(count))))
    yield Call("scale_tokens", (f(m, hidden), f(m, 1), f(m, hidden)))


def _streams(rng: np.random.Generator) -> Iterator[Call]:
    m, count, hidden = 7, 3, 24

    def f(*shape: int) -> np.ndarray:
        return floats(rng, *shape)

    yield Call("mix_streams", (f(m, count, hidden), f(m, count * count), f(m, count, hidden)))
    yield Call("correct_streams", (f(m, hidden), f(m, count), 1, f(m, count, hidden)))
    yield Call("take_stream", (f(m, count, hidden), 2, f(m, hidden)))
    yield Call("put_stream", (f(m, hidden), 1, f(m, count, hidden)))
    yield Call("add_streams", (f(m, hidden), 1, f(m, count, hidden)))
    yield Call("match_magnitude", (f(m, hidden), f(m, hidden)))
    yield Call("sparsify", (f(m, 2 * hidden), 0.4))
