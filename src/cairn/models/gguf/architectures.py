"""The supported architectures of GGUF files as one table, and the reader of a file's expert keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from cairn.models.families.latent_spec import KEYS, VALUES
from cairn.models.families.moe_spec import MAX_EXPERTS, checked
from cairn.models.files import Fields
from cairn.models.gguf.recurrent import CONV, DELTA, MAMBA2, Rule, mlp_layers
from cairn.types.errors import ModelError
from cairn.types.model_spec import Experts, Parallel

EXPERT_KEYS = frozenset(
    (
        *("expert_count", "expert_used_count", "expert_feed_forward_length", "expert_shared_feed_forward_length"),
        *("expert_weights_scale", "expert_weights_norm", "leading_dense_block_count"),
    )
)
"""Metadata keys about experts, without the architecture's prefix."""


PER_LAYER = "per_layer_token_embd.weight"
"""Embedding table of the per-layer inputs (Gemma 4 and 3n)."""

MANY = (
    *("expert_shared_count", "expert_gating_func", "expert_group_count", "expert_group_used_count"),
    "nextn_predict_layers",
)
"""Keys of models with shared experts, expert groups or multi-token-prediction layers."""
_GATES: dict[int, Literal["softmax", "sigmoid", "chosen"]] = {1: "softmax", 2: "sigmoid", 3: "chosen"}
"""`expert_gating_func` -> `Experts.scores`."""


