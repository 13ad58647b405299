"""Kernels that work on each token alone, experts among them. Functions as `kernels.mlx.attention` describes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from cairn.kernels.base import LowRank
from cairn.kernels.mlx.cells import Blank
from cairn.kernels.mlx.weights import JoinedMatrices, MlxMatrix

Array = Any


def _gelu(x: Array) -> Array:
    return 0.5 * x * (1 + mx.erf(x * math.sqrt(0.5)))


def _gelu_tanh(x: Array) -> Array:
    return 0.5 * x * (1 + mx.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": lambda x: x * mx.sigmoid(x),
    "gelu_tanh": _gelu_tanh,
    "gelu": _gelu,
    "tanh": mx.tanh,
    "relu2": lambda x: mx.square(mx.maximum(x, 0)),
}


def embed(table: Array | MlxMatrix, tokens: Array, hidden: Blank) -> Array:
    """`Kernels.embed`."""
    if isinstance(table, MlxMatrix):
        return table.rows(tokens)
    return mx.take(table, tokens, axis=0).astype(mx.float32)


def scale(hidden: Array, factor: float) -> Array:
    """`Kernels.scale`."""
    return hidden * float(np.float32(factor))


def scale_logits(logits: Array, factor: float) -> Array:
    """`Kernels.scale_logits`."""
    return scale(logits, factor)


def norm(x: Array, weight: Array, eps: float, out: Blank) -> Array:
    """`Kernels.norm`."""
    return mx.fast.rms_norm(x, weight, eps)


def layer_norm(x: Array, weight: Array, bias: Array | None, eps: float, out: Blank) -> Array:
    """`Kernels.layer_norm`."""
    return mx.fast.layer_norm(x, weight, bias, eps)


def project(x: Array, matrix: MlxMatrix, out: Blank) -> Array:
    """`Kernels.project`."""
    return matrix.product(x)


def adapt(x: Array, rows: Array, slots: Array, scales: Array, adapters: Sequence[LowRank], out: Array) -> Array:
    """`Kernels.adapt`: each adapter is computed for all tokens and added to those of rows that have it."""
    tokens = mx.arange(len(x))[:, None]
    inside = (tokens >= rows[:, 0]) & (tokens < rows[:, 0] + rows[:, 1])
    for place in range(slots.shape[1]):
        slot = mx.sum(mx.where(inside, slots[:, place], 0), axis=1)
        factor = mx.sum(mx.where(inside, scales[:, place], 0), axis=1)[:, None]
        for one in adapters:
            low = one.down.product(x) * factor
            for up in one.ups:
                columns = slice(up.column, up.column + up.out)
                more = up.matrix.product(low[:, up.first : up.first + up.rank])
                out[:, columns] = mx.where((slot == one.slot)[:, None], out[:, columns] + more, out[:, columns])
    return out


def activate(x: Array, activation: str, out: Blank) -> Array:
    """`Kernels.activate`."""
    return ACTIVATIONS[activation](x)


def gate(gates: Array, activation: str, out: Blank | None = None) -> Array:
    """`Kernels.gate`, along the last axis."""
    half = gates.shape[-1] // 2
    g, u = gates[..., :half], gates[..., half:]
    if activation != "clamped_silu":
        return ACTIVATIONS[activation](g) * u
    low = mx.minimum(g, 7)
    return (mx.clip(u, -7, 7) + 1) * (low * mx.sigmoid(1.702 * low))


def add(x: Array, hidden: Array) -> Array:
    """`Kernels.add`."""
    return hidden + x


def softcap(logits: Array, cap: float) -> Array:
    """`Kernels.softcap`."""
    return cap * mx.tanh(logits / cap)


def scale_by(hidden: Array, factor: Array) -> Array:
    """`Kernels.scale_by`."""
    return hidden * factor


def xielu(x: Array, positive: Array, negative: Array, out: Blank) -> Array:
    """`Kernels.xielu`."""
    above, below = (mx.logaddexp(one, mx.zeros_like(one)) for one in (positive, negative))
    low = (mx.expm1(mx.minimum(x, -1e-6)) - x) * (0.5 + below)
    return mx.where(x > 0, above * x * x, low) + 0.5 * x


def gate_with(x: Array, activation: str, by: Array, first: int, out: Blank) -> Array:
    """`Kernels.gate_with`."""
    return ACTIVATIONS[activation](x) * by[:, first : first + x.shape[1]]


def scale_columns(x: Array, weight: Array, out: Blank) -> Array:
    """`Kernels.scale_columns`."""
    return x * weight


def add_gated(x: Array, own: Array, hidden: Array) -> Array:
    """`Kernels.add_gated`."""
    return hidden + mx.sigmoid(own) * x


def norm_project(hidden: Array, weight: Array, eps: float, matrix: MlxMatrix, out: Blank) -> Array:
    """`Kernels.norm_project`."""
    return matrix.product(mx.fast.rms_norm(hidden, weight, eps))


def project_add(x: Array, matrix: MlxMatrix, hidden: Array) -> Array:
    """`Kernels.project_add`."""
    return hidden + matrix.product(x)


def norm_add(x: Array, weight: Array, eps: float, hidden: Array) -> Array:
    """`Kernels.norm_add`."""
    return hidden + mx.fast.rms_norm(x, weight, eps)


def gated_project(
    hidden: Array,
    weight: Array,
    eps: float,
    gate_up: MlxMatrix,
    activation: str,
    down: MlxMatrix,
    out: Blank | None = None,
) -> Array:
    """`Kernels.gated_project`."""
    return down.product(gate(gate_up.product(mx.fast.rms_norm(hidden, weight, eps)), activation))


def gated_mlp(hidden: Array, weight: Array, eps: float, gate_up: MlxMatrix, activation: str, down: MlxMatrix) -> Array:
    """`Kernels.gated_mlp`."""
    return hidden + gated_project(hidden, weight, eps, gate_up, activation, down)


def logits(hidden: Array, wanted: Array, weight: Array, eps: float, head: MlxMatrix, out: Blank) -> Array:
    """`Kernels.logits`."""
    return head.product(mx.fast.rms_norm(mx.take(hidden, wanted, axis=0), weight, eps))


def layer_logits(
    hidden: Array, wanted: Array, weight: Array, bias: Array | None, eps: float, head: MlxMatrix, out: Blank
) -> Array:
    """`Kernels.layer_logits`."""
    return head.product(mx.fast.layer_norm(mx.take(hidden, wanted, axis=0), weight, bias, eps))


def route(
    scores: Array,
    bias: Array | None,
    kind: str,
    normed: bool,
    factor: float,
    groups: int,
    chosen_groups: int,
    chosen: Blank,
    shares: Blank,
) -> tuple[Array, Array]:
    """`Kernels.route`."""
    parts = scores
    if kind != "chosen":
        parts = mx.softmax(scores, axis=1) if kind == "softmax" else mx.sigmoid(scores)
    choice = parts if bias is None else parts + bias
    if groups > 1:
        choice = _of_groups(choice, groups, chosen_groups)
    ids = mx.sort(_largest(choice, chosen.shape[1]), axis=1)
    found = mx.take_along_axis(parts, ids, axis=1)
    if kind == "chosen":
        found = mx.softmax(found, axis=1)
    if normed:
        found = found / (found.sum(axis=1, keepdims=True) + 1e-20)
    return ids, found * factor


def _largest(x: Array, count: int) -> Array:
    """Return int32 indexes of the `count` largest in each row, ties by index; NaNs come last."""
    order = mx.where(mx.isnan(x), mx.inf, -x)
    return mx.argsort(order, axis=1)[:, :count].astype(mx.int32)


def _of_groups(choice: Array, groups: int, chosen_groups: int) -> Array:
    """Set the choice to -inf in all groups but the best `chosen_groups`."""
    members = choice.reshape(len(choice), groups, -1)
    known = mx.where(mx.isnan(members), -mx.inf, members)
    sums = mx.sort(known, axis=2)[:, :, -2:].sum(axis=2)
    best = _largest(sums, chosen_groups)
    kept = (best[:, :, None] == mx.arange(groups)).any(axis=1)
    return mx.where(kept[:, :, None], members, -mx.inf).reshape(choice.shape)


def experts(
    x: Array, chosen: Array, shares: Array, gate_up: JoinedMatrices, activation: str, down: JoinedMatrices, out: Blank
) -> Array:
    """`Kernels.experts`."""
    gates = gate_up.product(x[:, None], chosen)
    both = gates.shape[-1] == 2 * down.inner
    passed = gate(gates, activation) if both else ACTIVATIONS[activation](gates)
    made = down.product(passed, chosen) * shares[:, :, None]
    total = made[:, 0]
    for place in range(1, made.shape[1]):
        total = total + made[:, place]
    return total


def scale_shares(shares: Array, chosen: Array, factors: Array) -> Array:
    """`Kernels.scale_shares`."""
    return shares * mx.take(factors, chosen, axis=0)


def scale_tokens(x: Array, shares: Array, out: Blank) -> tuple[Array, Array]:
    """`Kernels.scale_tokens`: the shares, then what it makes, in the order of its arguments."""
    return mx.ones_like(shares), x * shares


def mix_streams(x: Array, parts: Array, out: Blank) -> Array:
    """`Kernels.mix_streams`."""
    count = x.shape[1]
    return x + parts.reshape(len(x), count, count) @ x


def correct_streams(given: Array, parts: Array, active: int, x: Array) -> Array:
    """`Kernels.correct_streams`."""
    return x + (parts + 1)[:, :, None] * (given - x[:, active])[:, None]


def take_stream(x: Array, place: int, out: Blank) -> Array:
    """`Kernels.take_stream`."""
    return x[:, place]


def put_stream(x: Array, place: int, out: Array) -> Array:
    """`Kernels.put_stream`."""
    return mx.concatenate((out[:, :place], x[:, None], out[:, place + 1 :]), axis=1)


def add_streams(x: Array, first: int, out: Array) -> Array:
    """`Kernels.add_streams`."""
    return mx.concatenate((out[:, :first], out[:, first:] + x[:, None]), axis=1)


def match_magnitude(like: Array, x: Array) -> Array:
    """`Kernels.match_magnitude`."""
    wanted, found = (mx.square(one).mean(axis=-1, keepdims=True) for one in (like, x))
    return x * mx.sqrt(wanted) / mx.sqrt(mx.maximum(found, 1e-5))


def sparsify(gates: Array, factor: float) -> Array:
    """`Kernels.sparsify`."""
    half = gates.shape[1] // 2
    own = gates[:, :half]
    mean, spread = own.mean(axis=-1, keepdims=True), mx.std(own, axis=-1, keepdims=True)
    return mx.concatenate((mx.maximum(own - (mean + spread * factor), 0), gates[:, half:]), axis=1)
