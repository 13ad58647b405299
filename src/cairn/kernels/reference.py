"""The kernels in numpy: the definition of every kernel, and a fallback that runs everywhere.

How they keep the law of the same answer:

    matrices    `kernels.blas`: zero-padded tiles of 8 rows; `kernels.quantized` rounds activations row by row
    attention   `kernels.paged`: spans of positions at fixed places
    states      `kernels.recurrent`: token by token
    the rest    elementwise, or a sum along one contiguous row
"""

# The methods of ReferenceKernels are documented where their meaning is declared, in kernels.base.
# ruff: noqa: D102

from __future__ import annotations

import math
import platform
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_info

from cairn.kernels import kv_codes, latent, low_rank, recurrent
from cairn.kernels.base import LowRank, Packed
from cairn.kernels.blas import TILE, one_blas_thread, project
from cairn.kernels.elementary import cos_sin, exp, expm1, log, log1p, tanh
from cairn.kernels.fusion import fuse
from cairn.kernels.paged import SPAN, attend, softcap
from cairn.kernels.program import Interpreted, KernelCall
from cairn.kernels.quantized import Segments, rounded, segments
from cairn.kernels.rope import Rope, frequencies
from cairn.kernels.sampling import NUMPY, Sampler
from cairn.kernels.storage import HostStorage
from cairn.types.model_spec import RopeScaling

VERSION = "reference-2"
"""Version of the order of operations and of the KV layout. Change it with every change that can move a bit."""

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]


def _silu(x: Floats) -> Floats:
    out: Floats = x / (1 + exp(-x))
    return out


def _gelu_tanh(x: Floats) -> Floats:
    inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * (x * x * x))
    out: Floats = np.float32(0.5) * x * (1 + tanh(inner))
    return out


def _relu2(x: Floats) -> Floats:
    out: Floats = np.square(np.maximum(x, np.float32(0)))
    return out


_GELU: tuple[float, ...] = (
    *(0.17087277, -0.82215223, 1.48851587, -1.13520398, 0.27886807),
    *(-0.18628806, 0.09678418, 0.37409196, 1.00002368, -1.26551223),
)


def _gelu(x: Floats) -> Floats:
    """Return x Phi(x), by the complementary error function of W. H. Press et al., Numerical Recipes, 6.2."""
    z: Any = np.abs(x) * np.float32(math.sqrt(0.5))
    t: Floats = 1 / (1 + np.float32(0.5) * z)
    poly: Floats = np.full_like(x, _GELU[0])
    for term in _GELU[1:]:
        poly = poly * t + np.float32(term)
    tail: Floats = np.float32(0.5) * t * exp(poly - z * z) * x
    out: Floats = np.where(x >= 0, x - tail, tail)
    return out


ACTIVATIONS: dict[str, Callable[[Floats], Floats]] = {
    "silu": _silu,
    "gelu_tanh": _gelu_tanh,
    "gelu": _gelu,
    "tanh": tanh,
    "relu2": _relu2,
}


def rms_norm(x: Floats, weight: Floats, eps: float) -> Floats:
    """Return x / rms(x) * weight along the last axis."""
    mean = np.square(x).sum(axis=-1, keepdims=True) / np.float32(x.shape[-1])
    out: Floats = weight * (x * (1 / np.sqrt(mean + np.float32(eps))))
    return out


def layer_norm(x: Floats, weight: Floats, bias: Floats | None, eps: float) -> Floats:
    """Return (x - mean) / deviation * weight + bias along the last axis."""
    size = np.float32(x.shape[-1])
    moved = x - x.sum(axis=-1, keepdims=True) / size
    variance = np.square(moved).sum(axis=-1, keepdims=True) / size
    out: Floats = weight * (moved * (1 / np.sqrt(variance + np.float32(eps))))
    return out if bias is None else out + bias


