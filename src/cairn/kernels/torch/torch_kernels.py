"""The kernels in plain torch: every operation on any device, with no guarantee about the order of sums."""

# The methods of TorchKernels are documented where their meaning is declared, in kernels.base.
# ruff: noqa: D102

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cairn.kernels import low_rank
from cairn.kernels.base import LowRank, Packed
from cairn.kernels.program import Interpreted, KernelCall
from cairn.kernels.rope import Rope, frequencies
from cairn.kernels.torch import attention, recurrent
from cairn.kernels.torch.sampler import TorchSampler
from cairn.kernels.torch.storage import TorchStorage
from cairn.kernels.torch.weights import TorchMatrix, pack
from cairn.types.model_spec import RopeScaling

VERSION = "torch-1"
"""Version of these kernels. Change it with every change that can move a bit."""

Tensor = Any
F = torch.nn.functional

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "tanh": torch.tanh,
    "relu2": lambda x: x.clamp(min=0).square(),
}


class TorchKernels(TorchStorage):
    """`kernels.base.Kernels` on a torch device. The methods are documented there."""

    def __init__(self, device: str, threads: int = 0) -> None:
        """Use `device`, by torch's name. `threads`: CPU threads if the device is the CPU; 0: torch's default."""
        super().__init__(device)
        if threads and self.device.type == "cpu":
            torch.set_num_threads(threads)

    @property
    def numerics(self) -> tuple[object, ...]:
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type
        return (VERSION, torch.__version__, name)

    # ------------------------------------------------------------------------------------------------ weights

    def vector(self, source: NDArray[Any]) -> Tensor:
        return self.tensor(np.array(source, np.float32))

    def table(self, source: NDArray[Any] | Packed) -> Tensor | TorchMatrix:
        return self.matrix([source], [None]) if isinstance(source, Packed) else self.tensor(source)

    def matrix(self, weights: Sequence[NDArray[Any] | Packed], biases: Sequence[NDArray[Any] | None]) -> TorchMatrix:
        return pack(weights, biases, self.tensor)

    def rope(self, head_dim: int, theta: float, scaling: RopeScaling) -> tuple[Tensor, float]:
        made: Rope = frequencies(head_dim, theta, scaling)
        return self.tensor(made.frequencies), made.factor

    # ----------------------------------------------------------------------------------------- plain operations

    def embed(self, table: Tensor | TorchMatrix, tokens: Tensor, hidden: Tensor) -> None:
        hidden.copy_(table.rows(tokens.long()) if isinstance(table, TorchMatrix) else table[tokens.long()])

    def rope_angles(self, rope: tuple[Tensor, float], positions: Tensor, angles: Tensor) -> None:
        turns = positions.float()[:, None] * rope[0]
        angles[:, 0], angles[:, 1] = torch.cos(turns) * rope[1], torch.sin(turns) * rope[1]

    def scale(self, hidden: Tensor, factor: float) -> None:
        hidden *= _float32(factor)

    def norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        out.copy_(rms_norm(x, weight, eps))

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor) -> None:
        out.copy_(F.layer_norm(x, x.shape[-1:], weight, bias, eps))

    def project(self, x: Tensor, matrix: TorchMatrix, out: Tensor) -> None:
        matrix.product(x, out)

    def adapt(
        self, x: Tensor, rows: Tensor, slots: Tensor, scales: Tensor, adapters: Sequence[LowRank], out: Tensor
    ) -> None:
        places = (self.host(rows).tolist(), self.host(slots).tolist(), scales.tolist())
        low_rank.adapt(lambda part, matrix: matrix.product(part), x, *places, adapters, out)

    def activate(self, x: Tensor, activation: str, out: Tensor) -> None:
        out.copy_(ACTIVATIONS[activation](x))

    def gate(self, gates: Tensor, activation: str, out: Tensor) -> None:
        out.copy_(gated(gates, activation))

    def add(self, x: Tensor, hidden: Tensor) -> None:
        hidden += x

    def softcap(self, logits: Tensor, cap: float) -> None:
        logits.copy_(cap * torch.tanh(logits / cap))

    def scale_logits(self, logits: Tensor, factor: float) -> None:
        logits *= _float32(factor)

    def scale_queries(self, query: Tensor, positions: Tensor, beta: float, original: float, ahead: int = 0) -> None:
        turns = torch.floor((positions + ahead).float() / original)
        query *= (1 + beta * torch.log(1 + turns))[:, None, None]

    def norm_heads(self, x: Tensor, first: int, heads: int, size: int, weight: Tensor | None, eps: float) -> None:
        part = x[:, first * size : (first + heads) * size]
        part.copy_(rms_norm(part.reshape(len(x), heads, size), weight, eps).reshape(part.shape))

    def layer_norm_heads(
        self, x: Tensor, first: int, heads: int, size: int, weight: Tensor, bias: Tensor | None, eps: float
    ) -> None:
        part = x[:, first * size : (first + heads) * size]
        normed = F.layer_norm(part.reshape(len(x), heads, size), (size,), None, None, eps) * weight.reshape(-1, size)
        part.copy_((normed if bias is None else normed + bias).reshape(part.shape))

    def turn_heads(self, x: Tensor, angles: Tensor, query: Tensor) -> None:
        query.copy_(_rotated(x.reshape(query.shape), angles))

    def scale_by(self, hidden: Tensor, factor: Tensor) -> None:
        hidden *= factor

    def xielu(self, x: Tensor, positive: Tensor, negative: Tensor, out: Tensor) -> None:
        above, below = F.softplus(positive[0]), 0.5 + F.softplus(negative[0])
        low = (torch.expm1(x.clamp(max=-1e-6)) - x) * below
        out.copy_(torch.where(x > 0, above * x * x, low) + 0.5 * x)

    def gate_with(self, x: Tensor, activation: str, by: Tensor, first: int, out: Tensor) -> None:
        out.copy_(ACTIVATIONS[activation](x) * by[:, first : first + x.shape[1]])

    def gate_heads(self, x: Tensor, qkv: Tensor, size: int) -> None:
        width = x.shape[1]
        x *= torch.sigmoid(qkv[:, : 2 * width].reshape(len(x), -1, 2, size)[:, :, 1].reshape(x.shape))

    def gated_norm(
        self, x: Tensor, gates: Tensor, first: int, weight: Tensor, size: int, eps: float, gate_first: bool, out: Tensor
    ) -> None:
        gate = F.silu(gates[:, first : first + x.shape[1]])
        parts = (x * gate if gate_first else x).reshape(len(x), -1, size)
        normed = (rms_norm(parts, None, eps) * weight.reshape(-1, size)).reshape(x.shape)
        out.copy_(normed if gate_first else normed * gate)

    def scale_columns(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        out.copy_(x * weight)

    def add_gated(self, x: Tensor, gate: Tensor, hidden: Tensor) -> None:
        hidden += torch.sigmoid(gate) * x

    # ----------------------------------------------------------------------------------------------- attention

    def rope_write(
        self,
        qkv: Tensor,
        angles: Tensor | None,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        kv: Tensor,
        layer: int,
        slots: Tensor,
        query: Tensor,
        late: bool = False,
    ) -> None:
        _, heads, size = query.shape
        kv_heads, block_tokens = kv.shape[3], kv.shape[4]
        split = qkv.reshape(len(qkv), -1, size)
        wide = split.shape[1] - 2 * kv_heads
        q, k, v = split[:, : wide : wide // heads], split[:, wide : wide + kv_heads], split[:, wide + kv_heads :]
        query.copy_(_turned(q, angles, q_norm, eps, late))
        block, offset = slots.long() // block_tokens, slots.long() % block_tokens
        kv[block, layer, 0, :, offset] = _turned(k, angles, k_norm, eps, late).to(kv.dtype)
        kv[block, layer, 1, :, offset] = v.to(kv.dtype)

    def attention(
        self,
        query: Tensor,
        kv: Tensor,
        layer: int,
        rows: Tensor,
        tables: Tensor,
        window: int,
        scale: float,
        out: Tensor,
        softcap: float = 0.0,
        both: bool = False,
        sinks: Tensor | None = None,
        members: Tensor | None = None,
    ) -> None:
        places = self.host(rows), self.host(tables)
        attention.attend(query, kv, layer, *places, window, scale, out, softcap, both, sinks)

    def latent_write(
        self,
        x: Tensor,
        angles: Tensor,
        neighbours: bool,
        norm: Tensor,
        eps: float,
        kv: Tensor,
        layer: int,
        slots: Tensor,
    ) -> None:
        rank = x.shape[1] - 2 * angles.shape[-1]
        normed = torch.cat((rms_norm(x[:, :rank], norm, eps), x[:, rank:]), dim=1)
        self.write_latents(normed, angles, neighbours, kv, layer, slots)

    def write_latents(self, x: Tensor, angles: Tensor, neighbours: bool, kv: Tensor, layer: int, slots: Tensor) -> None:
        """Rotate the last numbers of normed latents x[M, L + r] and write them to the pool."""
        rank = x.shape[1] - 2 * angles.shape[-1]
        block, offset = slots.long() // kv.shape[4], slots.long() % kv.shape[4]
        whole = torch.cat((x[:, :rank], _pairs(x[:, None, rank:], angles, neighbours)[:, 0]), dim=1)
        kv[block, layer, 0, 0, offset] = whole.to(kv.dtype)

    def latent_queries(
        self, x: Tensor, keys: Sequence[TorchMatrix], angles: Tensor, neighbours: bool, query: Tensor
    ) -> None:
        turns = 2 * angles.shape[-1]
        split = x.reshape(len(x), len(keys), -1)
        for head, matrix in enumerate(keys):
            query[:, head, :-turns] = matrix.product(split[:, head, :-turns])
        query[:, :, -turns:] = _pairs(split[:, :, -turns:], angles, neighbours)

    def latent_attention(
        self,
        query: Tensor,
        kv: Tensor,
        layer: int,
        rows: Tensor,
        tables: Tensor,
        scale: float,
        out: Tensor,
        members: Tensor | None = None,
    ) -> None:
        whole = torch.empty((len(query), query.shape[1] * query.shape[2]), device=query.device)
        attention.attend(query, kv, layer, self.host(rows), self.host(tables), 0, scale, whole)
        out.copy_(whole.reshape(query.shape)[:, :, : out.shape[2]])

    def latent_values(self, x: Tensor, values: Sequence[TorchMatrix], out: Tensor) -> None:
        out.copy_(torch.cat([matrix.product(x[:, head]) for head, matrix in enumerate(values)], dim=1))

    # -------------------------------------------------------------------------------------------------- states

    def convolve(
        self,
        x: Tensor,
        first: int,
        weight: Tensor,
        bias: Tensor | None,
        silu: bool,
        gated: bool,
        states: Tensor,
        layer: int,
        rows: Tensor,
        tables: Tensor,
        out: Tensor,
        members: Tensor | None = None,
    ) -> None:
        places = (states, layer, self.host(rows), self.host(tables))
        recurrent.convolve(x, first, weight, bias, silu, gated, places, out)

    def delta(
        self,
        x: Tensor,
        gates: Tensor,
        first: int,
        decay: Tensor,
        time_bias: Tensor,
        key_heads: int,
        tiled: bool,
        states: Tensor,
        layer: int,
        rows: Tensor,
        tables: Tensor,
        out: Tensor,
        members: Tensor | None = None,
    ) -> None:
        places = (states, layer, self.host(rows), self.host(tables))
        recurrent.delta(x, gates, first, decay, time_bias, key_heads, tiled, places, out)

    def mamba2(
        self,
        x: Tensor,
        gates: Tensor,
        first: int,
        decay: Tensor,
        time_bias: Tensor,
        skip: Tensor,
        low: float,
        high: float,
        groups: int,
        states: Tensor,
        layer: int,
        rows: Tensor,
        tables: Tensor,
        out: Tensor,
        members: Tensor | None = None,
    ) -> None:
        places = (states, layer, self.host(rows), self.host(tables))
        recurrent.mamba2(x, gates, first, decay, time_bias, skip, (low, high), groups, places, out)

    # ------------------------------------------------------------------------------------------------- experts

    def route(
        self,
        scores: Tensor,
        bias: Tensor | None,
        kind: str,
        normed: bool,
        scale: float,
        groups: int,
        chosen_groups: int,
        chosen: Tensor,
        shares: Tensor,
    ) -> None:
        parts = scores
        if kind != "chosen":
            parts = self.softmax(scores) if kind == "softmax" else self.sigmoid(scores)
        choice = parts if bias is None else parts + bias
        if groups > 1:
            choice = _of_groups(choice, groups, chosen_groups)
        ids = _largest(choice, chosen.shape[1]).sort(dim=1).values
        found = parts.gather(1, ids)
        if kind == "chosen":
            found = self.softmax(found)
        if normed:
            found = found / (found.sum(dim=1, keepdim=True) + 1e-20)
        chosen.copy_(ids)
        shares.copy_(found * scale)

    def sigmoid(self, x: Tensor) -> Tensor:
        """Return 1 / (1 + e^-x) of each number."""
        return torch.sigmoid(x)

    def softmax(self, x: Tensor) -> Tensor:
        """Return the softmax of each row."""
        return torch.softmax(x, dim=1)

    def experts(
        self,
        x: Tensor,
        chosen: Tensor,
        shares: Tensor,
        gate_up: Sequence[TorchMatrix],
        activation: str,
        down: Sequence[TorchMatrix],
        out: Tensor,
    ) -> None:
        out.zero_()
        for expert in chosen.unique().tolist():
            rows, places = (chosen == expert).nonzero(as_tuple=True)
            gates = gate_up[expert].product(x[rows])
            both = gates.shape[1] == 2 * down[expert].inner
            passed = gated(gates, activation) if both else ACTIVATIONS[activation](gates)
            out[rows] += shares[rows, places, None] * down[expert].product(passed)

    def scale_shares(self, shares: Tensor, chosen: Tensor, factors: Tensor) -> None:
        shares *= factors[chosen.long()]

    def scale_tokens(self, x: Tensor, shares: Tensor, out: Tensor) -> None:
        out.copy_(x * shares)
        shares.fill_(1)

    # ------------------------------------------------------------------------------------------------- streams

    def mix_streams(self, x: Tensor, parts: Tensor, out: Tensor) -> None:
        count = x.shape[1]
        out.copy_(x + parts.reshape(len(x), count, count) @ x)

    def correct_streams(self, given: Tensor, parts: Tensor, active: int, x: Tensor) -> None:
        x += (parts + 1)[:, :, None] * (given - x[:, active])[:, None]

    def take_stream(self, x: Tensor, place: int, out: Tensor) -> None:
        out.copy_(x[:, place])

    def put_stream(self, x: Tensor, place: int, out: Tensor) -> None:
        out[:, place] = x

    def add_streams(self, x: Tensor, first: int, out: Tensor) -> None:
        out[:, first:] += x[:, None]

    def match_magnitude(self, like: Tensor, x: Tensor) -> None:
        wanted, found = (one.square().mean(dim=-1, keepdim=True) for one in (like, x))
        x.copy_(x * wanted.sqrt() / found.clamp(min=1e-5).sqrt())

    def sparsify(self, gates: Tensor, factor: float) -> None:
        own = gates[:, : gates.shape[1] // 2]
        mean, spread = own.mean(dim=-1, keepdim=True), own.std(dim=-1, keepdim=True, correction=0)
        own.copy_((own - (mean + spread * factor)).clamp(min=0))

    # ------------------------------------------------------------------- what some of them are together, and the rest

    def norm_project(self, hidden: Tensor, norm: Tensor, eps: float, matrix: TorchMatrix, out: Tensor) -> None:
        matrix.product(self.normed(hidden, norm, eps), out)

    def project_add(self, x: Tensor, matrix: TorchMatrix, hidden: Tensor) -> None:
        matrix.product(x, hidden, add=True)

    def normed(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return rms_norm(x)."""
        return rms_norm(x, weight, eps)

    def gated(self, gates: Tensor, activation: str) -> Tensor:
        """Return act(g) * u of gates[M, 2F]."""
        return gated(gates, activation)

    def norm_add(self, x: Tensor, norm: Tensor, eps: float, hidden: Tensor) -> None:
        hidden += rms_norm(x, norm, eps)

    def gated_project(
        self,
        hidden: Tensor,
        norm: Tensor,
        eps: float,
        gate_up: TorchMatrix,
        activation: str,
        down: TorchMatrix,
        out: Tensor,
    ) -> None:
        down.product(self.gated(gate_up.product(self.normed(hidden, norm, eps)), activation), out)

    def gated_mlp(
        self, hidden: Tensor, norm: Tensor, eps: float, gate_up: TorchMatrix, activation: str, down: TorchMatrix
    ) -> None:
        gates = gate_up.product(self.normed(hidden, norm, eps))
        down.product(self.gated(gates, activation), hidden, add=True)

    def logits(self, hidden: Tensor, wanted: Tensor, norm: Tensor, eps: float, head: TorchMatrix, out: Tensor) -> None:
        head.product(self.normed(hidden[wanted.long()], norm, eps), out)

    def layer_logits(
        self,
        hidden: Tensor,
        wanted: Tensor,
        norm: Tensor,
        bias: Tensor | None,
        eps: float,
        head: TorchMatrix,
        out: Tensor,
    ) -> None:
        normed = hidden[wanted.long()]
        self.layer_norm(normed, norm, bias, eps, normed)
        head.product(normed, out)

    def sampler(self, vocab: int) -> TorchSampler:
        return TorchSampler()

    def program(self, calls: Sequence[KernelCall]) -> Interpreted:
        return Interpreted(self, calls)

    def close(self) -> None:
        self._host.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Return x / rms(x) * weight along the last axis."""
    normed = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    return normed if weight is None else normed * weight


def gated(gates: Tensor, activation: str) -> Tensor:
    """Return act(g) * u for gates[M, 2F] with g beside u: see `Kernels.gate`."""
    g, u = gates.chunk(2, dim=1)
    if activation != "clamped_silu":
        return ACTIVATIONS[activation](g) * u
    low = g.clamp(max=7)
    return (u.clamp(-7, 7) + 1) * (low * torch.sigmoid(1.702 * low))


def _float32(factor: float) -> float:
    """Round a factor as the other kernels do."""
    return float(np.float32(factor))


def _turned(x: Tensor, angles: Tensor | None, norm: Tensor | None, eps: float, late: bool) -> Tensor:
    """Return heads x[M, heads, D] normed and rotated; if `late`, rotated and then normed."""
    if late:
        turned = _rotated(x, angles)
        return turned if norm is None else _norm_all(turned, norm, eps)
    return _rotated(x if norm is None else _norm_all(x, norm, eps), angles)


def _norm_all(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norm x[M, heads, D] head by head, or all heads together if the weight spans them."""
    if len(weight) == x.shape[-1]:
        return rms_norm(x, weight, eps)
    return rms_norm(x.reshape(len(x), -1), weight, eps).reshape(x.shape)


def _rotated(x: Tensor, angles: Tensor | None) -> Tensor:
    """Rotate the pairs (i, i + r/2) of the first r numbers of x[M, heads, D] by angles[M, 2, r/2]."""
    if angles is None:
        return x
    turns = 2 * angles.shape[-1]
    return torch.cat((_pairs(x[..., :turns], angles, False), x[..., turns:]), dim=-1)


def _pairs(x: Tensor, angles: Tensor, neighbours: bool) -> Tensor:
    """Rotate pairs of x[M, heads, r]: (2i, 2i + 1) if `neighbours`, else (i, i + r/2)."""
    cos, sin = angles[:, None, 0], angles[:, None, 1]
    half = x.shape[-1] // 2
    first, second = (x[..., 0::2], x[..., 1::2]) if neighbours else (x[..., :half], x[..., half:])
    made = first * cos - second * sin, second * cos + first * sin
    return torch.stack(made, dim=-1).flatten(-2) if neighbours else torch.cat(made, dim=-1)


def _largest(x: Tensor, count: int) -> Tensor:
    """Return the indexes of the `count` largest in each row, ties by index; NaNs come last."""
    order = torch.where(x.isnan(), math.inf, -x)
    return torch.sort(order, dim=1, stable=True).indices[:, :count]


def _of_groups(choice: Tensor, groups: int, chosen_groups: int) -> Tensor:
    """Set the choice to -inf in all groups but the best `chosen_groups`."""
    members = choice.reshape(len(choice), groups, -1)
    known = torch.where(members.isnan(), -math.inf, members)
    sums = known.sort(dim=2).values[:, :, -2:].sum(dim=2)
    kept = torch.zeros(sums.shape, dtype=torch.bool, device=choice.device)
    kept.scatter_(1, _largest(sums, chosen_groups), True)
    return torch.where(kept[:, :, None], members, -math.inf).reshape(choice.shape)
