"""A model as data: everything that the forward pass and the KV cache depend on."""

from __future__ import annotations

from typing import Literal

import msgspec

from cairn.types.block_size import BLOCK_TOKENS
from cairn.types.layer_spec import CacheGroup, Experts, Latent, Recurrence, RopeScaling, RotaryPositions, Uneven
from cairn.types.pooling_spec import Embedding, EncoderSpec, JudgeSpec

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