@dataclass(frozen=True, slots=True)
class RouterDefaults:
    """Router settings of an architecture that its files do not state."""

    scores: Literal["softmax", "sigmoid", "chosen"] = "softmax"
    normed: bool = False
    bias: bool = False
    shared_gate: bool = False
    gated: bool = True
    """As `Experts.gated`."""
    shared: bool = False
    """Whether the file states the width of an ungated shared expert."""
    beside: bool = False
    weighs_input: bool = False
    """As in `Experts`."""
    grouped: bool = False
    """Whether groups may be ranked by the sum of their two best experts although scores are a softmax."""
    many: bool = False
    """Whether the file states the number of shared experts, the gating function and the groups; it may also have a
    correction bias for the choice of experts."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one architecture's file differs from the plain decoder."""

    name: str
    """transformers' name of the same model."""
    qk_norm: bool | None = False
    """None: if the file has the norms."""
    late_norms: bool = False
    """Whether queries and keys are rotated before they are normed."""
    interleaved: bool = False
    """Whether q and k rows are stored with rotary pairs as neighbours."""
    gemma: bool = False
    """As `families.Family.gemma`; norms are stored as 1 + w."""
    period: int = 0
    """Every `period`-th layer has no window; 0: a window applies to all layers."""
    window_period: int = 0
    """As `period`, for architectures whose window is optional. If rope scaling is set, layers with a window use
    unscaled positions."""
    local_rope: bool = False
    """Whether layers with a window have their own rope theta."""
    by_width: int = 0
    """Number of layers of the variant whose scores are scaled by 1 / sqrt(width / heads) instead of 1 / sqrt(head
    size)."""
    softcaps: tuple[float, float] = (0.0, 0.0)
    """Softcap of attention scores and of logits, if the file does not state them."""
    both: bool = False
    """Whether attention is bidirectional; the file's window then counts the tokens on both sides."""
    qk_norm_whole: bool = False
    """Whether q and k norms span all heads together."""
    pre_norms: bool = True
    post_norms: bool = False
    """Whether norms stand before (`pre_norms`) and after (`post_norms`) attention and MLP."""
    multipliers: bool = False
    """Whether the file may scale embeddings, scores, residual branches and logits."""
    unturned: int | Literal["by window", "without window"] = 0
    """Every `unturned`-th layer has no rotary positions; 0: all have. "by window": layers without a window, if others
    have one; "without window": these layers in any case."""
    sinks: bool = False
    activation: Literal["silu", "gelu_tanh", "gelu", "clamped_silu", "relu2", "xielu"] = "silu"
    mixture: RouterDefaults | None = None
    mixture_name: str = ""
    """transformers' name of the variant with experts, if it differs."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Layer tensors named differently than in plain decoders: GGUF's name -> ours."""
    latent: bool = False
    """Whether attention is multi-head latent attention: see `latent_spec`."""
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Layer tensors that hold the rows of several of ours, in order."""
    ahead: bool = False
    """Whether multi-token-prediction layers may follow the last layer: see `mtp_spec`."""
    query_scaling: bool = False
    """Whether the file may scale queries by position."""
    log_multiplier: float = 0.0
    """Factor that turns the file's yarn log multiplier into `mscale_all_dim`; 0: the file has none."""
    rotary: bool = False
    """Whether `rope.dimension_count` may be less than the head size."""
    long_rope: bool = False
    """Whether two tensors of rope factors may exist, one for short and one for long contexts."""
    keys: tuple[str, ...] = ()
    """Keys understood in addition to those of every architecture."""
    untruncated: bool = False
    """Whether yarn's ramp may begin and end between whole dimensions."""
    recurrence: Rule = ""
    """How the file states which layers are recurrent instead of attention."""
    only_states: bool = False
    """Whether all layers are recurrent and nothing else."""
    tiled: bool = False
    """As `Recurrence.tiled`: neighbouring recurrent heads use keys of different key heads."""
    output_gate: bool = False
    """As `families.Family.output_gate`."""
    mlp_gated: bool = True
    """As `families.Family.mlp_gated`."""
    uneven: Literal["", "gemma4", "gemma3n"] = ""
    """Family of models whose layers differ in shape: see `uneven`."""
    pieces: int = 0
    """Length of the chunks into which layers with positions cut the context, unless the file states that they do
    not."""
    unturned_scaling: tuple[float, float] | None = None
    """As `ModelSpec.unturned_scaling`."""
    plain_norm_but: int = 0
    """Queries and keys are normed without a weight, except in the variant with this many experts; 0: never."""
    layer_norms: bool = False
    """Whether norms subtract the mean (LayerNorm); their biases are there if the file has them."""
    qk_norm_apart: bool = False
    """Whether each head has a norm of its own, if there are norms of queries and keys."""
    parallel: Parallel = ""
    """As `ModelSpec.parallel`, of files whose `use_parallel_residual` is not false; "one norm" is for files without a
    norm before the MLP."""
    logit_scale: bool = False
    """Whether `logit_scale` multiplies the logits."""
    constants: tuple[str, ...] = ()
    """Metadata keys (without architecture prefix) that hold what is a tensor of each layer here."""
    ignored: tuple[str, ...] = ()
    """Keys that do not affect text generation."""


_MLP_NORM = {"post_attention_norm": "post_attention_layernorm"}
"""The norm before the MLP, in files that name it after the attention it follows."""
_POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_GEMMA_NORMS = {**_POST_NORMS, "ffn_norm": "pre_feedforward_layernorm"}

_GEMMA_3 = Architecture(
    "Gemma3ForCausalLM", qk_norm=True, gemma=True, names=_GEMMA_NORMS, period=6, local_rope=True, by_width=62
)

_QWEN_3_5 = Architecture(
    "Qwen3_5ForCausalLM",
    qk_norm=True,
    names=_MLP_NORM | DELTA,
    rotary=True,
    ahead=True,
    recurrence="delta",
    tiled=True,
    output_gate=True,
    ignored=("rope.dimension_sections",),
)

_DEEPSEEK_2 = Architecture(
    "DeepseekV2ForCausalLM",
    latent=True,
    rotary=True,
    ahead=True,
    log_multiplier=10.0,
    query_scaling=True,
    names={
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_k_b": f"{KEYS}.{{}}",
        "attn_v_b": f"{VALUES}.{{}}",
    },
    mixture=RouterDefaults(many=True),
    keys=(
        *MANY,
        *("attention.q_lora_rank", "attention.kv_lora_rank", "attention.key_length_mla"),
        *("attention.value_length_mla", "rope.scaling.yarn_log_multiplier"),
        *("attention.temperature_scale", "attention.temperature_length"),
    ),
)
_GEMMA_4 = Architecture(
    "Gemma4ForCausalLM",
    qk_norm=True,
    names=_GEMMA_NORMS,
    post_norms=True,
    period=6,
    local_rope=True,
    uneven="gemma4",
    mixture=RouterDefaults(normed=True, beside=True),
    mixture_name="Gemma4ForCausalLM",
)

