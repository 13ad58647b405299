"""The kernels that a decoder is written over. Arrays, matrices and rope tables are opaque to whoever calls them.

Sizes: M tokens of a step, B rows of a step, R logits rows, H hidden, D head size, Q query heads, K key-value heads,
F the gated MLP's width, V vocabulary. `kernels.reference` is the meaning of every kernel; native ones keep these
signatures.

The law of the same answer: what a kernel computes for one token depends on that token and on its row's KV alone, bit
for bit - never on M, B or R, on where in the step the token stands, or on its neighbours.
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
from cairn.kernels.storage import Array as Array
from cairn.kernels.storage import Storage
from cairn.kernels.vocabulary import Sampler
from cairn.types.layer_spec import RopeScaling

Matrix = Any
Rope = Any


GROUP = 32
"""Weights along the input, and activations, that share one scale."""
BLOCK = 256
"""Weights along the input in a super-block, whose groups have whole numbers for scales."""


@dataclass(frozen=True, slots=True)
class Quantized:
    """A weight matrix [out, in] in groups of 32 along the input, `in` a multiple of 32.

    A weight is scale * (code - 8) with 4 bits and no minimum, scale * code + minimum with 4 bits and a minimum, and
    scale * code (+ minimum) with 8 bits. Scales and minima may be float16 or float32: kernels stream what they get.
    Where these weights are multiplied, activations are rounded to 8 bits in groups of 32: see `kernels.quantized`.

    With a `block_scale`, `in` is a multiple of 256 and the scales and minima are whole numbers, as GGUF's K types have
    them: a weight is (block_scale * scale) * code + block_minimum * minimum with 4 or 5 bits,
    (block_scale * scale) * (code - 32) with 6 bits, where a group is 16, and (block_scale * scale) * code with a table.
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
    """Of codes of 8 bits: which sixteen values they are all of, so that they can be held in 4 bits (`dequant.FP4`,
    `dequant.IQ4`)."""

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
            raise ValueError(f"codes of {self.bits} bits, and a block_minimum, want a block_scale")
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
        """Those that it has, in the order of its fields."""
        return tuple(one for one in self._every if one is not None)

    def rows(self, change: Callable[[NDArray[Any]], NDArray[Any]]) -> Quantized:
        """This matrix with its outputs in another order: `change` puts the rows of each array in it."""
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
        """Bytes of its arrays."""
        return sum(one.nbytes for one in self.arrays)


Packed = Quantized | RowBlocks
"""A weight matrix in codes."""


