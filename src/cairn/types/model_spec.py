"""A model as data: everything that the forward pass and the KV cache depend on."""

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


Pooling = Literal["cls", "mean", "last"]


class Dense(msgspec.Struct, frozen=True, kw_only=True):
    """A matrix that a pooled state is multiplied with, and what follows it."""

    place: str
    """Where its weights are: a folder in the model's own."""
    inputs: int
    outputs: int
    bias: bool = True
    activation: Literal["", "tanh"] = ""
    inside: bool = False
    """Whether its weights are among the model's own, under the name of its place."""


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    """How a text's vector is made of its tokens' hidden states."""

    pooling: Pooling = "last"
    """The first token's, the mean of all, or the last token's."""
    max_tokens: int | None = None
    """Longest text in tokens, where that is less than the model's context."""
    prompts: dict[str, str] = {}
    """Words that stand before a text, by the names of what it is for."""
    prompt: str | None = None
    """The name of those that every text gets that names no others."""
    dense: tuple[Dense, ...] = ()
    """What the pooled state goes through, in order."""


class JudgeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How a decoder judges a pair of texts: by what it would say, the logit of `yes` less that of `no`."""

    yes: int
    no: int
    """Rows of the output's matrix: token ids."""
    apart: bool = False
    """Whether the two rows are a matrix of their own."""


class EncoderSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What makes an encoder of a transformer: every token sees all of its text, and nothing is kept."""

    positions: Literal["learned", "rotary"] = "learned"
    first_position: int = 0
    """Row of the learned positions' table that the first token has."""
    position_rows: int = 0
    type_rows: int = 0
    """Rows of the tables of positions and of token types; 0 where there is none."""
    norm_first: bool = False
    """Whether norms stand before attention and MLP, and one at the end, and not behind each."""
    norm_bias: bool = True
    fused: bool = False
    """Whether queries, keys and values are one matrix, and gates and what they let through another."""
    gated: bool = False
    windows: tuple[int, ...] = ()
    """Of each layer: how far a token sees to both sides, itself counted; 0: all. () for all layers."""
    local: RotaryPositions | None = None
    """The positions of layers with a window, where they have their own."""
    labels: int = 0
    """Scores of the head of a model that judges texts; 0 where there is none."""
    head: Literal["", "tanh", "norm"] = ""
    """What stands between the pooled state and its scores: a matrix and tanh, or a matrix, GELU and a norm."""
    head_bias: bool = True

    def window(self, layer: int) -> int:
        """A layer's window."""
        return self.windows[layer] if self.windows else 0


BLOCK_TOKENS = 16
"""Tokens in one KV block."""
CHUNK_BLOCKS = 4
"""Blocks in a chunk, which is what stores keep together."""
CHUNK_TOKENS = CHUNK_BLOCKS * BLOCK_TOKENS
"""Tokens in a chunk."""


MAX_CONTEXT = 1 << 24
MAX_VOCAB = 1 << 22
MAX_HEAD_DIM = 1 << 10
"""The largest head of a model that is served: what the kernels take, and a bound on what a file may claim."""
Kind = Literal["chat", "embed", "rerank"]


