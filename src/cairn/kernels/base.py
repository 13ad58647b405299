"""The interface of all kernels. Arrays, matrices and rope tables are opaque to callers.

Sizes: M tokens of a step, B rows of a step, R logits rows, H hidden, D head size, Q query heads, K key-value heads,
F the gated MLP's width, V vocabulary. `kernels.reference` defines every kernel; native ones keep these signatures.

The law of the same answer: a kernel's result for one token depends on that token and its row's KV alone, bit for bit -
never on M, B or R, on the token's place in the step, or on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from cairn.kernels.codebooks import RowBlocks
from cairn.kernels.effects import effect, effects_of, parameters_of
from cairn.kernels.program import KernelCall, Program
from cairn.kernels.sampling import Sampler
from cairn.kernels.storage import Array as Array
from cairn.kernels.storage import Storage
from cairn.types.model_spec import RopeScaling

Matrix = Any
Rope = Any


GROUP = 32
"""Neighbouring weights along the input, and activations, that share one scale."""
BLOCK = 256
"""Weights along the input in a super-block, whose groups have integer scales."""


@dataclass(frozen=True, slots=True)
class Quantized:
    """A weight matrix [out, in] in groups of 32 along the input, `in` a multiple of 32.

    A weight is scale * (code - 8) with 4 bits and no minimum, scale * code + minimum with 4 bits and a minimum, and
    scale * code (+ minimum) with 8 bits. Scales and minima may be float16 or float32: kernels stream what they get.
    Products with these weights round activations to 8 bits in groups of 32: see `kernels.quantized`.

    With a `block_scale`, `in` is a multiple of 256 and scales and minima are integers, as in GGUF's K types: a weight
    is (block_scale * scale) * code + block_minimum * minimum with 4 or 5 bits, (block_scale * scale) * (code - 32) with
    6 bits, where a group is 16, and (block_scale * scale) * code with a table.
    """

    bits: Literal[4, 5, 6, 8]
    codes: NDArray[np.uint8] | NDArray[np.int8]
    """[out, in]: from 0 on as uint8 with 4 to 6 bits, int8 with 8 bits."""
    scale: NDArray[Any]
    """float16 or float32 [out, in / 32]; with a block_scale uint8 below 64, with 6 bits int8 [out, in / 16], with a
    table int8 from -32 to 31"""
    minimum: NDArray[Any] | None = None
    """float16 or float32 [out, in / 32]; with a block_minimum uint8 below 64"""
    block_scale: NDArray[np.float16] | None = None
    """[out, in / 256]"""
    block_minimum: NDArray[np.float16] | None = None
    """[out, in / 256]"""
    table: Literal["", "fp4", "iq4"] = ""
    """Name of a table of sixteen values (`dequant.FP4`, `dequant.IQ4`) that holds all codes of 8 bits, so that they can
    be stored in 4 bits."""

    def __post_init__(self) -> None:
        wanted = np.int8 if self.bits == 8 else np.uint8
        if self.codes.dtype != wanted:
            raise ValueError(f"codes of {self.bits} bits are {np.dtype(wanted)}")
        if self.codes.ndim != 2 or self.codes.shape[1] % GROUP:
            raise ValueError(f"codes are [out, in] with `in` a multiple of {GROUP}, not {list(self.codes.shape)}")
        if self.block_scale is not None:
            self._check_blocks(self.block_scale)
            return
        if self.bits not in (4, 8) or self.block_minimum is not None:
            raise ValueError(f"codes of {self.bits} bits, and a block_minimum, need a block_scale")
        if self.table and (self.bits != 8 or self.minimum is not None):
            raise ValueError("codes of a table have 8 bits and no minima")
        groups = (self.codes.shape[0], self.codes.shape[1] // GROUP)
        for name, numbers in (("scale", self.scale), ("minimum", self.minimum)):
            if numbers is not None and (numbers.shape != groups or numbers.dtype not in (np.float16, np.float32)):
                raise ValueError(f"{name} is [out, in / {GROUP}] in float16 or float32")

    def _check_blocks(self, block_scale: NDArray[np.float16]) -> None:
        out, inner = self.codes.shape
        tabled = self.bits == 8 and self.table == "iq4"
        if (self.bits == 8 and not tabled) or inner % BLOCK:
            raise ValueError(
                f"super-blocks have codes of 4 to 6 bits, or of iq4, and `in` a multiple of {BLOCK}, not {inner}"
            )
        signed = self.bits == 6 or tabled
        if (self.minimum is None) != signed or (self.block_minimum is None) != signed:
            raise ValueError("super-blocks have minima with 4 and 5 bits, and none with 6 or a table")
        group, whole = GROUP // 2 if self.bits == 6 else GROUP, np.int8 if signed else np.uint8
        if tabled and (self.scale.min(initial=0) < -32 or self.scale.max(initial=0) > 31):
            raise ValueError("scales of super-blocks of iq4 are from -32 to 31")
        for name, one, share, dtype in (
            ("scale", self.scale, group, whole),
            ("minimum", self.minimum, group, whole),
            ("block_scale", block_scale, BLOCK, np.float16),
            ("block_minimum", self.block_minimum, BLOCK, np.float16),
        ):
            if one is not None and (one.shape != (out, inner // share) or one.dtype != dtype):
                raise ValueError(f"{name} of super-blocks is [out, in / {share}] in {np.dtype(dtype)}")
            if one is not None and dtype == np.uint8 and one.max(initial=0) > 63:
                raise ValueError(f"{name} of super-blocks is below 64, not {one.max()}")

    @property
    def arrays(self) -> tuple[NDArray[Any], ...]:
        """Its arrays that are not None, in the order of the fields."""
        return tuple(one for one in self._every if one is not None)

    def rows(self, change: Callable[[NDArray[Any]], NDArray[Any]]) -> Quantized:
        """Return the matrix with its rows reordered: `change` reorders the rows of each array."""
        return Quantized(self.bits, *(None if one is None else change(one) for one in self._every), table=self.table)  # type: ignore[arg-type,misc]

    @property
    def _every(self) -> tuple[NDArray[Any] | None, ...]:
        return self.codes, self.scale, self.minimum, self.block_scale, self.block_minimum

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)"""
        return self.codes.shape[0], self.codes.shape[1]

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(one.nbytes for one in self.arrays)


