"""A model's layers as data: rotary positions, cache groups, and the parts that not every layer has."""

from __future__ import annotations

from typing import Literal

import msgspec


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position scaling as transformers' `rope_scaling` defines it (`modeling_rope_utils`)."""

    kind: Literal["none", "linear", "llama3", "yarn"] = "none"
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    factors: tuple[float, ...] = ()
    """What each plain frequency is divided by, before anything else; () for nothing."""


class RotaryPositions(msgspec.Struct, frozen=True, kw_only=True):
    """How the positions of a group's layers turn queries and keys."""

    theta: float
    scaling: RopeScaling = RopeScaling()


class CacheGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that keep the same kind of cache and therefore share one block table."""

    kind: Literal["full", "window", "state"]
    layers: tuple[int, ...]
    window: int = 0
    """Tokens a position may attend to, itself included. 0 for full attention."""
    rope: RotaryPositions | None = None
    """Where these layers have positions of their own; None: the model's."""
    numbers: int = 0
    """Of a state group: float32 numbers that each of its layers keeps for a sequence."""
    kv_heads: int | None = None
    head_dim: int | None = None
    """Where these layers have heads of their own; None: the model's."""
    once: bool = False
    """Whether what is kept of a token is kept once: its values are a part of its key."""
    pieces: bool = False
    """Whether positions are cut into pieces of the window's size, and one sees its own piece alone up to itself; what
    it sees lies in a window of that size too."""

    @property
    def sight(self) -> int:
        """The window as the kernels take it."""
        return -self.window if self.pieces else self.window


NEVER = 1e30
"""A frequency that is divided by this turns nothing, at any position."""


class Experts(msgspec.Struct, frozen=True, kw_only=True):
    """A mixture of experts in the place of the MLP: each token goes through a few of many."""

    count: int
    chosen: int
    """How many of them a token goes through."""
    ffn: int
    """Width of each."""
    layers: tuple[int, ...]
    """Which layers have them; the others have the plain MLP."""
    scores: Literal["softmax", "sigmoid", "chosen"] = "softmax"
    """How a router's scores are made parts: see `kernels.base.Kernels.route`."""
    normed: bool = False
    scale: float = 1.0
    groups: int = 1
    chosen_groups: int = 1
    correction: bool = False
    """Whether a bias is added to the parts for the choice alone."""
    bias: bool = False
    """Whether the router and the experts have biases."""
    gated: bool = True
    """Whether what an expert lets through goes through a gate, and not through the activation itself."""
    shared: int = 0
    """Width of an expert that every token goes through; 0: none."""
    shared_gate: bool = False
    weighs_input: bool = False
    """Whether a token's share is multiplied with what its expert takes, not with what that gives."""
    beside: bool = False
    """Whether they stand beside the MLP, with norms of their own and a number that each expert's share is multiplied
    with (Gemma 4)."""


class Streams(msgspec.Struct, frozen=True, kw_only=True):
    """Gemma 3n: a hidden state that is kept several times over, of which each layer computes one and corrects all
    (AltUp); what is learnt beside attention (LAuReL); gates of which only the largest are let through."""

    count: int
    active: int
    """Which of them layers compute."""
    rank: int
    """Width of what stands beside attention."""
    sparsity: tuple[float | None, ...] = ()
    """Of each layer: by how many deviations a gate has to pass the mean of all; None where all pass. () for all
    layers."""
    scaled: bool = True
    """Whether what each layer makes its input of is multiplied with a number for each column."""


class Uneven(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that are not alike (Gemma 4). Their heads differ by group; values are normed without a weight, and what a
    layer gives is multiplied by a number of its own, but where there are streams (Gemma 3n)."""

    kv_from: tuple[int, ...] = ()
    """Of each of the last layers, which have no keys and values, the layer whose they read."""
    keys_as_values: tuple[int, ...] = ()
    """Layers whose values are their keys, as they are before they are normed."""
    wide: tuple[int, ...] = ()
    """Layers whose MLP is twice as wide."""
    inputs: int = 0
    """Numbers that each layer gets of a token, beside what the layer before it gives; 0: nothing."""
    input_rows: int = 0
    """Rows of the table of these."""
    streams: Streams | None = None


class Recurrence(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that keep a state of one size for a sequence, however long it is, in the place of keys and values.

    `delta`: gated delta net. `mamba2`: Mamba 2. `conv`: LFM2's gated short convolution, which keeps nothing else.
    """

    kind: Literal["delta", "mamba2", "conv"]
    layers: tuple[int, ...]
    reach: int
    """Tokens that the convolution sees, the present one included."""
    heads: int = 1
    value_size: int
    """Numbers of a head's value: of `conv`, the width of all."""
    key_heads: int = 0
    """How many heads have keys and queries of their own (Mamba 2: groups of B and C)."""
    key_size: int = 0
    """Numbers of a key and of a query (Mamba 2: of B and of C)."""
    tiled: bool = False
    """Whether neighbouring heads have keys of different heads, and not of one."""
    conv_bias: bool = False
    bias: bool = False
    """Whether what goes in and comes out is projected with a bias."""
    step_limits: tuple[float, float] | None = None
    """Of Mamba 2: the least and the greatest step."""

    @property
    def channels(self) -> int:
        """Numbers of a token that are convolved."""
        return self.heads * self.value_size + 2 * self.key_heads * self.key_size

    @property
    def inner(self) -> int:
        """Numbers of a token's values."""
        return self.heads * self.value_size

    @property
    def numbers(self) -> int:
        """Numbers of a layer's state: the convolution's window, and a matrix for each head."""
        return (self.reach - 1) * self.channels + self.heads * self.key_size * self.value_size

    @property
    def projected(self) -> int:
        """Numbers of a token that come out of the projections before the convolution."""
        if self.kind == "conv":
            return 3 * self.channels
        return self.channels + self.inner + self.heads * (2 if self.kind == "delta" else 1)


class Latent(msgspec.Struct, frozen=True, kw_only=True):
    """Attention over latents (MLA): of a token one vector is kept, of which all heads' keys and values are products."""

    rank: int
    """Width of the latent; as many numbers as are turned are kept beside it."""
    query_rank: int = 0
    """Width of what queries are products of; 0: of the hidden state itself."""
    plain: int
    """Numbers of a head's query and key that are not turned."""
    value: int
    """Numbers of a head's value."""
    neighbours: bool = True
    """Whether neighbours are turned as a pair, not numbers half of them apart."""
    bias: bool = False
    """Whether what makes latents has a bias."""
    eps: float = 1e-6
    """Of the norms of latents."""