_QKV = {"attn_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")}
_COMMAND_R = Architecture(
    "CohereForCausalLM",
    qk_norm=None,
    qk_norm_apart=True,
    interleaved=True,
    layer_norms=True,
    parallel="one norm",
    logit_scale=True,
    keys=("attention.layer_norm_epsilon", "logit_scale"),
)

ARCHITECTURES = {
    "llama": Architecture(
        "LlamaForCausalLM", interleaved=True, mixture=RouterDefaults(normed=True), mixture_name="MixtralForCausalLM"
    ),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", mixture=RouterDefaults(shared_gate=True)),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", qk_norm=True, mixture=RouterDefaults(normed=True)),
    "olmoe": Architecture("OlmoeForCausalLM", qk_norm=True, qk_norm_whole=True, mixture=RouterDefaults()),
    "gpt-oss": Architecture(
        "GptOssForCausalLM",
        period=2,
        sinks=True,
        activation="clamped_silu",
        mixture=RouterDefaults(scores="chosen", bias=True),
        names=_MLP_NORM,
        untruncated=True,
    ),
    "granite": Architecture(
        "GraniteForCausalLM",
        interleaved=True,
        multipliers=True,
        keys=("attention.scale", "embedding_scale", "residual_scale", "logit_scale"),
    ),
    "smollm3": Architecture("SmolLM3ForCausalLM", interleaved=True, unturned=4),
    "olmo2": Architecture(
        "Olmo2ForCausalLM",
        qk_norm=True,
        qk_norm_whole=True,
        pre_norms=False,
        post_norms=True,
        names=_POST_NORMS,
        window_period=4,
    ),
    "exaone4": Architecture(
        "Exaone4ForCausalLM",
        qk_norm=True,
        pre_norms=False,
        post_norms=True,
        names=_POST_NORMS,
        window_period=4,
        unturned="by window",
        keys=("attention.sliding_window_pattern",),
    ),
    "glm4": Architecture(
        "Glm4ForCausalLM",
        interleaved=True,
        rotary=True,
        post_norms=True,
        names=_GEMMA_NORMS,
        fused={"ffn_up": ("mlp.gate_proj", "mlp.up_proj")},
    ),
    "qwen35": _QWEN_3_5,
    "qwen35moe": replace(
        _QWEN_3_5, name="Qwen3_5MoeForCausalLM", mixture=RouterDefaults(normed=True, shared_gate=True)
    ),
    "qwen3next": replace(
        _QWEN_3_5, name="Qwen3NextForCausalLM", mixture=RouterDefaults(normed=True, shared_gate=True), tiled=False
    ),
    "lfm2": Architecture("Lfm2ForCausalLM", qk_norm=True, names=CONV, recurrence="conv"),
    "lfm2moe": Architecture(
        "Lfm2MoeForCausalLM",
        qk_norm=True,
        names=CONV,
        recurrence="conv",
        mixture=RouterDefaults(scores="sigmoid", normed=True, many=True),
        keys=MANY,
    ),
    "nemotron_h": Architecture(
        "NemotronHForCausalLM",
        names=MAMBA2,
        recurrence="mamba2",
        mlp_gated=False,
        activation="relu2",
        ignored=("attention.layer_norm_epsilon",),
    ),
    "nemotron_h_moe": Architecture(
        "NemotronHForCausalLM",
        names=MAMBA2,
        recurrence="mamba2",
        mlp_gated=False,
        activation="relu2",
        ahead=True,
        mixture=RouterDefaults(normed=True, gated=False, shared=True, many=True),
        keys=MANY,
        ignored=("attention.layer_norm_epsilon",),
    ),
    "mamba2": Architecture("Mamba2ForCausalLM", names=MAMBA2, recurrence="mamba2", only_states=True),
    "granitehybrid": Architecture(
        "GraniteMoeHybridForCausalLM",
        interleaved=True,
        multipliers=True,
        names=MAMBA2,
        recurrence="mamba2",
        mixture=RouterDefaults(scores="chosen", shared=True),
        mixture_name="GraniteMoeHybridForCausalLM",
        keys=("attention.scale", "embedding_scale", "residual_scale", "logit_scale"),
    ),
    "phi3": Architecture(
        "Phi3ForCausalLM",
        rotary=True,
        long_rope=True,
        fused=_QKV | {"ffn_up": ("mlp.gate_proj", "mlp.up_proj")},
    ),
    "glm4moe": Architecture(
        "Glm4MoeForCausalLM",
        qk_norm=None,
        rotary=True,
        ahead=True,
        names=_MLP_NORM,
        mixture=RouterDefaults(scores="sigmoid", normed=True, many=True),
        keys=MANY,
    ),
    "deepseek2": _DEEPSEEK_2,
    "mistral4": replace(
        _DEEPSEEK_2, name="Mistral4ForCausalLM", mixture=RouterDefaults(many=True, normed=True, grouped=True)
    ),
    "llama4": Architecture(
        "Llama4ForCausalLM",
        interleaved=True,
        unturned=4,
        pieces=8192,
        unturned_scaling=(0.1, 8192.0),
        plain_norm_but=128,
        mixture=RouterDefaults(scores="sigmoid", weighs_input=True),
        keys=("interleave_moe_layer_step",),
    ),
    "apertus": Architecture(
        "ApertusForCausalLM", qk_norm=True, mlp_gated=False, activation="xielu", constants=("alpha_p", "alpha_n")
    ),
    "gemma4": _GEMMA_4,
    "gemma3n": replace(_GEMMA_4, name="Gemma3nForCausalLM", period=5, uneven="gemma3n", mixture=None, mixture_name=""),
    "hunyuan-dense": Architecture("HunYuanDenseV1ForCausalLM", qk_norm=True, late_norms=True),
    "mistral3": Architecture(
        "Ministral3ForCausalLM",
        interleaved=True,
        query_scaling=True,
        log_multiplier=1.0,
        keys=("attention.temperature_scale", "rope.scaling.yarn_log_multiplier"),
    ),
    "seed_oss": Architecture("SeedOssForCausalLM", names=_MLP_NORM),
    "starcoder2": Architecture(
        "Starcoder2ForCausalLM",
        layer_norms=True,
        mlp_gated=False,
        activation="gelu_tanh",
        keys=("attention.layer_norm_epsilon",),
    ),
    "phi2": Architecture(
        "PhiForCausalLM",
        layer_norms=True,
        parallel="one norm",
        rotary=True,
        mlp_gated=False,
        activation="gelu_tanh",
        fused=_QKV,
        keys=("attention.layer_norm_epsilon",),
    ),
    "stablelm": Architecture(
        "StableLmForCausalLM",
        layer_norms=True,
        qk_norm=None,
        qk_norm_apart=True,
        parallel="one norm",
        rotary=True,
        keys=("attention.layer_norm_epsilon", "use_parallel_residual"),
    ),
    "gptneox": Architecture(
        "GPTNeoXForCausalLM",
        layer_norms=True,
        parallel="two norms",
        rotary=True,
        mlp_gated=False,
        activation="gelu",
        fused=_QKV,
        keys=("attention.layer_norm_epsilon", "use_parallel_residual"),
    ),
    "command-r": _COMMAND_R,
    "cohere2": replace(
        _COMMAND_R,
        name="Cohere2ForCausalLM",
        qk_norm=False,
        qk_norm_apart=False,
        rotary=True,
        window_period=4,
        unturned="without window",
        keys=(*_COMMAND_R.keys, "attention.sliding_window_pattern"),
    ),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen3": Architecture("Qwen3ForCausalLM", qk_norm=True),
    "gemma2": Architecture(
        "Gemma2ForCausalLM", gemma=True, names=_GEMMA_NORMS, period=2, by_width=46, softcaps=(50.0, 30.0)
    ),
    "gemma3": _GEMMA_3,
    "gemma-embedding": replace(_GEMMA_3, both=True),
}
"""`general.architecture` -> its row. Mistral's models use "llama"."""