class ReferenceKernels(HostStorage):
    """`kernels.base.Kernels` in numpy, in float32 except for stored KV. The methods are documented there."""

    def __init__(self, threads: int = 1) -> None:
        one_blas_thread.enter()
        self._leave = weakref.finalize(self, one_blas_thread.leave)
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="cairn-kernel") if threads > 1 else None

    @property
    def numerics(self) -> tuple[object, ...]:
        libraries = [info for info in threadpool_info() if info["user_api"] == "blas"]
        # Other packages may have loaded a BLAS of their own, which is not used here.
        ours = [info for info in libraries if "numpy" in info["filepath"]] or libraries
        blas = sorted(f"{info['internal_api']} {info.get('version')} {info.get('architecture')}" for info in ours)
        cpu = np._core._multiarray_umath.__cpu_features__  # type: ignore[attr-defined]
        features = sorted(name for name, here in cpu.items() if here)
        return (VERSION, SPAN, TILE, np.__version__, platform.machine(), blas, features)

    def allocate(self, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
        return np.zeros(shape, dtype)

    def vector(self, source: NDArray[Any]) -> Floats:
        return np.array(source, np.float32)

    def table(self, source: NDArray[Any] | Packed) -> NDArray[Any] | Segments:
        if isinstance(source, Packed):
            return self.matrix([source], [None])
        # Copied: a mapped file that shrinks while the engine runs would kill the process.
        return np.array(source)

    def matrix(self, weights: Sequence[NDArray[Any] | Packed], biases: Sequence[NDArray[Any] | None]) -> Segments:
        return segments(weights, biases)

    def rope(self, head_dim: int, theta: float, scaling: RopeScaling) -> Rope:
        return frequencies(head_dim, theta, scaling)

    def embed(self, table: NDArray[Any] | Segments, tokens: Ints, hidden: Floats) -> None:
        hidden[:] = table.rows(tokens) if isinstance(table, Segments) else table[tokens]

    def rope_angles(self, rope: Rope, positions: Ints, angles: Floats) -> None:
        # The product is rounded to float32, as transformers does, before the exact cosine is taken.
        cosine, sine = cos_sin(positions.astype(np.float32)[:, None] * rope.frequencies)
        angles[:, 0], angles[:, 1] = cosine * rope.factor, sine * rope.factor

    def scale(self, hidden: Floats, factor: float) -> None:
        hidden *= np.float32(factor)

    def norm(self, x: Floats, weight: Floats, eps: float, out: Floats) -> None:
        out[:] = rms_norm(x, weight, eps)

    def layer_norm(self, x: Floats, weight: Floats, bias: Floats | None, eps: float, out: Floats) -> None:
        out[:] = layer_norm(x, weight, bias, eps)

    def project(self, x: Floats, matrix: Segments, out: Floats) -> None:
        out[:] = self._project(x, matrix)

    def adapt(
        self, x: Floats, rows: Ints, slots: Ints, scales: Floats, adapters: Sequence[LowRank], out: Floats
    ) -> None:
        low_rank.adapt(self._project, x, rows.tolist(), slots.tolist(), list(scales), adapters, out)

    def activate(self, x: Floats, activation: str, out: Floats) -> None:
        out[:] = ACTIVATIONS[activation](x)

    def gate(self, gates: Floats, activation: str, out: Floats) -> None:
        out[:] = gated(gates, activation)

    def add(self, x: Floats, hidden: Floats) -> None:
        hidden += x

    def norm_project(self, hidden: Floats, norm: Floats, eps: float, matrix: Segments, out: Floats) -> None:
        out[:] = self._project(rms_norm(hidden, norm, eps), matrix)

    def rope_write(
        self,
        qkv: Floats,
        angles: Floats | None,
        q_norm: Floats | None,
        k_norm: Floats | None,
        eps: float,
        kv: NDArray[Any],
        layer: int,
        slots: Ints,
        query: Floats,
        late: bool = False,
    ) -> None:
        _, heads, size = query.shape
        kv_heads, block_tokens = kv.shape[3], kv.shape[4]
        split = qkv.reshape(len(qkv), -1, size)
        wide = split.shape[1] - 2 * kv_heads
        q, k, v = split[:, : wide : wide // heads], split[:, wide : wide + kv_heads], split[:, wide + kv_heads :]
        keys = np.empty((len(qkv), kv_heads, size), np.float32)
        for x, norm, turned in ((q, q_norm, query), (k, k_norm, keys)):
            if late:
                _rotate(x, angles, turned)
                turned[:] = turned if norm is None else _norm_heads(turned, norm, eps)
            else:
                _rotate(x if norm is None else _norm_heads(x, norm, eps), angles, turned)
        block, offset = np.divmod(slots, block_tokens)
        kv[block, layer, 0, :, offset] = kv_codes.stored(keys, kv.dtype)
        kv[block, layer, 1, :, offset] = kv_codes.stored(v, kv.dtype)

    def attention(
        self,
        query: Floats,
        kv: NDArray[Any],
        layer: int,
        rows: Ints,
        tables: Ints,
        window: int,
        scale: float,
        out: Floats,
        softcap: float = 0.0,
        both: bool = False,
        sinks: Floats | None = None,
        members: Ints | None = None,
    ) -> None:
        attend(query, kv, layer, rows, tables, window, scale, out, softcap, both, sinks)

    def gate_heads(self, x: Floats, qkv: Floats, size: int) -> None:
        recurrent.gate_heads(x, qkv, size)

    def convolve(
        self,
        x: Floats,
        first: int,
        weight: Floats,
        bias: Floats | None,
        silu: bool,
        gated: bool,
        states: Floats,
        layer: int,
        rows: Ints,
        tables: Ints,
        out: Floats,
        members: Ints | None = None,
    ) -> None:
        recurrent.convolve(x, first, weight, bias, silu, gated, states, layer, rows, tables, out)

    def delta(
        self,
        x: Floats,
        gates: Floats,
        first: int,
        decay: Floats,
        time_bias: Floats,
        key_heads: int,
        tiled: bool,
        states: Floats,
        layer: int,
        rows: Ints,
        tables: Ints,
        out: Floats,
        members: Ints | None = None,
    ) -> None:
        recurrent.delta(x, gates, first, decay, time_bias, key_heads, tiled, states, layer, rows, tables, out)

    def mamba2(
        self,
        x: Floats,
        gates: Floats,
        first: int,
        decay: Floats,
        time_bias: Floats,
        skip: Floats,
        low: float,
        high: float,
        groups: int,
        states: Floats,
        layer: int,
        rows: Ints,
        tables: Ints,
        out: Floats,
        members: Ints | None = None,
    ) -> None:
        places = (states, layer, rows, tables)
        recurrent.mamba2(x, gates, first, decay, time_bias, skip, low, high, groups, *places, out)

    def gated_norm(
        self, x: Floats, gates: Floats, first: int, weight: Floats, size: int, eps: float, gate_first: bool, out: Floats
    ) -> None:
        recurrent.gated_norm(x, gates, first, weight, size, eps, gate_first, out)

    def project_add(self, x: Floats, matrix: Segments, hidden: Floats) -> None:
        hidden += self._project(x, matrix)

    def norm_add(self, x: Floats, norm: Floats, eps: float, hidden: Floats) -> None:
        hidden += rms_norm(x, norm, eps)

    def gated_project(
        self,
        hidden: Floats,
        norm: Floats,
        eps: float,
        gate_up: Segments,
        activation: str,
        down: Segments,
        out: Floats,
    ) -> None:
        out[:] = self._gated(hidden, norm, eps, gate_up, activation, down)

    def gated_mlp(
        self, hidden: Floats, norm: Floats, eps: float, gate_up: Segments, activation: str, down: Segments
    ) -> None:
        hidden += self._gated(hidden, norm, eps, gate_up, activation, down)

    def logits(self, hidden: Floats, wanted: Ints, norm: Floats, eps: float, head: Segments, out: Floats) -> None:
        out[:] = self._project(rms_norm(hidden[wanted], norm, eps), head)

    def layer_logits(
        self, hidden: Floats, wanted: Ints, norm: Floats, bias: Floats | None, eps: float, head: Segments, out: Floats
    ) -> None:
        out[:] = self._project(layer_norm(hidden[wanted], norm, bias, eps), head)

    def softcap(self, logits: Floats, cap: float) -> None:
        softcap(logits, cap)

    def scale_logits(self, logits: Floats, factor: float) -> None:
        logits *= np.float32(factor)

    def scale_queries(self, query: Floats, positions: Ints, beta: float, original: float, ahead: int = 0) -> None:
        turns = np.floor((positions + ahead).astype(np.float32) / np.float32(original))
        query *= (1 + np.float32(beta) * log(1 + turns))[:, None, None]

    def norm_heads(self, x: Floats, first: int, heads: int, size: int, weight: Floats | None, eps: float) -> None:
        part = x[:, first * size : (first + heads) * size]
        whole = np.ones(size, np.float32) if weight is None else weight
        part[:] = rms_norm(np.ascontiguousarray(part).reshape(len(x), heads, size), whole, eps).reshape(part.shape)

    def layer_norm_heads(
        self, x: Floats, first: int, heads: int, size: int, weight: Floats, bias: Floats | None, eps: float
    ) -> None:
        part = x[:, first * size : (first + heads) * size]
        split = np.ascontiguousarray(part).reshape(len(x), heads, size)
        part[:] = layer_norm(split, weight.reshape(-1, size), bias, eps).reshape(part.shape)

    def turn_heads(self, x: Floats, angles: Floats, query: Floats) -> None:
        _rotate(x.reshape(query.shape), angles, query)

    def scale_by(self, hidden: Floats, factor: Floats) -> None:
        hidden *= factor

    def xielu(self, x: Floats, positive: Floats, negative: Floats, out: Floats) -> None:
        half, least = np.float32(0.5), np.float32(-1e-6)
        above, below = log1p(exp(positive[0])), half + log1p(exp(negative[0]))
        out[:] = np.where(x > 0, above * x * x, (expm1(np.minimum(x, least)) - x) * below) + half * x

    def gate_with(self, x: Floats, activation: str, by: Floats, first: int, out: Floats) -> None:
        out[:] = ACTIVATIONS[activation](x) * by[:, first : first + x.shape[1]]

    def latent_write(
        self,
        x: Floats,
        angles: Floats,
        neighbours: bool,
        norm: Floats,
        eps: float,
        kv: NDArray[Any],
        layer: int,
        slots: Ints,
    ) -> None:
        latent.write(x, angles, neighbours, lambda one: rms_norm(one, norm, eps), kv, layer, slots)

    def latent_queries(
        self, x: Floats, keys: Sequence[Segments], angles: Floats, neighbours: bool, query: Floats
    ) -> None:
        latent.queries(x, keys, angles, neighbours, self._project, query)

    def latent_attention(
        self,
        query: Floats,
        kv: NDArray[Any],
        layer: int,
        rows: Ints,
        tables: Ints,
        scale: float,
        out: Floats,
        members: Ints | None = None,
    ) -> None:
        latent.attention(query, kv, layer, rows, tables, scale, out)

    def latent_values(self, x: Floats, values: Sequence[Segments], out: Floats) -> None:
        latent.values(x, values, self._project, out)

    def route(
        self,
        scores: Floats,
        bias: Floats | None,
        kind: str,
        normed: bool,
        scale: float,
        groups: int,
        chosen_groups: int,
        chosen: Ints,
        shares: Floats,
    ) -> None:
        count = chosen.shape[1]
        parts = scores
        if kind != "chosen":
            parts = _softmax(scores) if kind == "softmax" else _sigmoid(scores)
        choice = parts if bias is None else parts + bias
        if groups > 1:
            choice = _of_groups(choice, groups, chosen_groups)
        chosen[:] = np.sort(_largest(choice, count), axis=1)
        found = np.take_along_axis(parts, chosen, axis=1)
        if kind == "chosen":
            found = _softmax(found)
        if normed:
            found = found / (found.sum(axis=1, keepdims=True) + np.float32(1e-20))
        shares[:] = found * np.float32(scale)

    def experts(
        self,
        x: Floats,
        chosen: Ints,
        shares: Floats,
        gate_up: Sequence[Segments],
        activation: str,
        down: Sequence[Segments],
        out: Floats,
    ) -> None:
        out[:] = 0
        for expert in np.unique(chosen):
            rows, places = np.nonzero(chosen == expert)
            gates = self._project(x[rows], gate_up[expert])
            both = gates.shape[1] == 2 * down[expert].inner
            passed = gated(gates, activation) if both else ACTIVATIONS[activation](gates)
            out[rows] += shares[rows, places, None] * self._project(passed, down[expert])

    def scale_shares(self, shares: Floats, chosen: Ints, factors: Floats) -> None:
        shares *= factors[chosen]

    def scale_tokens(self, x: Floats, shares: Floats, out: Floats) -> None:
        out[:] = x * shares
        shares[:] = 1

    def mix_streams(self, x: Floats, parts: Floats, out: Floats) -> None:
        count = x.shape[1]
        out[:] = x
        for stream in range(count):
            for other in range(count):
                out[:, stream] += parts[:, stream * count + other, None] * x[:, other]

    def correct_streams(self, given: Floats, parts: Floats, active: int, x: Floats) -> None:
        x += (parts + np.float32(1))[:, :, None] * (given - x[:, active])[:, None]

    def take_stream(self, x: Floats, place: int, out: Floats) -> None:
        out[:] = x[:, place]

    def put_stream(self, x: Floats, place: int, out: Floats) -> None:
        out[:, place] = x

    def add_streams(self, x: Floats, first: int, out: Floats) -> None:
        out[:, first:] += x[:, None]

    def match_magnitude(self, like: Floats, x: Floats) -> None:
        wanted, present = (np.square(one).sum(axis=-1, keepdims=True) / np.float32(x.shape[1]) for one in (like, x))
        x *= np.sqrt(wanted)
        x /= np.sqrt(np.maximum(present, np.float32(1e-5)))

    def sparsify(self, gates: Floats, factor: float) -> None:
        width = gates.shape[1] // 2
        own = np.ascontiguousarray(gates[:, :width])
        mean = own.sum(axis=-1, keepdims=True) / np.float32(width)
        spread = np.square(own - mean).sum(axis=-1, keepdims=True) / np.float32(width)
        gates[:, :width] = np.maximum(own - (mean + np.sqrt(spread) * np.float32(factor)), np.float32(0))

    def scale_columns(self, x: Floats, weight: Floats, out: Floats) -> None:
        out[:] = x * weight

    def add_gated(self, x: Floats, gate: Floats, hidden: Floats) -> None:
        hidden += 1 / (1 + exp(-gate)) * x

    def sampler(self, vocab: int) -> Sampler:
        return NUMPY

    def program(self, calls: Sequence[KernelCall]) -> Interpreted:
        return Interpreted(self, fuse(calls))

    def close(self) -> None:
        self._leave()
        if self._pool is not None:
            self._pool.shutdown()

    def _gated(
        self, hidden: Floats, norm: Floats, eps: float, gate_up: Segments, activation: str, down: Segments
    ) -> Floats:
        return self._project(gated(self._project(rms_norm(hidden, norm, eps), gate_up), activation), down)

    def _project(self, x: Floats, matrix: Segments) -> Floats:
        low = rounded(x) if any(quantised for quantised, _ in matrix.parts) else x
        found = [project(low if quantised else x, part, self._pool, self._threads) for quantised, part in matrix.parts]
        return found[0] if len(found) == 1 else np.concatenate(found, axis=1)


def gated(gates: Floats, activation: str) -> Floats:
    """Return act(g) * u for gates[M, 2F] with g beside u: see `Kernels.gate`."""
    width = gates.shape[1] // 2
    g, u = gates[:, :width], gates[:, width:]
    if activation != "clamped_silu":
        return ACTIVATIONS[activation](g) * u
    low: Floats = np.minimum(g, np.float32(7))
    wide: Floats = np.clip(u, np.float32(-7), np.float32(7))
    passed: Floats = (wide + np.float32(1)) * (low * _sigmoid(np.float32(1.702) * low))
    return passed


def _sigmoid(x: Floats) -> Floats:
    out: Floats = np.reciprocal(1 + exp(-x))
    return out


def _softmax(x: Floats) -> Floats:
    weights = exp(x - x.max(axis=1, keepdims=True))
    out: Floats = weights / weights.sum(axis=1, keepdims=True)
    return out


def _largest(x: Floats, count: int) -> Ints:
    """Return the indexes of the `count` largest in each row, ties by index; NaNs come last."""
    order = np.argsort(np.where(np.isnan(x), np.inf, -x), axis=1, kind="stable")
    return order[:, :count].astype(np.int32)


def _of_groups(choice: Floats, groups: int, chosen_groups: int) -> Floats:
    """Set the choice to -inf in all groups but the best `chosen_groups`."""
    members = choice.reshape(len(choice), groups, -1)
    known = np.where(np.isnan(members), np.float32(-np.inf), members)
    sums = np.sort(known, axis=2)[:, :, -2:].sum(axis=2)
    kept = np.zeros(sums.shape, np.bool_)
    np.put_along_axis(kept, _largest(sums, chosen_groups), True, axis=1)
    return np.where(kept[:, :, None], members, np.float32(-np.inf)).reshape(choice.shape)


def _norm_heads(x: Floats, weight: Floats, eps: float) -> Floats:
    """Norm x[M, heads, D] head by head, or all heads together if the weight spans them."""
    if len(weight) == x.shape[-1]:
        return rms_norm(np.ascontiguousarray(x), weight, eps)
    return rms_norm(np.ascontiguousarray(x).reshape(len(x), -1), weight, eps).reshape(x.shape)


def _rotate(x: Floats, angles: Floats | None, out: Floats) -> None:
    """Rotate the pairs (i, i + r/2) of the first r numbers of x[M, heads, D] by angles[M, 2, r/2]."""
    half = 0 if angles is None else angles.shape[-1]
    out[..., 2 * half :] = x[..., 2 * half :]
    if angles is None:
        return
    cos, sin = angles[:, None, 0], angles[:, None, 1]
    first, second = x[..., :half], x[..., half : 2 * half]
    out[..., :half] = first * cos - second * sin
    out[..., half : 2 * half] = second * cos + first * sin