class MakersSampling(msgspec.Struct, frozen=True, kw_only=True):
    """How a model's makers say that it is to be sampled, and where."""

    values: dict[str, float]
    """Sampling parameter -> value. Those that are not named are off."""
    source: str
    """The address of what says it."""
    read: str
    """The day on which it said so."""


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A transformer as data: everything the forward pass and the KV cache depend on."""

    name: str
    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context: int
    """Longest context in tokens that the model was made for."""
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling = RopeScaling()
    long_rope: RopeScaling | None = None
    """What takes its place where contexts longer than its `original_context` are served."""
    long: bool = False
    """Whether they are: see `served`."""
    activation: Literal["silu", "gelu_tanh", "gelu", "clamped_silu", "relu2", "xielu"] = "silu"
    """The activation of the MLP."""
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    post_norms: bool = False
    """Whether what attention and the MLP give is normed before it is added."""
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    """What scores are multiplied by; None: 1 / sqrt(head_dim)."""
    attention_softcap: float = 0.0
    """With a number c, a score s becomes c tanh(s / c)."""
    logit_softcap: float = 0.0
    """The same of logits."""
    pre_norms: bool = True
    """Whether what attention and the MLP take is normed."""
    qk_norm_whole: bool = False
    """Whether `qk_norm` is over all heads together."""
    late_norms: bool = False
    """Whether queries and keys are turned first and normed then."""
    rotary: int | None = None
    """How many numbers of a head are turned, from the first on; None: all."""
    unturned: tuple[int, ...] = ()
    """Layers that know no positions."""
    query_scaling: tuple[float, float] | None = None
    """(b, context): queries are multiplied by 1 + b log(1 + floor(position / context))."""
    unturned_scaling: tuple[float, float] | None = None
    """The same of layers that know no positions, with the position of the next token."""
    plain_norm: bool = False
    """Whether queries and keys are normed without a weight, but in layers that know no positions."""
    sinks: bool = False
    """Whether each head has a score that takes a share of the softmax and gives nothing."""
    residual_scale: float = 1.0
    """What is multiplied with what attention and the MLP give."""
    logit_scale: float = 1.0
    experts: Experts | None = None
    tied: bool = False
    groups: tuple[CacheGroup, ...]
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    defaults: dict[str, float] = {}
    """Sampling defaults of generation_config.json: temperature, top_k, top_p, min_p, repetition_penalty."""
    makers: MakersSampling | None = None
    """What its makers say of sampling outside its files."""
    asked: dict[str, float] = {}
    """Sampling defaults that the options of whoever serves it name."""
    identity: bytes = b""
    """SHA-256 over everything above that could change a number, the weights and the tokenizer."""
    kind: Kind = "chat"
    """What its files say that it was made for."""
    embedding: Embedding = Embedding()
    encoder: EncoderSpec | None = None
    """Of a model that is no decoder; it has no cache groups."""
    both: bool = False
    """Whether a decoder's tokens see what follows them too."""
    judge: JudgeSpec | None = None
    """Of a decoder that judges pairs of texts."""
    latent: Latent | None = None
    """Of a decoder that keeps latents; its `head_dim` is that of queries."""
    uneven: Uneven | None = None
    """Of a decoder whose layers are not alike; its `head_dim` and `kv_heads` are those of layers with a window."""
    recurrence: Recurrence | None = None
    """Of layers without attention."""
    mlp_layers: tuple[int, ...] | None = None
    """Where a layer is either what mixes tokens or an MLP: those that are an MLP. None: every layer is both."""
    mlp_gated: bool = True
    """Whether what the MLP lets through goes through a gate, and not through the activation itself."""
    output_gate: bool = False
    """Whether each head's query has a gate behind it, through which what attention gives goes."""

    @property
    def whole(self) -> bool:
        """Whether texts are computed whole, in one step each, and nothing is kept: an encoder's, and a decoder's whose
        vectors are made of more than the last token's state."""
        return self.encoder is not None or self.both or (self.kind == "embed" and self.embedding.pooling != "last")

    def keeps_state(self, layer: int) -> bool:
        """Whether a layer keeps a state in the place of attention."""
        return self.recurrence is not None and layer in self.recurrence.layers

    def has_mlp(self, layer: int) -> bool:
        """Whether a layer has an MLP, or experts."""
        return self.mlp_layers is None or layer in self.mlp_layers

    def attends(self, layer: int) -> bool:
        """Whether a layer has attention."""
        return not self.keeps_state(layer) and (self.mlp_layers is None or layer not in self.mlp_layers)

    @property
    def width(self) -> int:
        """Numbers in a vector."""
        return self.embedding.dense[-1].outputs if self.embedding.dense else self.hidden

    @property
    def turned(self) -> int:
        """How many numbers of a head are turned."""
        return self.head_dim if self.rotary is None else self.rotary

    def group_of(self, layer: int) -> int:
        """The group whose cache a layer reads; -1 where it reads none."""
        source = self.kv_layer(layer)
        return next((number for number, group in enumerate(self.groups) if source in group.layers), -1)

    def kv_layer(self, layer: int) -> int:
        """The layer that writes the keys and values which a layer reads."""
        sources = self.uneven.kv_from if self.uneven is not None else ()
        at = layer - (self.layers - len(sources))
        return sources[at] if at >= 0 and sources else layer

    def turned_in(self, group: int) -> int:
        """How many numbers of a head of a group are turned."""
        return self.rotary or self.groups[group].head_dim or self.head_dim

    def page(self, group: int) -> tuple[int, ...]:
        """The shape of what one layer of a group keeps of a block: keys and values [2, K, tokens, D], what both are
        made of [1, 1, tokens, D], or a state."""
        own = self.groups[group]
        if own.kind == "state":
            return (own.numbers,)
        return 1 if own.once else 2, own.kv_heads or self.kv_heads, BLOCK_TOKENS, own.head_dim or self.head_dim

    @property
    def head_dims(self) -> tuple[int, ...]:
        """Numbers in a row of a page, of each group."""
        return tuple(self.page(group)[-1] for group in range(len(self.groups)))

    @property
    def longest_text(self) -> int:
        """Tokens of the longest text whose embedding the model was made for."""
        return min(self.context, self.embedding.max_tokens or self.context)

    def served(self, context: int) -> ModelSpec:
        """The spec with which contexts of at most so many tokens are computed.

        Which rotary positions a model has may depend on that, and never on a text: keys that were turned in one way
        cannot be read in the other, and a cached prefix has to be as good as a computed one.
        """
        long = self.long_rope is not None and context > self.long_rope.original_context
        return msgspec.structs.replace(self, long=long)

    def rope(self, group: int) -> RotaryPositions:
        """The positions of a group's layers."""
        usual = self.long_rope if self.long and self.long_rope is not None else self.rope_scaling
        return self.groups[group].rope or RotaryPositions(theta=self.rope_theta, scaling=usual)
