"""How one architecture of model folders differs from the plain decoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from cairn.types.model_spec import Parallel


@dataclass(frozen=True, slots=True)
class Family:
    """How one architecture differs from the plain decoder. A string names the config field that decides."""

    qkv_bias: bool | str = False
    out_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool | str = False
    qk_norm_whole: bool = False
    """Whether the norm spans all heads together."""
    plain_norm: bool | str = False
    """Whether queries and keys are normed without a weight."""
    pre_norms: bool = True
    post_norms: bool = False
    """Whether norms stand before (`pre_norms`) and after (`post_norms`) attention and MLP."""
    head_dim: int | None = None
    """Default head size; None: hidden_size / num_attention_heads."""
    kv_heads: int | None = None
    """Default of num_key_value_heads; None: num_attention_heads."""
    window: Literal["none", "all", "by layer", "by type", "unturned"] = "none"
    """Which layers `sliding_window` limits. "by layer": those listed, if `use_sliding_window` is set; "by type": always
    those listed. The list is `layer_types`, else it follows from `max_window_layers` and `period`. "unturned": all
    layers with positions attend within chunks of `attention_chunk_size`."""
    period: int = 0
    """Every `period`-th layer has no window."""
    local_rope: bool = False
    """Whether layers with a window have their own rope theta."""
    gemma: bool = False
    """Whether norms multiply by 1 + w and also follow attention and MLP, embeddings are scaled by sqrt(hidden), scores
    by `query_pre_attn_scalar`, and scores and logits may have a softcap."""
    nested: bool = False
    """Whether the model is the text part of a larger one: `text_config`, and tensors with a prefix."""
    mixture: str = ""
    """Row of `moe_spec.MIXTURES`; "": no experts."""
    multipliers: bool = False
    """Whether `embedding_multiplier`, `attention_multiplier`, `residual_multiplier` and `logits_scaling` are read."""
    sinks: bool = False
    activation: Literal["clamped_silu", "relu2", "xielu"] | None = None
    """Activation of the MLP, if configs do not state it."""
    rotary: bool = False
    """Whether `partial_rotary_factor` is read."""
    unturned: bool | Literal["by window", "without window"] = False
    """Whether `no_rope_layers` lists the layers without positions (0), or else every `no_rope_layer_interval`-th has
    none. "by window": layers without a window, if others have one; "without window": these layers in any case."""
    unscaled: bool = False
    """Whether layers with a window use unscaled rotary positions."""
    query_scaling: bool = False
    """Whether `llama_4_scaling_beta` is read."""
    late_norms: bool = False
    """Whether queries and keys are rotated before they are normed."""
    stretched: bool = False
    """Whether the rotary setting `alpha` scales theta; configs call it dynamic."""
    long_rope: bool = False
    """Whether rotary positions may be scaled by lists of factors, one for short and one for long contexts."""
    uneven: bool = False
    """Whether layers differ in shape: see `uneven_spec`."""
    streams: bool = False
    """Whether the hidden state is kept in several streams (AltUp)."""
    latent: bool = False
    """Whether attention is multi-head latent attention: see `latent_spec`."""
    packed: bool = False
    """Whether its safetensors may hold experts in MXFP4."""
    ahead: bool = False
    """Whether multi-token-prediction layers may follow the last layer: see `mtp_spec`."""
    recurrence: str = ""
    """Rule of `recurrent_spec` that finds the recurrent layers; "": none."""
    alone: bool = False
    """Whether a layer is either a mixer (attention or recurrent) or an MLP."""
    mlp_gated: bool = True
    output_gate: bool = False
    """Whether each head's query comes with a gate that multiplies the attention output."""
    centred: bool = False
    """Whether norms multiply by 1 + w, except those of recurrent layers."""
    positions: str = ""
    """Field that states whether layers have rotary positions: only if it is "rope"."""
    sections: bool = False
    """Whether positions may have sections for images, which do not affect text."""
    norms: Literal["rms", "layer", "layer, bias"] = "rms"
    """Whether norms subtract the mean (LayerNorm), and have a bias."""
    eps: str = ""
    """Field of the norms' epsilon; "": `norm_eps`, `layer_norm_epsilon` or `rms_norm_eps`."""
    qk_norm_apart: bool = False
    """Whether each head has a norm of its own, with `qk_norm`."""
    parallel: Parallel = ""
    """As `ModelSpec.parallel`, if the field `parallel_if` is true or there is none."""
    parallel_if: str = ""
    head_bias: bool = False
    logit_scale: bool = False
    """Whether `logit_scale` multiplies the logits."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of fields that a config may omit."""