class Kernels(Storage, Protocol):
    """Storage first, then the operations that a model is a list of, and then what some of them are together: see
    `kernels.fusion`. Weights are in float32, float16 or bfloat16, shaped [out, in], or `Packed`."""

    @property
    def numerics(self) -> tuple[object, ...]:
        """Everything about these kernels, this machine and the KV's layout that can move a bit: part of KV keys."""
        ...

    def vector(self, source: Array) -> Array:
        """A norm's weight, as the kernels want it."""
        ...

    def table(self, source: Array | Packed) -> Array:
        """An embedding [V, H], as `embed` wants it. A matrix [V, H] serves as one too."""
        ...

    def matrix(self, weights: Sequence[Array | Packed], biases: Sequence[Array | None]) -> Matrix:
        """Matrices [out, in] with one input, packed into one; outputs are concatenated in order. The parts may be of
        different types."""
        ...

    def rope(self, head_dim: int, theta: float, scaling: RopeScaling) -> Rope:
        """Frequencies of rotary positions."""
        ...

    @effect(writes="hidden")
    def embed(self, table: Array, tokens: Array, hidden: Array) -> None:
        """hidden[M, H] = table[tokens[M]]; `table` is of `table` or of `matrix`, without its biases."""
        ...

    @effect(writes="angles")
    def rope_angles(self, rope: Rope, positions: Array, angles: Array) -> None:
        """angles[M, 2, D/2]: cosine and sine of each position, times the scaling's attention factor."""
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

    @effect(writes="out")
    def activate(self, x: Array, activation: str, out: Array) -> None:
        """out[M, F] = act(x[M, F]): silu, tanh, relu2, which is max(x, 0)^2, gelu_tanh, or gelu, which is x times the
        normal distribution's Phi(x) with an error below 2e-7; `out` may be `x`."""
        ...

    @effect(writes="out")
    def gate(self, gates: Array, activation: str, out: Array) -> None:
        """out[M, F] = act(g) * u, where gates[M, 2F] is g[M, F] beside u[M, F].

        A gate's activation may also be clamped_silu: g and u are bound by 7, u also by -7 from below, and it gives
        g sigmoid(1.702 g) (u + 1).
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
        """Split qkv[M, (Q + 2K) D], or [M, (2Q + 2K) D] with a gate behind each query head (`gate_heads`), norm heads
        of q and k where there is a weight [D], rotate them, write q to
        query[M, Q, D] and k, v into the KV pool kv[blocks, layers, 2, K, block_tokens, D] at slots[M]
        (block * block_tokens + offset), rounded to the pool's type: float32, bfloat16, float16, or int8, whose rows
        have D + 4 bytes (`kernels.kv_codes`) and D a multiple of 4. Q is a multiple of K. The order within a block and
        head is the kernels' own.

        angles[M, 2, r / 2] turn the first r numbers of a head, in pairs (i, i + r / 2); None turns nothing. A weight
        [Q D] or [K D] norms all heads of a token together. `late`: heads are turned first and normed then."""
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

        A score is s = scale * (query . key), and with a softcap c it is c tanh(s / c). sinks[Q] are scores of heads
        that take a share of the softmax and have no value.

        rows[B, 3]: a row's first token in the step, its number of tokens, the position of its first token.
        members[M]: the row of each token, for kernels that work token by token; it says nothing that rows do not.
        tables[B, width]: block of each 16 positions; -1 where there is none. With window > 0 position p sees
        (p - window, p], with window < 0 what is in its piece of -window positions, [p - p % -window, p], else [0, p];
        in both directions (p - window, p + window), else all of its row, of which the
        step has every token. Arithmetic is in float32, whatever the pool's type; native kernels may round
        queries and weights of a bfloat16 pool to bfloat16 where that is what the instruction set multiplies, and round
        those of an int8 pool to 15 bits.
        """
        ...

    @effect(updates="x")
    def gate_heads(self, x: Array, qkv: Array, size: int) -> None:
        """x[M, Q D] *= sigmoid(gate) with the gates that stand behind the query heads of qkv[M, (2Q + 2K) D]."""
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
        """out[M, C] = what each token's own and the last inputs of its row give, summed with weight[reach C], the
        oldest first, with the bias [C] added, through silu where it is wanted.

        The inputs are C numbers of x[M, W] from `first` on; of a `gated` one x is [M, 3C], the inputs are the first C
        times the last, and the sum times those between is given.

        What came before a row is in states[blocks, layers, N], float32, in the first (reach - 1) C numbers of a layer,
        and so is what its end leaves behind. rows and tables are those of `attention`: block j of a row's table has
        the state after the last computed token below position 16 (j + 1), or -1 where none is kept. A row that begins
        at 0 begins with zeros, another one with the block of the position before it; the state is written to the
        block of its last position, and to that of each position before a multiple of 16 that it passes.
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

        A head h has the key head h // (heads / key_heads), or h % key_heads where they are `tiled`. q and k are divided
        by their lengths, the root of the sum of squares + 1e-6, and q by the root of its size. With b and a, two times
        `heads` numbers of gates[M, W] from `first` on, a head's matrix [K, V] is multiplied by
        exp(decay softplus(a + time_bias)), then it gets sigmoid(b) (v - k @ matrix) under each number of k, and gives
        q @ matrix. Matrices are the last numbers of a layer's state; places are as in `convolve`.
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

        With a head's step s = softplus(gates[M, first + h] + time_bias), bound by `low` and `high`, its matrix [K, V]
        is multiplied by exp(decay s), gets s v under each number of B, and gives C @ matrix + skip v. Neighbouring
        heads share a group; matrices and places are as in `delta`.
        """
        ...

    @effect(writes="out")
    def gated_norm(
        self, x: Array, gates: Array, first: int, weight: Array, size: int, eps: float, gate_first: bool, out: Array
    ) -> None:
        """out[M, N] = rms_norm of each `size` numbers of x[M, N], with a weight [size] for all or [N], times silu of N
        numbers of gates[M, W] from `first` on; `gate_first`: before the norm. `out` may be `x`."""
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
        """Norm heads of `size` numbers in x[M, W], in place: so many, from head `first` on. None multiplies by 1."""
        ...

    @effect(writes="query")
    def turn_heads(self, x: Array, angles: Array, query: Array) -> None:
        """query[M, Q, D] = x[M, Q D], whose heads are turned by angles[M, 2, r / 2] as in `rope_write`."""
        ...

    @effect(updates="hidden")
    def scale_by(self, hidden: Array, factor: Array) -> None:
        """hidden[M, H] *= factor[1]."""
        ...

    @effect(writes="out")
    def xielu(self, x: Array, positive: Array, negative: Array, out: Array) -> None:
        """out[M, F] = a x^2 + x / 2 of what is above 0 in x[M, F], and of the rest (e^min(x, -1e-6) - 1 - x) b + x / 2,
        with a = log(1 + e^positive) and b = 1/2 + log(1 + e^negative), of one number each; `out` may be `x`."""
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
        """Norm the first numbers of x[M, L + r], as many as norm[L] has, turn the others by angles[M, 2, r / 2], and
        write both into the pool kv[blocks, layers, 1, 1, block_tokens, L + r] at slots[M], rounded to the pool's type;
        int8 has L + r + 8 bytes a row.

        Turned are the pairs (2i, 2i + 1) of `neighbours`, or else (i, i + r / 2).
        """
        ...

    @effect(writes="query")
    def latent_queries(self, x: Array, keys: Sequence[Matrix], angles: Array, neighbours: bool, query: Array) -> None:
        """query[M, Q, L + r] of x[M, Q (N + r)]: the first N numbers of a head @ keys[head], and behind that the
        others, turned as in `latent_write`. Each of the keys is a matrix [L, N]."""
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
        """out[M, Q, L] = `attention` of query[M, Q, L + r] over what `latent_write` wrote, which is the key of every
        head; the value is its first L numbers. Arithmetic is in float32, whatever the pool's type."""
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
        """chosen[M, T] = the experts of each token, in ascending order, and shares[M, T] what each gives of the answer.

        `kind` makes scores[M, E] into parts: softmax over all, sigmoid, or chosen, which leaves them and takes the
        softmax over those that are chosen. The T experts with the largest parts + bias[E] are chosen, the first of
        equal ones; with more than one of the `groups` of neighbours, only of the `chosen_groups` whose two largest
        together are largest. Their shares are the parts, divided by their sum + 1e-20 where they are `normed`, times
        `scale`.
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
        """out[M, H] = sum over chosen[M, T], in that order from zero, of shares[M, T] * (act(g) * u) @ down[expert]
        with g[F] beside u[F] = x[M, H] @ gate_up[expert], biases added; where there is no u, act(g) alone. Experts
        ascend along T. Weights stay packed:
        each expert multiplies the rows that chose it as one matrix."""
        ...

    @effect(updates="shares")
    def scale_shares(self, shares: Array, chosen: Array, factors: Array) -> None:
        """shares[M, T] *= factors[chosen[M, T]], of factors[E]."""
        ...

    @effect(writes="out", updates="shares")
    def scale_tokens(self, x: Array, shares: Array, out: Array) -> None:
        """out[M, H] = x[M, H] * shares[M, 1], which become 1."""
        ...

    @effect(writes="out")
    def mix_streams(self, x: Array, parts: Array, out: Array) -> None:
        """out[M, j, H] = x[M, j, H] + the sum over i of parts[M, j A + i] x[M, i, H], of A streams."""
        ...

    @effect(updates="x")
    def correct_streams(self, given: Array, parts: Array, active: int, x: Array) -> None:
        """x[M, i, H] += (parts[M, i] + 1) (given[M, H] - x[M, active, H]), with x as it was before."""
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
        """out[M, i, H] += x[M, H] of streams from `first` on."""
        ...

    @effect(updates="x")
    def match_magnitude(self, like: Array, x: Array) -> None:
        """x[M, H] *= the root of the mean square of like[M, H] / that of x, whose mean square is taken for 1e-5 at
        least."""
        ...

    @effect(updates="gates")
    def sparsify(self, gates: Array, factor: float) -> None:
        """g = max(g - (mean + factor * deviation), 0) in gates[M, 2F], where g[M, F] stands first."""
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
        """What decides lines of `vocab` logits, on the same threads. All kernels give the same tokens."""
        ...

    def program(self, calls: Sequence[KernelCall]) -> Program:
        """The calls as one, to be replayed at any sizes, fused where these kernels do."""
        ...

    def close(self) -> None:
        """Give threads and memory back."""
        ...


EFFECTS = effects_of(Kernels)
"""What each operation does to its arguments."""

MEMBERS = {name: names.index("members") for name, names in parameters_of(Kernels).items() if "members" in names}
"""Which argument of a kernel is the row of each token, where it is given one."""