Packed = Quantized | RowBlocks
"""A quantised weight matrix."""


@dataclass(frozen=True, slots=True)
class LowRankUp:
    """The second half of an adapter's side path: `rank` numbers of the first half's output to columns of the output."""

    first: int
    """Index of the first of those numbers."""
    rank: int
    column: int
    """First column of the output."""
    out: int
    """Columns of the output."""
    matrix: Matrix
    """[out, rank]"""


@dataclass(frozen=True, slots=True)
class LowRank:
    """One adapter's side path of one matrix: x @ down, then each part of that through its matrix."""

    slot: int
    """Number of the adapter, as rows name it."""
    down: Matrix
    """[R, H] in float32, R the sum of the ranks of its parts."""
    ups: tuple[LowRankUp, ...]


class Kernels(Storage, Protocol):
    """The operations that models are written in, their fusions (see `kernels.fusion`), and storage.

    Weights are float32, float16 or bfloat16 arrays [out, in], or `Packed`.
    """

    @property
    def numerics(self) -> tuple[object, ...]:
        """Everything about these kernels, this machine and the KV layout that can move a bit: part of KV keys."""
        ...

    def vector(self, source: Array) -> Array:
        """Convert a norm's weight for these kernels."""
        ...

    def table(self, source: Array | Packed) -> Array:
        """Convert an embedding table [V, H] for `embed`, which also accepts a `matrix` [V, H]."""
        ...

    def matrix(self, weights: Sequence[Array | Packed], biases: Sequence[Array | None]) -> Matrix:
        """Pack matrices [out, in] with the same input into one, outputs concatenated in order.

        The parts may have different types.
        """
        ...

    def rope(self, head_dim: int, theta: float, scaling: RopeScaling) -> Rope:
        """Return the frequencies of rotary positions."""
        ...

    @effect(writes="hidden")
    def embed(self, table: Array, tokens: Array, hidden: Array) -> None:
        """hidden[M, H] = table[tokens[M]]; `table` comes from `table`, or from `matrix` (biases are ignored)."""
        ...

    @effect(writes="angles")
    def rope_angles(self, rope: Rope, positions: Array, angles: Array) -> None:
        """angles[M, 2, D/2] = cosine and sine of each position's angles, times the scaling's attention factor."""
        ...

    @effect(updates="hidden")
    def scale(self, hidden: Array, factor: float) -> None:
        """hidden[M, H] *= factor, rounded to float32."""
        ...

    @effect(writes="out")
    def norm(self, x: Array, weight: Array, eps: float, out: Array) -> None:
        """out[M, H] = rms_norm(x[M, H]); `out` may be `x`."""
        ...

    @effect(writes="out")
    def layer_norm(self, x: Array, weight: Array, bias: Array | None, eps: float, out: Array) -> None:
        """out[M, H] = (x - mean) / sqrt(variance + eps) * weight + bias, of x[M, H]; `out` may be `x`."""
        ...

    @effect(writes="out")
    def project(self, x: Array, matrix: Matrix, out: Array) -> None:
        """out[M, N] = x[M, H] @ matrix + bias."""
        ...

    @effect(updates="out")
    def adapt(
        self, x: Array, rows: Array, slots: Array, scales: Array, adapters: Sequence[LowRank], out: Array
    ) -> None:
        """out[M, N] += scale * up(down(x[M, H])) for the tokens of rows that have adapters.

        rows[B, 3] as for `attention`. slots[B, A] and scales[B, A]: a row's adapters and their scales, -1 for none;
        slots that are not among `adapters` change nothing. They are added in that order, each column as
        out + ((x @ down) * scale) @ up in float32. Rows without adapters are not touched.
        """
        ...

    @effect(writes="out")
    def activate(self, x: Array, activation: str, out: Array) -> None:
        """out[M, F] = act(x[M, F]); `out` may be `x`.

        silu; tanh; relu2: max(x, 0)^2; gelu_tanh; gelu: x Phi(x), Phi of the normal distribution, error below 2e-7.
        """
        ...

    @effect(writes="out")
    def gate(self, gates: Array, activation: str, out: Array) -> None:
        """out[M, F] = act(g) * u, where gates[M, 2F] is g[M, F] beside u[M, F].

        The activation may also be clamped_silu: out = g sigmoid(1.702 g) (u + 1), with g clamped to at most 7 and u to
        [-7, 7].
        """
        ...

    @effect(updates="hidden")
    def add(self, x: Array, hidden: Array) -> None:
        """hidden[M, H] += x[M, H]."""
        ...

    @effect(writes="out")
    def norm_project(self, hidden: Array, norm: Array, eps: float, matrix: Matrix, out: Array) -> None:
        """out[M, N] = rms_norm(hidden[M, H]) @ matrix + bias."""
        ...

    @effect(writes="query", updates="kv")
    def rope_write(
        self,
        qkv: Array,
        angles: Array | None,
        q_norm: Array | None,
        k_norm: Array | None,
        eps: float,
        kv: Array,
        layer: int,
        slots: Array,
        query: Array,
        late: bool = False,
    ) -> None:
        """Split qkv, norm and rotate q and k, and write q to `query` and k and v to the KV pool.

        qkv[M, (Q + 2K) D], or [M, (2Q + 2K) D] with a gate after each query head (`gate_heads`). A norm weight [D]
        norms each head of q or k; [Q D] or [K D] norms all heads of a token together; None norms nothing.
        angles[M, 2, r / 2] rotate the first r numbers of a head, in pairs (i, i + r / 2); None rotates nothing.
        `late`: rotate first, then norm.

        q goes to query[M, Q, D], k and v to kv[blocks, layers, 2, K, block_tokens, D] at slots[M] (block * block_tokens
        + offset), rounded to the pool's type: float32, bfloat16, float16, or int8, whose rows have D + 4 bytes
        (`kernels.kv_codes`) and D a multiple of 4. Q is a multiple of K. The order within a block and head is the
        kernels' own.
        """
        ...

    @effect(writes="out")
    def attention(
        self,
        query: Array,
        kv: Array,
        layer: int,
        rows: Array,
        tables: Array,
        window: int,
        scale: float,
        out: Array,
        softcap: float = 0.0,
        both: bool = False,
        sinks: Array | None = None,
        members: Array | None = None,
    ) -> None:
        """out[M, Q D] = attention of each token over its row's KV: causal, or in `both` directions.

        A score is s = scale * (query . key), and with a softcap c it is c tanh(s / c). sinks[Q]: a score for each head
        that takes part in the softmax without a value.

        rows[B, 3]: a row's first token in the step, its number of tokens, the position of its first token.
        members[M]: the row of each token, derived from rows, for kernels that work token by token.
        tables[B, width]: the block of each 16 positions; -1 for none.

        Causal: position p sees (p - window, p] if window > 0, its chunk [p - p % -window, p] if window < 0, else
        [0, p]. In both directions: (p - window, p + window) if window > 0, else its whole row, all of whose tokens are
        in the step.

        Arithmetic is in float32, whatever the pool's type. Native kernels may round queries and weights to bfloat16
        for a bfloat16 pool if the instruction set multiplies bfloat16, and to 15 bits for an int8 pool.
        """
        ...

    @effect(updates="x")
    def gate_heads(self, x: Array, qkv: Array, size: int) -> None:
        """x[M, Q D] *= sigmoid(gate), with the gates after the query heads of qkv[M, (2Q + 2K) D]."""
        ...

    @effect(writes="out", updates="states")
    def convolve(
        self,
        x: Array,
        first: int,
        weight: Array,
        bias: Array | None,
        silu: bool,
        gated: bool,
        states: Array,
        layer: int,
        rows: Array,
        tables: Array,
        out: Array,
        members: Array | None = None,
    ) -> None:
        """out[M, C] = causal depthwise convolution over a row's last `reach` inputs, plus bias[C], through silu if set.

        weight[reach C] has the oldest input's first. Inputs are C numbers of x[M, W] from `first` on. If `gated`, x is
        [M, 3C] in parts a, b, c: the inputs are a * c, and the result is multiplied by b.

        The inputs before a row are read from states[blocks, layers, N], float32, in the first (reach - 1) C numbers of
        a layer, and the last ones are written there. rows and tables are those of `attention`: block j of a row's table
        holds the state after the last computed token below position 16 (j + 1); -1 if none is kept. A row from position
        0 starts with zeros, others with the block of the position before. The state is written to the block of the
        row's last position, and at each multiple of 16 that it passes to the block that ends there.
        """
        ...

    @effect(writes="out", updates="states")
    def delta(
        self,
        x: Array,
        gates: Array,
        first: int,
        decay: Array,
        time_bias: Array,
        key_heads: int,
        tiled: bool,
        states: Array,
        layer: int,
        rows: Array,
        tables: Array,
        out: Array,
        members: Array | None = None,
    ) -> None:
        """out[M, heads V] = the gated delta rule over x[M, q and k of the key heads, v of the heads].

        Head h uses key head h // (heads / key_heads), or h % key_heads if `tiled`. q and k are divided by their
        lengths, sqrt(sum of squares + 1e-6), and q also by sqrt(K). b and a are `heads` numbers each in gates[M, W]
        from `first` on. For each token a head's state matrix S[K, V] becomes S exp(decay softplus(a + time_bias)), then
        S += outer(k, sigmoid(b) (v - k @ S)), and the output is q @ S. The matrices are at the end of a layer's state;
        blocks are as in `convolve`.
        """
        ...

    @effect(writes="out", updates="states")
    def mamba2(
        self,
        x: Array,
        gates: Array,
        first: int,
        decay: Array,
        time_bias: Array,
        skip: Array,
        low: float,
        high: float,
        groups: int,
        states: Array,
        layer: int,
        rows: Array,
        tables: Array,
        out: Array,
        members: Array | None = None,
    ) -> None:
        """out[M, heads V] = Mamba 2's scan over x[M, v of the heads, B and C of the groups].

        With step s = softplus(gates[M, first + h] + time_bias), clamped to [low, high], a head's state matrix S[K, V]
        becomes S exp(decay s) + outer(B, s v), and the output is C @ S + skip v. Neighbouring heads share a group;
        states are stored as in `delta`.
        """
        ...

    @effect(writes="out")
    def gated_norm(
        self, x: Array, gates: Array, first: int, weight: Array, size: int, eps: float, gate_first: bool, out: Array
    ) -> None:
        """out[M, N] = rms_norm(x[M, N] in groups of `size`) * silu(gates[M, first : first + N]); `out` may be `x`.

        The weight is [size], shared by the groups, or [N]. `gate_first`: multiply before the norm.
        """
        ...

    @effect(updates="hidden")
    def project_add(self, x: Array, matrix: Matrix, hidden: Array) -> None:
        """hidden[M, H] += x[M, N] @ matrix + bias."""
        ...

    @effect(updates="hidden")
    def norm_add(self, x: Array, norm: Array, eps: float, hidden: Array) -> None:
        """hidden[M, H] += rms_norm(x[M, H])."""
        ...

    @effect(writes="out")
    def gated_project(
        self, hidden: Array, norm: Array, eps: float, gate_up: Matrix, activation: str, down: Matrix, out: Array
    ) -> None:
        """out[M, H] = (act(g) * u) @ down + bias, with g and u as in `gated_mlp`."""
        ...

    @effect(updates="hidden")
    def gated_mlp(self, hidden: Array, norm: Array, eps: float, gate_up: Matrix, activation: str, down: Matrix) -> None:
        """hidden[M, H] += (act(g) * u) @ down + bias, where g[M, F], u[M, F] = rms_norm(hidden) @ gate_up + bias."""
        ...

    @effect(writes="out")
    def logits(self, hidden: Array, wanted: Array, norm: Array, eps: float, head: Matrix, out: Array) -> None:
        """out[R, V] = rms_norm(hidden[wanted[R]]) @ head."""
        ...

    @effect(writes="out")
    def layer_logits(
        self, hidden: Array, wanted: Array, norm: Array, bias: Array | None, eps: float, head: Matrix, out: Array
    ) -> None:
        """out[R, V] = layer_norm(hidden[wanted[R]]) @ head, with the norm's weight and bias[H]."""
        ...

    @effect(updates="logits")
    def softcap(self, logits: Array, cap: float) -> None:
        """logits[R, V] = cap tanh(logits / cap)."""
        ...

    @effect(updates="logits")
    def scale_logits(self, logits: Array, factor: float) -> None:
        """logits[R, V] *= factor, rounded to float32."""
        ...

    @effect(updates="query")
    def scale_queries(self, query: Array, positions: Array, beta: float, original: float, ahead: int = 0) -> None:
        """query[M, Q, D] *= 1 + beta log(1 + floor((position + ahead) / original)) of its positions[M]."""
        ...

    @effect(updates="x")
    def norm_heads(self, x: Array, first: int, heads: int, size: int, weight: Array | None, eps: float) -> None:
        """Norm `heads` heads of `size` numbers in x[M, W] in place, from head `first` on. No weight: 1."""
        ...

    @effect(updates="x")
    def layer_norm_heads(
        self, x: Array, first: int, heads: int, size: int, weight: Array, bias: Array | None, eps: float
    ) -> None:
        """Norm `heads` heads of `size` numbers in x[M, W] in place, from head `first` on, as `layer_norm` does.

        weight[size] for every head, or weight[heads size]; bias[size].
        """
        ...

    @effect(writes="query")
    def turn_heads(self, x: Array, angles: Array, query: Array) -> None:
        """query[M, Q, D] = x[M, Q D] with each head rotated by angles[M, 2, r / 2] as in `rope_write`."""
        ...

    @effect(updates="hidden")
    def scale_by(self, hidden: Array, factor: Array) -> None:
        """hidden[M, H] *= factor[1]."""
        ...

    @effect(writes="out")
    def xielu(self, x: Array, positive: Array, negative: Array, out: Array) -> None:
        """out[M, F] = a x^2 + x / 2 if x > 0, else (e^min(x, -1e-6) - 1 - x) b + x / 2; `out` may be `x`.

        a = log(1 + e^positive[1]) and b = 1/2 + log(1 + e^negative[1]).
        """
        ...

    @effect(writes="out")
    def gate_with(self, x: Array, activation: str, by: Array, first: int, out: Array) -> None:
        """out[M, P] = act(x[M, P]) * by[M, first : first + P]; `out` may be `x`."""
        ...

    @effect(updates="kv")
    def latent_write(
        self,
        x: Array,
        angles: Array,
        neighbours: bool,
        norm: Array,
        eps: float,
        kv: Array,
        layer: int,
        slots: Array,
    ) -> None:
        """Norm and rotate latents x[M, L + r] and write them to the KV pool.

        The first L numbers are normed with norm[L], the other r rotated by angles[M, 2, r / 2]: pairs (2i, 2i + 1) if
        `neighbours`, else (i, i + r / 2). They go to kv[blocks, layers, 1, 1, block_tokens, L + r] at slots[M], rounded
        to the pool's type; int8 has L + r + 8 bytes a row.
        """
        ...

    @effect(writes="query")
    def latent_queries(self, x: Array, keys: Sequence[Matrix], angles: Array, neighbours: bool, query: Array) -> None:
        """query[M, Q, L + r] = (head[:N] @ keys[head], rotated head[N:]) for each head of x[M, Q (N + r)].

        The rotation is that of `latent_write`. Each of the keys is a matrix [L, N].
        """
        ...

    @effect(writes="out")
    def latent_attention(
        self,
        query: Array,
        kv: Array,
        layer: int,
        rows: Array,
        tables: Array,
        scale: float,
        out: Array,
        members: Array | None = None,
    ) -> None:
        """out[M, Q, L] = `attention` of query[M, Q, L + r] over latents, which all heads share.

        A latent as `latent_write` wrote it is the key; its first L numbers are the value. Arithmetic is in float32,
        whatever the pool's type.
        """
        ...

    @effect(writes="out")
    def latent_values(self, x: Array, values: Sequence[Matrix], out: Array) -> None:
        """out[M, Q V] = x[M, Q, L] @ values[head], head by head. Each of the values is a matrix [V, L]."""
        ...

    @effect(writes="chosen shares")
    def route(
        self,
        scores: Array,
        bias: Array | None,
        kind: str,
        normed: bool,
        scale: float,
        groups: int,
        chosen_groups: int,
        chosen: Array,
        shares: Array,
    ) -> None:
        """chosen[M, T] = the experts of each token in ascending order, and shares[M, T] = their weights.

        `kind` turns scores[M, E] into weights: softmax over all experts, sigmoid, or chosen: softmax over the chosen
        ones only. Chosen are the T experts with the largest weight + bias[E] (for chosen, score + bias), ties by the
        lower index. With several `groups` of neighbouring experts, only those of the `chosen_groups` with the largest
        sum of their two best count. Shares are the weights, divided by their sum + 1e-20 if `normed`, times `scale`.
        """
        ...

    @effect(writes="out")
    def experts(
        self,
        x: Array,
        chosen: Array,
        shares: Array,
        gate_up: Sequence[Matrix],
        activation: str,
        down: Sequence[Matrix],
        out: Array,
    ) -> None:
        """out[M, H] = sum over chosen[M, T] of shares[M, T] * ((act(g) * u) @ down[expert]).

        g[F] beside u[F] = x[M, H] @ gate_up[expert], biases added; act(g) alone if gate_up has no u. The sum starts
        from zero, in the order of chosen, which ascends. Weights stay packed: each expert multiplies its rows as one
        matrix.
        """
        ...

    @effect(updates="shares")
    def scale_shares(self, shares: Array, chosen: Array, factors: Array) -> None:
        """shares[M, T] *= factors[chosen[M, T]], of factors[E]."""
        ...

    @effect(writes="out", updates="shares")
    def scale_tokens(self, x: Array, shares: Array, out: Array) -> None:
        """out[M, H] = x[M, H] * shares[M, 1]; then shares = 1."""
        ...

    @effect(writes="out")
    def mix_streams(self, x: Array, parts: Array, out: Array) -> None:
        """out[M, j, H] = x[M, j, H] + the sum over i of parts[M, j A + i] x[M, i, H], of A streams."""
        ...

    @effect(updates="x")
    def correct_streams(self, given: Array, parts: Array, active: int, x: Array) -> None:
        """x[M, i, H] += (parts[M, i] + 1) (given[M, H] - x[M, active, H]), with the old x on the right."""
        ...

    @effect(writes="out")
    def take_stream(self, x: Array, place: int, out: Array) -> None:
        """out[M, H] = x[M, place, H]."""
        ...

    @effect(updates="out")
    def put_stream(self, x: Array, place: int, out: Array) -> None:
        """out[M, place, H] = x[M, H]."""
        ...

    @effect(updates="out")
    def add_streams(self, x: Array, first: int, out: Array) -> None:
        """out[M, i, H] += x[M, H] for streams i >= first."""
        ...

    @effect(updates="x")
    def match_magnitude(self, like: Array, x: Array) -> None:
        """x[M, H] *= sqrt(mean square of like[M, H] / max(mean square of x, 1e-5))."""
        ...

    @effect(updates="gates")
    def sparsify(self, gates: Array, factor: float) -> None:
        """g = max(g - (mean + factor * standard deviation), 0) for g[M, F], the first half of gates[M, 2F]."""
        ...

    @effect(writes="out")
    def scale_columns(self, x: Array, weight: Array, out: Array) -> None:
        """out[M, H] = x[M, H] * weight[H]."""
        ...

    @effect(updates="hidden")
    def add_gated(self, x: Array, gate: Array, hidden: Array) -> None:
        """hidden[M, H] += sigmoid(gate[M, 1]) * x[M, H]."""
        ...

    def sampler(self, vocab: int) -> Sampler:
        """Return a sampler for lines of `vocab` logits, on the same threads. All kernels sample the same tokens."""
        ...

    def program(self, calls: Sequence[KernelCall]) -> Program:
        """Record calls as a program to replay at any sizes, with fusions if these kernels have them."""
        ...

    def close(self) -> None:
        """Free threads and memory."""
        ...


EFFECTS = effects_of(Kernels)
"""Kernel -> which arguments it writes or updates."""

MEMBERS = {name: names.index("members") for name, names in parameters_of(Kernels).items() if "members" in names}
"""Kernel -> index of its argument `members`, for kernels that have it."""
