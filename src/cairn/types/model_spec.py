"""A model as data: its layers, cache groups and pooling, and the block size that its KV is counted in."""

from __future__ import annotations

from typing import Literal

import msgspec

BLOCK_TOKENS = 16
"""Tokens in one KV block. Kernels, pools, stores and files all take it from here."""
CHUNK_BLOCKS = 4
"""Blocks in a chunk, the unit of the KV stores."""
CHUNK_TOKENS = CHUNK_BLOCKS * BLOCK_TOKENS
"""Tokens in a chunk."""


MAX_CONTEXT = 1 << 24
MAX_VOCAB = 1 << 22
MAX_HEAD_DIM = 1 << 10
"""Largest head size served: the kernels' limit, and a bound on what a model file may claim."""
MAX_BY_LAYER = 1 << 17
"""Most experts of all layers together, or heads with matrices of their own: each is several tensors. The largest models
have some 25,000."""
Kind = Literal["chat", "embed", "rerank"]
Parallel = Literal["", "one norm", "two norms"]


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
    """A divisor for each plain frequency, applied first; () for none."""


class RotaryPositions(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding of a cache group's layers."""

    theta: float
    scaling: RopeScaling = RopeScaling()


class CacheGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that keep the same kind of cache and therefore share one block table."""

    kind: Literal["full", "window", "state"]
    layers: tuple[int, ...]
    window: int = 0
    """Tokens that a position attends to, itself included. 0 for full attention."""
    rope: RotaryPositions | None = None
    """Rotary positions of these layers; None: the model's."""
    numbers: int = 0
    """Size of a state group's state: float32 numbers for each layer and sequence."""
    kv_heads: int | None = None
    head_dim: int | None = None
    """Heads of these layers; None: the model's."""
    once: bool = False
    """Whether one vector for each token holds both key and value (MLA)."""
    pieces: bool = False
    """Chunked attention: positions are cut into chunks of `window` tokens, and each attends only to its own chunk, up
    to itself. A window of the same size covers that."""

    @property
    def sight(self) -> int:
        """The window as kernels take it: negative for chunked attention."""
        return -self.window if self.pieces else self.window


NEVER = 1e30
"""A divisor that makes a rotary frequency practically zero, so that it turns nothing at any position."""


class Experts(msgspec.Struct, frozen=True, kw_only=True):
    """A mixture of experts in place of the MLP: each token is routed to a few of many experts."""

    count: int
    chosen: int
    """Experts for each token (top-k of the router)."""
    ffn: int
    """Intermediate width of each expert."""
    layers: tuple[int, ...]
    """Layers with experts; the others have the plain MLP."""
    scores: Literal["softmax", "sigmoid", "chosen"] = "softmax"
    """How router scores become weights: see `kernels.base.Kernels.route`."""
    normed: bool = False
    scale: float = 1.0
    groups: int = 1
    chosen_groups: int = 1
    correction: bool = False
    """Whether a bias is added to the weights for choosing experts only, not for mixing them."""
    bias: bool = False
    """Whether the router and the experts have biases."""
    gated: bool = True
    """Whether experts are gated: act(g) * u instead of act(g)."""
    shared: int = 0
    """Width of an expert that every token goes through; 0: none."""
    shared_gate: bool = False
    weighs_input: bool = False
    """Whether routing weights multiply an expert's input instead of its output."""
    beside: bool = False
    """Whether experts run in parallel to the MLP, with norms of their own and a scale for each expert (Gemma 4)."""


class Streams(msgspec.Struct, frozen=True, kw_only=True):
    """Gemma 3n's parallel hidden states (AltUp), its low-rank branch beside attention (LAuReL) and sparse gates.

    Each layer computes one of the hidden states and corrects all of them.
    """

    count: int
    active: int
    """Index of the hidden state that layers compute."""
    rank: int
    """Width of the low-rank branch."""
    sparsity: tuple[float | None, ...] = ()
    """For each layer, how many standard deviations above the mean a gate must lie to pass; None: all pass. () for all
    layers."""
    scaled: bool = True
    """Whether the input of each layer's mixing is scaled column by column."""


class Uneven(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that differ from each other (Gemma 4, Gemma 3n).

    Head sizes differ by group. Values are normed without a weight. Without `streams` each layer's output is multiplied
    by a scalar of its own.
    """

    kv_from: tuple[int, ...] = ()
    """For each of the last layers, which have no keys and values of their own, the layer whose KV it reads."""
    keys_as_values: tuple[int, ...] = ()
    """Layers whose values are their keys before the norm."""
    wide: tuple[int, ...] = ()
    """Layers whose MLP is twice as wide."""
    inputs: int = 0
    """Width of the per-layer embedding that each layer adds for a token; 0: none."""
    input_rows: int = 0
    """Rows of the per-layer embedding table."""
    streams: Streams | None = None


class Recurrence(msgspec.Struct, frozen=True, kw_only=True):
    """Layers with a recurrent state of constant size instead of keys and values.

    `delta`: gated delta net. `mamba2`: Mamba 2. `conv`: LFM2's gated short convolution, whose state is its window only.
    """

    kind: Literal["delta", "mamba2", "conv"]
    layers: tuple[int, ...]
    reach: int
    """Tokens that the convolution covers, the current one included."""
    heads: int = 1
    value_size: int
    """Numbers of a head's value; for `conv` the whole width."""
    key_heads: int = 0
    """Heads of keys and queries (Mamba 2: groups of B and C)."""
    key_size: int = 0
    """Numbers of a key and of a query (Mamba 2: of B and of C)."""
    tiled: bool = False
    """Whether head h uses key head h % key_heads; otherwise neighbouring heads share a key head."""
    conv_bias: bool = False
    bias: bool = False
    """Whether the input and output projections have a bias."""
    step_limits: tuple[float, float] | None = None
    """Least and greatest time step (Mamba 2)."""

    @property
    def channels(self) -> int:
        """Numbers for each token that are convolved."""
        return self.heads * self.value_size + 2 * self.key_heads * self.key_size

    @property
    def inner(self) -> int:
        """Numbers for each token in the values of all heads."""
        return self.heads * self.value_size

    @property
    def numbers(self) -> int:
        """Numbers in a layer's state: the convolution's window, and a matrix for each head."""
        return (self.reach - 1) * self.channels + self.heads * self.key_size * self.value_size

    @property
    def projected(self) -> int:
        """Numbers for each token that the projections before the convolution give."""
        if self.kind == "conv":
            return 3 * self.channels
        return self.channels + self.inner + self.heads * (2 if self.kind == "delta" else 1)


class Latent(msgspec.Struct, frozen=True, kw_only=True):
    """Multi-head latent attention (MLA): one vector for each token, from which all heads' keys and values are made."""

    rank: int
    """Width of the latent; the rotary part of the key is kept beside it."""
    query_rank: int = 0
    """Width of the queries' latent; 0: queries are made from the hidden state directly."""
    plain: int
    """Numbers of a head's query and key without rotary positions."""
    value: int
    """Numbers of a head's value."""
    neighbours: bool = True
    """Whether rotary pairs are neighbours (2i, 2i + 1), not (i, i + half)."""
    bias: bool = False
    """Whether the projections to latents have a bias."""
    eps: float = 1e-6
    """Of the norms of latents."""


Pooling = Literal["cls", "mean", "last"]


class Dense(msgspec.Struct, frozen=True, kw_only=True):
    """A dense layer applied to a pooled hidden state."""

    place: str
    """Folder of its weights within the model's folder."""
    inputs: int
    outputs: int
    bias: bool = True
    activation: Literal["", "tanh"] = ""
    inside: bool = False
    """Whether its weights are in the model's own files, named by `place`."""


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    """How a text's vector is pooled from its tokens' hidden states."""

    pooling: Pooling = "last"
    """The first token's, the mean of all, or the last token's."""
    max_tokens: int | None = None
    """Longest text in tokens, if less than the model's context."""
    prompts: dict[str, str] = {}
    """Task name -> text that is put before the input."""
    prompt: str | None = None
    """Name of the default prompt."""
    dense: tuple[Dense, ...] = ()
    """Dense layers after pooling, in order."""


class JudgeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How a decoder reranks a pair of texts: by the logit of `yes` minus the logit of `no`."""

    yes: int
    no: int
    """Token ids: rows of the output matrix."""
    apart: bool = False
    """Whether the two rows are a matrix of their own."""


class EncoderSpec(msgspec.Struct, frozen=True, kw_only=True):
    """An encoder's differences from a decoder. Attention is in both directions and nothing is cached."""

    positions: Literal["learned", "rotary"] = "learned"
    first_position: int = 0
    """Row of the position table for the first token."""
    position_rows: int = 0
    type_rows: int = 0
    """Rows of the tables of positions and of token types; 0: no table."""
    norm_first: bool = False
    """Pre-norm: norms before attention and MLP and one at the end, instead of one after each."""
    norm_bias: bool = True
    fused: bool = False
    """Whether queries, keys and values are one matrix, and gate and up projections another."""
    gated: bool = False
    windows: tuple[int, ...] = ()
    """For each layer, how far a token sees to either side, itself included; 0: everything. () for all layers."""
    local: RotaryPositions | None = None
    """Rotary positions of layers with a window; None: the model's."""
    labels: int = 0
    """Outputs of the classification head; 0: no head."""
    head: Literal["", "tanh", "norm"] = ""
    """Layers between the pooled state and the scores: dense and tanh, or dense, GELU and a norm."""
    head_bias: bool = True

    def window(self, layer: int) -> int:
        """Return a layer's window in tokens; 0 for none."""
        return self.windows[layer] if self.windows else 0


class MakersSampling(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters that a model's makers recommend, with the source."""

    values: dict[str, float]
    """Sampling parameter -> value. Parameters not named are off."""
    thinking: dict[str, float] = msgspec.field(default_factory=dict)
    """The values for answers with reasoning, if the makers recommend others for these; empty if not."""
    source: str
    """URL of the recommendation."""
    read: str
    """Day on which the source was read."""


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
    """Longest context in tokens that the model was trained for."""
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling = RopeScaling()
    long_rope: RopeScaling | None = None
    """Scaling used instead when contexts longer than its `original_context` are served."""
    long: bool = False
    """Whether `long_rope` is in use: see `served`."""
    activation: Literal["silu", "gelu_tanh", "gelu", "clamped_silu", "relu2", "xielu"] = "silu"
    """The activation of the MLP."""
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    post_norms: bool = False
    """Whether outputs of attention and MLP are normed before they are added to the residual."""
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    """Factor on attention scores; None: 1 / sqrt(head_dim)."""
    attention_softcap: float = 0.0
    """With a cap c > 0, a score s becomes c tanh(s / c)."""
    logit_softcap: float = 0.0
    """The same for logits."""
    pre_norms: bool = True
    """Whether inputs of attention and MLP are normed."""
    qk_norm_whole: bool = False
    """Whether `qk_norm` is over all heads together."""
    late_norms: bool = False
    """Whether queries and keys are normed after the rotation instead of before."""
    rotary: int | None = None
    """Numbers of a head that are rotated, from the first on; None: all."""
    unturned: tuple[int, ...] = ()
    """Layers without rotary positions."""
    query_scaling: tuple[float, float] | None = None
    """(b, context): queries are multiplied by 1 + b log(1 + floor(position / context))."""
    unturned_scaling: tuple[float, float] | None = None
    """The same for layers without rotary positions, with the position of the next token."""
    plain_norm: bool = False
    """Whether queries and keys of layers with rotary positions are normed without a weight."""
    sinks: bool = False
    """Whether each head has an attention sink: a score in the softmax without a value."""
    residual_scale: float = 1.0
    """Factor on the outputs of attention and MLP."""
    logit_scale: float = 1.0
    experts: Experts | None = None
    tied: bool = False
    groups: tuple[CacheGroup, ...]
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    defaults: dict[str, float] = {}
    """Sampling defaults of generation_config.json: temperature, top_k, top_p, min_p, repetition_penalty."""
    makers: MakersSampling | None = None
    """The makers' recommended sampling, published outside the model's files."""
    asked: dict[str, float] = {}
    """Sampling defaults from the server's options."""
    identity: bytes = b""
    """SHA-256 over the weights, the tokenizer and every field above that could change a number."""
    kind: Kind = "chat"
    """Purpose of the model according to its files."""
    embedding: Embedding = Embedding()
    encoder: EncoderSpec | None = None
    """Set for an encoder, which has no cache groups; None for a decoder."""
    both: bool = False
    """Whether a decoder's attention is bidirectional."""
    judge: JudgeSpec | None = None
    """Set for a decoder that reranks pairs of texts."""
    latent: Latent | None = None
    """Set for a decoder with MLA; `head_dim` is then that of queries."""
    uneven: Uneven | None = None
    """Set for a decoder whose layers differ; `head_dim` and `kv_heads` are then those of layers with a window."""
    recurrence: Recurrence | None = None
    """Set for a decoder with recurrent layers."""
    mlp_layers: tuple[int, ...] | None = None
    """Layers that are only an MLP, in models where a layer either mixes tokens or is an MLP. None: every layer does
    both."""
    mlp_gated: bool = True
    """Whether the MLP is gated: act(g) * u instead of act(g)."""
    layer_norms: bool = False
    """Whether norms subtract the mean (LayerNorm)."""
    norm_bias: bool = False
    """Whether these norms have a bias; those of queries and keys only if all heads share one."""
    qk_norm_apart: bool = False
    """Whether each head has a norm of its own, with `qk_norm`."""
    parallel: Parallel = ""
    """Whether attention and MLP read the same hidden state, through one norm or two; "": one after the other."""
    head_bias: bool = False
    """Whether the output matrix has a bias."""
    output_gate: bool = False
    """Whether the query projection also gives a gate for each head, which multiplies attention's output."""
    ahead: int = 0
    """For an MTP head, a model of one layer: the number of layers of its main model, and so its layer number in the
    files. Embedding and output are the main model's. 0 otherwise."""

    @property
    def whole(self) -> bool:
        """Whether each text is computed whole in one step and nothing is cached.

        True for encoders, and for decoders whose vectors are pooled from more than the last token's state.
        """
        return self.encoder is not None or self.both or (self.kind == "embed" and self.embedding.pooling != "last")

    def keeps_state(self, layer: int) -> bool:
        """Tell whether a layer has a recurrent state instead of attention."""
        return self.recurrence is not None and layer in self.recurrence.layers

    def has_mlp(self, layer: int) -> bool:
        """Tell whether a layer has an MLP or experts."""
        return self.mlp_layers is None or layer in self.mlp_layers

    def attends(self, layer: int) -> bool:
        """Tell whether a layer has attention."""
        return not self.keeps_state(layer) and (self.mlp_layers is None or layer not in self.mlp_layers)

    @property
    def width(self) -> int:
        """Numbers in an embedding vector."""
        return self.embedding.dense[-1].outputs if self.embedding.dense else self.hidden

    @property
    def turned(self) -> int:
        """Numbers of a head that are rotated."""
        return self.head_dim if self.rotary is None else self.rotary

    def group_of(self, layer: int) -> int:
        """Return the number of the group whose cache a layer reads; -1 if it reads none."""
        source = self.kv_layer(layer)
        return next((number for number, group in enumerate(self.groups) if source in group.layers), -1)

    def kv_layer(self, layer: int) -> int:
        """Return the layer that writes the keys and values that this layer reads."""
        sources = self.uneven.kv_from if self.uneven is not None else ()
        at = layer - (self.layers - len(sources))
        return sources[at] if at >= 0 and sources else layer

    def turned_in(self, group: int) -> int:
        """Return how many numbers of a group's heads are rotated."""
        return self.rotary or self.groups[group].head_dim or self.head_dim

    def page(self, group: int) -> tuple[int, ...]:
        """Return the shape of one layer's part of a block in this group.

        Keys and values [2, K, tokens, D], a latent [1, 1, tokens, D], or a state [numbers].
        """
        own = self.groups[group]
        if own.kind == "state":
            return (own.numbers,)
        return 1 if own.once else 2, own.kv_heads or self.kv_heads, BLOCK_TOKENS, own.head_dim or self.head_dim

    @property
    def head_dims(self) -> tuple[int, ...]:
        """Numbers in a row of a page, for each group."""
        return tuple(self.page(group)[-1] for group in range(len(self.groups)))

    @property
    def longest_text(self) -> int:
        """Tokens of the longest text that the model can embed."""
        return min(self.context, self.embedding.max_tokens or self.context)

    def served(self, context: int) -> ModelSpec:
        """Return the spec for serving contexts of at most `context` tokens.

        Rotary positions may depend on this limit but never on the text's length: keys rotated one way cannot be read
        the other way, and a cached prefix must equal a computed one.
        """
        long = self.long_rope is not None and context > self.long_rope.original_context
        return msgspec.structs.replace(self, long=long)

    def rope(self, group: int) -> RotaryPositions:
        """Return the rotary positions of a group's layers."""
        usual = self.long_rope if self.long and self.long_rope is not None else self.rope_scaling
        return self.groups[group].rope or RotaryPositions(theta=self.rope_theta, scaling=usual)
