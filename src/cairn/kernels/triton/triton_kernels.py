"""`Kernels` on GPUs: Triton where sums are made, plain torch where each number is made by itself."""

# The methods of TritonKernels are documented where their meaning is declared, in kernels.base.
# ruff: noqa: D102

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
import triton
from numpy.typing import NDArray

from cairn.kernels.base import Packed
from cairn.kernels.program import Interpreted, KernelCall
from cairn.kernels.torch.recurrent import spread
from cairn.kernels.torch.torch_kernels import TorchKernels
from cairn.kernels.torch.weights import TorchMatrix
from cairn.kernels.triton import attention, experts, recurrent, rowwise
from cairn.kernels.triton.capture import CapturedProgram, GraphCapture
from cairn.kernels.triton.products import TritonMatrix, pack_matrix
from cairn.kernels.triton.rope import rope_write
from cairn.kernels.triton.rowwise import gate, norm, softmax, statistics

VERSION = "triton-1"
"""Version of these kernels. Change it with every change that can move a bit."""

Tensor = Any


class TritonKernels(TorchKernels):
    """`kernels.base.Kernels` in Triton. The methods are documented there."""

    @property
    def numerics(self) -> tuple[object, ...]:
        return (VERSION, triton.__version__, *super().numerics)

    # ------------------------------------------------------------------------------------------------ products

    def matrix(self, weights: Sequence[NDArray[Any] | Packed], biases: Sequence[NDArray[Any] | None]) -> TritonMatrix:
        return pack_matrix(weights, biases, self.tensor)

    def normed(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norm(x, weight, eps, torch.empty_like(x))

    def gated(self, gates: Tensor, activation: str) -> Tensor:
        width = gates.shape[1] // 2
        return gate(gates, gates[:, width:], activation, torch.empty((len(gates), width), device=gates.device))

    # ------------------------------------------------------------------------------------- norms and activations

    def norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        norm(x, weight, eps, out)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor) -> None:
        norm(x, weight, eps, out, layer=True, bias=bias)

    def norm_add(self, x: Tensor, norm: Tensor, eps: float, hidden: Tensor) -> None:
        rowwise.norm(x, norm, eps, hidden, add=True)

    def norm_heads(self, x: Tensor, first: int, heads: int, size: int, weight: Tensor | None, eps: float) -> None:
        part = x[:, first * size : (first + heads) * size]
        norm(part, weight, eps, part, size=size)

    def layer_norm_heads(
        self, x: Tensor, first: int, heads: int, size: int, weight: Tensor, bias: Tensor | None, eps: float
    ) -> None:
        part = x[:, first * size : (first + heads) * size]
        norm(part, weight, eps, part, size=size, layer=True, bias=bias)

    def gated_norm(
        self, x: Tensor, gates: Tensor, first: int, weight: Tensor, size: int, eps: float, gate_first: bool, out: Tensor
    ) -> None:
        shares = self._activated(gates[:, first : first + x.shape[1]], "silu")
        given = x * shares if gate_first else x
        norm(given, weight, eps, out, size=size)
        if not gate_first:
            out *= shares

    def _activated(self, x: Tensor, activation: str) -> Tensor:
        return gate(x, None, activation, torch.empty((len(x), x.shape[1]), device=x.device))

    def gate_with(self, x: Tensor, activation: str, by: Tensor, first: int, out: Tensor) -> None:
        gate(x, by[:, first : first + x.shape[1]], activation, out)

    def gate_heads(self, x: Tensor, qkv: Tensor, size: int) -> None:
        width = x.shape[1]
        gates = qkv[:, : 2 * width].reshape(len(x), -1, 2, size)[:, :, 1].reshape(x.shape)
        gate(gates, x, "sigmoid", x)

    def add_gated(self, x: Tensor, gate: Tensor, hidden: Tensor) -> None:
        hidden += self._activated(gate, "sigmoid") * x

    def softcap(self, logits: Tensor, cap: float) -> None:
        torch.mul(self._activated(logits / cap, "tanh"), cap, out=logits)

    def activate(self, x: Tensor, activation: str, out: Tensor) -> None:
        gate(x, None, activation, out)

    def gate(self, gates: Tensor, activation: str, out: Tensor) -> None:
        gate(gates, gates[:, gates.shape[1] // 2 :], activation, out)

    def match_magnitude(self, like: Tensor, x: Tensor) -> None:
        wanted, found = statistics(like)[1], statistics(x)[1]
        x.copy_(x * wanted.sqrt() / found.clamp(min=1e-5).sqrt())

    def sparsify(self, gates: Tensor, factor: float) -> None:
        own = gates[:, : gates.shape[1] // 2]
        mean, _ = statistics(own)
        _, square = statistics(own - mean)
        own.copy_((own - (mean + square.sqrt() * factor)).clamp(min=0))

    def mix_streams(self, x: Tensor, parts: Tensor, out: Tensor) -> None:
        count = x.shape[1]
        shares = parts.reshape(len(x), count, count)
        total = x
        for stream in range(count):
            total = total + shares[:, :, stream, None] * x[:, stream, None]
        out.copy_(total)

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
        rope_write(qkv, angles, q_norm, k_norm, eps, kv, layer, slots, query, late)

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
        most = self._most(rows)
        attention.attend(query, kv, layer, rows, tables, window, scale, out, softcap, both, sinks, most=most)

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
        given = x.clone()
        rowwise.norm(x[:, :rank], norm, eps, given[:, :rank])
        self.write_latents(given, angles, neighbours, kv, layer, slots)

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
        rest = query.shape[2] - out.shape[2]
        attention.attend(query, kv, layer, rows, tables, 0, scale, out, most=self._most(rows), rest=rest)

    def _most(self, rows: Tensor) -> int:
        """Return the number of tokens of the longest row, from the step's inputs on the host."""
        return int(self.host(rows)[:, 1].max(initial=0))

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
        recurrent.convolve(x, first, weight, bias, silu, gated, states, layer, rows, tables, out)

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
        heads, width = len(decay), (x.shape[1] - out.shape[1]) // 2
        size = width // key_heads
        query = recurrent.unit(x[:, :width], key_heads, recurrent.query_factor(size))
        key = recurrent.unit(x[:, width : 2 * width], key_heads)
        value = x[:, 2 * width :].reshape(len(x), heads, -1)
        shares = recurrent.gates(gates, first, decay, time_bias)
        vectors = spread(key, heads, tiled), spread(query, heads, tiled), value
        recurrent.scan(*vectors, *shares, True, states, layer, rows, tables, out)

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
        heads, inner = len(decay), out.shape[1]
        width = (x.shape[1] - inner) // 2
        value = x[:, :inner].reshape(len(x), heads, -1)
        parts = x[:, inner : inner + width], x[:, inner + width :]
        key, query = (spread(part.reshape(len(x), groups, -1), heads, False) for part in parts)
        shares = recurrent.gates(gates, first, decay, time_bias, (low, high))
        recurrent.scan(key, query, value, *shares, False, states, layer, rows, tables, out)
        out += (skip[:, None] * value).reshape(out.shape)

    # ------------------------------------------------------------------------------------------------- experts

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
        experts.run(x, chosen, shares, gate_up, activation, down, out)

    def sigmoid(self, x: Tensor) -> Tensor:
        return self._activated(x, "sigmoid")

    def softmax(self, x: Tensor) -> Tensor:
        return softmax(x)

    def program(self, calls: Sequence[KernelCall]) -> Interpreted:
        return CapturedProgram(self, calls, self._capture) if self.device.type == "cuda" else super().program(calls)

    @cached_property
    def _capture(self) -> GraphCapture:
        return GraphCapture()
