"""The architectures of GGUF files that are built, as rows of one table, and what their files say of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from cairn.errors import ModelError
from cairn.models.files import Fields
from cairn.models.gguf_recurrent import DELTA, Rule
from cairn.models.mixture_spec import MAX_EXPERTS, checked
from cairn.types import Experts

EXPERT_KEYS = frozenset(
    (
        *("expert_count", "expert_used_count", "expert_feed_forward_length", "expert_shared_feed_forward_length"),
        *("expert_weights_scale", "expert_weights_norm"),
    )
)
"""What files say of experts, below their architecture's name."""


@dataclass(frozen=True, slots=True)
class Router:
    """What an architecture's files do not say of its experts."""

    scores: Literal["softmax", "sigmoid", "chosen"] = "softmax"
    normed: bool = False
    bias: bool = False
    shared_gate: bool = False


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one architecture's file differs from the plain decoder."""

    name: str
    """transformers' name of the same model."""
    qk_norm: bool = False
    interleaved: bool = False
    """Whether rows of q and k are stored so that rotary pairs are neighbours."""
    gemma: bool = False
    """As `families.Family.gemma`; norms are stored as 1 + w."""
    period: int = 0
    """Every so many-th layer has no window; 0: a window is for all."""
    window_period: int = 0
    """The same of an architecture that may have no window; layers with one turn their heads without scaling."""
    local_rope: bool = False
    """Whether layers with a window have rotary positions of their own."""
    by_width: int = 0
    """With so many layers, scores are scaled by 1 / sqrt(width / heads), not by 1 / sqrt(head size)."""
    softcaps: tuple[float, float] = (0.0, 0.0)
    """Of attention's scores and of logits, where the file does not say."""
    both: bool = False
    """Whether tokens see what follows them too; the file's window counts the tokens on both sides then."""
    qk_norm_whole: bool = False
    """Whether norms of q and k are over all heads together."""
    pre_norms: bool = True
    post_norms: bool = False
    """Whether norms stand before attention and MLP, and behind them."""
    multipliers: bool = False
    """Whether the file may scale embeddings, scores, what layers add, and logits."""
    unturned: int = 0
    """Every so many-th layer has no positions; 0: none."""
    sinks: bool = False
    activation: Literal["silu", "gelu_tanh", "clamped_silu"] = "silu"
    mixture: Router | None = None
    mixture_name: str = ""
    """transformers' name where there are experts, if it has another one then."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Tensors of a layer that are not called as in plain decoders: GGUF's name -> ours."""
    keys: tuple[str, ...] = ()
    """What is understood beside what all files may say."""
    untruncated: bool = False
    """Whether yarn's ramp begins and ends between whole dimensions."""
    rotary: bool = False
    """Whether less than a head may be turned."""
    recurrence: Rule = ""
    """How the file says which layers keep a state in the place of attention."""
    tiled: bool = False
    """Whether neighbouring heads of these have keys of different heads."""
    output_gate: bool = False
    """As `families.Family.output_gate`."""
    ignored: tuple[str, ...] = ()
    """Keys that say nothing where there is text alone."""


_MLP_NORM = {"post_attention_norm": "post_attention_layernorm"}
"""Where the norm before the MLP is called by what stands before it."""
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
    recurrence="delta",
    tiled=True,
    output_gate=True,
    ignored=("rope.dimension_sections",),
)

ARCHITECTURES = {
    "llama": Architecture(
        "LlamaForCausalLM", interleaved=True, mixture=Router(normed=True), mixture_name="MixtralForCausalLM"
    ),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", mixture=Router(shared_gate=True)),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", qk_norm=True, mixture=Router(normed=True)),
    "olmoe": Architecture("OlmoeForCausalLM", qk_norm=True, qk_norm_whole=True, mixture=Router()),
    "gpt-oss": Architecture(
        "GptOssForCausalLM",
        period=2,
        sinks=True,
        activation="clamped_silu",
        mixture=Router(scores="chosen", bias=True),
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
    "qwen35": _QWEN_3_5,
    "seed_oss": Architecture("SeedOssForCausalLM", names=_MLP_NORM),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen3": Architecture("Qwen3ForCausalLM", qk_norm=True),
    "gemma2": Architecture(
        "Gemma2ForCausalLM", gemma=True, names=_GEMMA_NORMS, period=2, by_width=46, softcaps=(50.0, 30.0)
    ),
    "gemma3": _GEMMA_3,
    "gemma-embedding": replace(_GEMMA_3, both=True),
}
"""`general.architecture` -> what it means. Mistral's models call themselves llama."""


def experts(keys: Fields, family: Architecture, layers: int) -> Experts | None:
    """The experts that a file describes; None where it has none."""
    count = keys.integer("expert_count", 0, MAX_EXPERTS, 0)
    router = family.mixture
    if not count:
        if router is not None and not family.mixture_name:
            raise keys.error("expert_count", f"a whole number from 1 to {MAX_EXPERTS}")
        return None
    if router is None:
        raise ModelError(f"{keys.path}: {keys.prefix}expert_count is set, which is not supported")
    ffn = keys.integer("feed_forward_length", 1, 1 << 22, 1)
    shared = keys.integer("expert_shared_feed_forward_length", 0, 1 << 22, ffn) if router.shared_gate else 0
    return checked(
        keys,
        Experts(
            count=count,
            chosen=keys.integer("expert_used_count", 1, count),
            ffn=keys.integer("expert_feed_forward_length", 1, 1 << 22, ffn),
            layers=tuple(range(layers)),
            scores=router.scores,
            normed=keys.flag("expert_weights_norm", router.normed),
            scale=keys.number_or_zero("expert_weights_scale", 1e-6, 1e6, 1.0) or 1.0,
            bias=router.bias,
            shared=shared,
            shared_gate=shared > 0,
        ),
    )
