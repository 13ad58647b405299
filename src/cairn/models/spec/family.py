"""How one architecture of folders differs from the plain decoder; `families` has a row for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Family:
    """How one architecture differs from the plain decoder. A string names the config field that decides."""

    qkv_bias: bool | str = False
    out_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool | str = False
    qk_norm_whole: bool = False
    """Whether it is over all heads together."""
    plain_norm: bool | str = False
    """Whether queries and keys are normed without a weight."""
    pre_norms: bool = True
    post_norms: bool = False
    """Whether norms stand before attention and MLP, and behind them."""
    head_dim: int | None = None
    """Default head size; None: hidden_size / num_attention_heads."""
    kv_heads: int | None = None
    """Default of num_key_value_heads; None: num_attention_heads."""
    window: Literal["none", "all", "by layer", "by type", "unturned"] = "none"
    """Which layers `sliding_window` limits: "by layer" where `use_sliding_window` is set, "by type" always; which those
    are, `layer_types` says, or else `max_window_layers` and `period`. "unturned": all but those without positions; they
    cut the context into pieces of `attention_chunk_size` and see their own."""
    period: int = 0
    """Every so many-th layer has no window."""
    local_rope: bool = False
    """Whether layers with a window have rotary positions of their own."""
    gemma: bool = False
    """Whether norms multiply by 1 + w and also stand behind attention and MLP, embeddings are scaled by the root of
    their width, `query_pre_attn_scalar` is the scale of scores, and these and the logits may have a softcap."""
    nested: bool = False
    """Whether the model is the text part of a larger one: `text_config`, and tensors with a prefix."""
    mixture: str = ""
    """The row of `mixture_spec.MIXTURES` that says what experts it has; "": none."""
    multipliers: bool = False
    """Whether `embedding_multiplier`, `attention_multiplier`, `residual_multiplier` and `logits_scaling` count."""
    sinks: bool = False
    activation: Literal["clamped_silu", "relu2", "xielu"] | None = None
    """The MLP's, where no config says it."""
    rotary: bool = False
    """Whether `partial_rotary_factor` counts."""
    unturned: bool | Literal["by window"] = False
    """Whether `no_rope_layers` says which layers have no positions (0), or else every `no_rope_layer_interval`-th; "by
    window": those without one, where others have one."""
    unscaled: bool = False
    """Whether layers with a window turn their heads without the scaling of the others."""
    query_scaling: bool = False
    """Whether `llama_4_scaling_beta` counts."""
    late_norms: bool = False
    """Whether queries and keys are turned before they are normed."""
    stretched: bool = False
    """Whether the rotary positions' `alpha` stretches their theta, which the config calls dynamic."""
    long_rope: bool = False
    """Whether rotary positions may be scaled by lists of factors, of which one is for long contexts."""
    uneven: bool = False
    """Whether layers are not alike: see `uneven_spec`."""
    streams: bool = False
    """Whether the hidden state is kept several times over."""
    latent: bool = False
    """Whether attention is over latents: see `latent_spec`."""
    packed: bool = False
    """Whether its safetensors may hold experts in MXFP4."""
    ahead: bool = False
    """Whether there may be layers behind the last, which guess further tokens: they are set aside."""
    recurrence: str = ""
    """The rule of `recurrent_spec` that says which layers keep a state in the place of attention; "": none."""
    alone: bool = False
    """Whether a layer is either what mixes tokens or an MLP."""
    mlp_gated: bool = True
    output_gate: bool = False
    """Whether each head's query has a gate behind it, through which what attention gives goes."""
    centred: bool = False
    """Whether norms multiply by 1 + w, but those of layers that keep a state."""
    positions: str = ""
    """The field that says whether layers have rotary positions: none but for "rope"."""
    sections: bool = False
    """Whether positions may have sections for images, which say nothing where there is text alone."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Of fields that a config may leave out."""