def layers(keys: Fields, family: Architecture) -> int:
    """Return the number of decoder layers, without multi-token-prediction layers."""
    count = keys.integer("block_count", 1, 1 << 12)
    return count - (keys.integer("nextn_predict_layers", 0, count - 1, 0) if family.ahead else 0)


def experts(keys: Fields, family: Architecture, layers: int, corrected: bool) -> Experts | None:
    """Return the experts that a file describes, or None. `corrected`: whether the file has a correction bias."""
    count = keys.integer("expert_count", 0, MAX_EXPERTS, 0)
    router, alone = family.mixture, mlp_layers(keys, layers)
    if not count:
        if router is not None and not family.mixture_name:
            raise keys.error("expert_count", f"a whole number from 1 to {MAX_EXPERTS}")
        return None
    if router is None:
        raise ModelError(f"{keys.path}: {keys.prefix}expert_count is set, which is not supported")
    sparse = alone or _layers(keys, layers)
    keys.check_by_layer("experts", "expert_count", count, "block_count", len(sparse))
    ffn = keys.integer("feed_forward_length", 1, 1 << 22, 1)
    shared = keys.integer("expert_shared_feed_forward_length", 0, 1 << 22, ffn) if router.shared_gate else 0
    own = keys.integer("expert_feed_forward_length", 1, 1 << 22, ffn)
    scores = router.scores
    if router.many:
        shared = own * keys.integer("expert_shared_count", 0, 1 << 10, 0)
        gate = keys.integer("expert_gating_func", 0, 3, 0)
        scores = _GATES.get(gate, "sigmoid" if corrected else scores)
        if scores == "softmax" and not router.grouped and keys.integer("expert_group_used_count", 0, count, 1) > 1:
            raise ModelError(f"{keys.path}: {keys.prefix}expert_group_used_count with softmax is not supported")
    if router.weighs_input:
        shared = own
        _check_is_one(keys, "expert_used_count")
    if router.shared:
        shared = keys.integer("expert_shared_feed_forward_length", 0, 1 << 22, 0)
    return checked(
        keys,
        Experts(
            count=count,
            chosen=keys.integer("expert_used_count", 1, count),
            ffn=own,
            layers=sparse,
            beside=router.beside,
            weighs_input=router.weighs_input,
            gated=router.gated,
            scores=scores,
            groups=keys.integer("expert_group_count", 0, count, 1) or 1,
            chosen_groups=keys.integer("expert_group_used_count", 0, count, 1) or 1,
            correction=corrected and router.many,
            normed=keys.flag("expert_weights_norm", router.normed),
            scale=keys.number_or_zero("expert_weights_scale", 1e-6, 1e6, 1.0) or 1.0,
            bias=router.bias,
            shared=shared,
            shared_gate=router.shared_gate and shared > 0,
        ),
    )


def _layers(keys: Fields, layers: int) -> tuple[int, ...]:
    """Return the layers that have experts."""
    step = keys.integer("interleave_moe_layer_step", 1, 1 << 12, 1)
    first = keys.integer("leading_dense_block_count", 0, layers, 0)
    return tuple(layer for layer in range(first, layers) if (layer + 1) % step == 0)


def _check_is_one(keys: Fields, name: str) -> None:
    if keys.integer(name, 1, MAX_EXPERTS, 1) != 1:
        raise ModelError(f"{keys.path}: {keys.prefix}{name} other than 1 is not supported")
