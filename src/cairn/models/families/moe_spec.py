"""Mixtures of experts in configs: which layers have one, how the router chooses, and the tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from cairn.models.families.family import Family
from cairn.models.files import Fields
from cairn.types.errors import ModelError
from cairn.types.model_spec import Experts, ModelSpec

MAX_EXPERTS = 1 << 12
ROUTER = "mlp.gate.weight"
SHARED_GATE = "mlp.shared_expert_gate.weight"
CORRECTION = "mlp.gate.e_score_correction_bias"
ROUTER_SCALE, SHARE_SCALE = "mlp.gate.scale", "mlp.gate.per_expert_scale"
"""Tensors of experts beside the MLP: scale of the router's input, and of each expert's output."""
BESIDE_NORM, MLP_POST_NORM, BESIDE_POST_NORM = (
    f"{one}.weight"
    for one in ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2")
)


@dataclass(frozen=True, slots=True)
class MixtureFields:
    """Config fields of one family's mixtures; an empty name means the family has no such field."""

    count: str
    ffn: str
    chosen: str = "num_experts_per_tok"
    scores: Literal["softmax", "sigmoid", "chosen"] = "softmax"
    normed: bool | str = "norm_topk_prob"
    by_layer: bool = False
    """Whether `decoder_sparse_step` and `mlp_only_layers` select the layers."""
    first: str = ""
    """Field with the number of dense layers at the beginning."""
    scaled: bool = False
    """Whether `routed_scaling_factor` is read."""
    grouped: bool = False
    """Whether `n_group` and `topk_group` are read."""
    typed: bool = False
    """Whether `mlp_layer_types` may select the layers."""
    known: tuple[tuple[str, str | int | bool], ...] = ()
    """Fields that may have only this value."""
    listed: bool = False
    """Whether the list of layer kinds selects the layers; there may be none."""
    gated: bool = True
    correction: bool | str = False
    optional: bool = False
    """Whether there may be no experts, so that the shared one is the MLP."""
    bias: bool = False
    shared: str = ""
    """Field with the width of the shared expert."""
    shared_count: str = ""
    """Field with the shared expert's width as a multiple of the others'."""
    shared_gate: bool = False
    weighs_input: bool = False
    listed_by: str = ""
    """Field that lists the layers; by default every `interleave_moe_layer_step`-th has experts."""
    beside: str = ""
    """Field that states whether there are experts beside the MLP."""


_EVERY_LAYER = (("moe_layer_freq", 1),)

MIXTURES = {
    "qwen3": MixtureFields(count="num_experts", ffn="moe_intermediate_size", by_layer=True),
    "qwen2": MixtureFields(
        count="num_experts",
        ffn="moe_intermediate_size",
        by_layer=True,
        shared="shared_expert_intermediate_size",
        shared_gate=True,
    ),
    "mixtral": MixtureFields(count="num_local_experts", ffn="intermediate_size", normed=True),
    "olmo": MixtureFields(count="num_experts", ffn="intermediate_size"),
    "gpt-oss": MixtureFields(
        count="num_local_experts", ffn="intermediate_size", scores="chosen", normed=False, bias=True
    ),
    "qwen3.5": MixtureFields(
        count="num_experts",
        ffn="moe_intermediate_size",
        normed=True,
        shared="shared_expert_intermediate_size",
        shared_gate=True,
    ),
    "lfm2": MixtureFields(
        count="num_experts",
        ffn="moe_intermediate_size",
        scores="sigmoid",
        first="num_dense_layers",
        scaled=True,
        correction="use_expert_bias",
    ),
    "nemotron": MixtureFields(
        count="n_routed_experts",
        ffn="moe_intermediate_size",
        scores="sigmoid",
        scaled=True,
        grouped=True,
        correction=True,
        shared="moe_shared_expert_intermediate_size",
        listed=True,
        gated=False,
        known=(("moe_latent_size", 0), ("mlp_hidden_act", "relu2"), ("n_shared_experts", 1)),
    ),
    "granite": MixtureFields(
        count="num_local_experts",
        ffn="intermediate_size",
        scores="chosen",
        normed=False,
        shared="shared_intermediate_size",
        optional=True,
    ),
    "glm4": MixtureFields(
        count="n_routed_experts",
        ffn="moe_intermediate_size",
        scores="sigmoid",
        first="first_k_dense_replace",
        scaled=True,
        grouped=True,
        correction=True,
        shared_count="n_shared_experts",
    ),
    "llama4": MixtureFields(
        count="num_local_experts",
        ffn="intermediate_size",
        scores="sigmoid",
        normed=False,
        weighs_input=True,
        listed_by="moe_layers",
        shared="intermediate_size",
        known=(("num_experts_per_tok", 1),),
    ),
    "gemma4": MixtureFields(
        count="num_experts",
        ffn="moe_intermediate_size",
        chosen="top_k_experts",
        normed=True,
        beside="enable_moe_block",
    ),
    "deepseek2": MixtureFields(
        count="n_routed_experts",
        ffn="moe_intermediate_size",
        first="first_k_dense_replace",
        scaled=True,
        shared_count="n_shared_experts",
        known=(*_EVERY_LAYER, ("topk_method", "greedy"), ("scoring_func", "softmax"), ("norm_topk_prob", False)),
    ),
}
MIXTURES["deepseek3"] = replace(
    MIXTURES["glm4"], known=(*_EVERY_LAYER, ("topk_method", "noaux_tc"), ("scoring_func", "sigmoid"))
)
MIXTURES["mistral4"] = replace(MIXTURES["glm4"], scores="softmax", correction=False)
MIXTURES["glm4 lite"] = replace(MIXTURES["deepseek3"], typed=True)
_OTHER_NAMES = {"num_experts": "num_local_experts", "num_local_experts": "num_experts"}
"""Names of fields in newer configs."""


def mixture(config: Fields, family: Family, layers: int) -> Experts | None:
    """Return the experts that a config describes; None for a family without."""
    if not family.mixture:
        return None
    row = MIXTURES[family.mixture]
    for name, value in row.known:
        if config.has(name) and config.values[name] != value:
            raise ModelError(f"{config.path}: {config.prefix}{name} other than {value} is not supported")
    if (row.listed and "moe" not in layer_kinds(config, layers)) or (row.beside and not config.flag(row.beside, False)):
        return None
    named = row.count if config.has(row.count) else _OTHER_NAMES.get(row.count, row.count)
    count = config.integer(named, 0 if row.optional else 1, MAX_EXPERTS)
    if not count:
        return None
    sparse = tuple(_layers(config, row, layers))
    config.check_by_layer("experts", named, count, "num_hidden_layers", len(sparse))
    ffn = config.integer(row.ffn, 1, 1 << 22)
    shared = config.integer(row.shared, 0, 1 << 22) if row.shared else 0
    if row.shared_count:
        shared = ffn * config.integer(row.shared_count, 0, 1 << 10, 1)
    return checked(
        config,
        Experts(
            count=count,
            chosen=config.integer(row.chosen, 1, count, 1 if row.weighs_input else None),
            ffn=ffn,
            layers=sparse,
            gated=row.gated,
            scores=row.scores,
            normed=config.flag(row.normed, False) if isinstance(row.normed, str) else row.normed,
            scale=config.number("routed_scaling_factor", 1e-6, 1e6, 1.0) if row.scaled else 1.0,
            groups=config.integer("n_group", 1, count, 1) if row.grouped else 1,
            chosen_groups=config.integer("topk_group", 1, count, 1) if row.grouped else 1,
            correction=config.flag(row.correction, True) if isinstance(row.correction, str) else row.correction,
            bias=row.bias,
            shared=shared,
            shared_gate=row.shared_gate and shared > 0,
            weighs_input=row.weighs_input,
            beside=bool(row.beside),
        ),
    )


MAX_LAYERS = 1 << 12


def layer_count(config: Fields, family: Family) -> int:
    """Return the number of layers: the length of the list of layer kinds, if there is one."""
    if family.alone and family.mixture:
        listed = config.values.get(_kinds_key(config))
        if isinstance(listed, list | str) and 1 <= len(listed) <= MAX_LAYERS:
            return len(listed)
    return config.integer("num_hidden_layers", 1, MAX_LAYERS)


def _kinds_key(config: Fields) -> str:
    """Return the name of the field that lists each layer's kind."""
    return next((name for name in ("layers_block_type", "layer_types") if config.has(name)), "hybrid_override_pattern")


_PATTERN = {"M": "mamba", "-": "mlp", "*": "attention", "E": "moe"}
_KINDS = {"linear_attention": "mamba", "full_attention": "attention"}
"""Other names of layer kinds."""


def layer_kinds(config: Fields, layers: int) -> list[str]:
    """Return each layer's kind, in models whose layers have one part: mamba, attention, mlp or moe."""
    key = _kinds_key(config)
    listed = config.values.get(key)
    kinds = [_PATTERN.get(one) for one in listed] if isinstance(listed, str) else listed
    if isinstance(kinds, list):
        kinds = [_KINDS.get(one, one) if isinstance(one, str) else None for one in kinds]
    if not isinstance(kinds, list) or len(kinds) != layers or any(one not in _PATTERN.values() for one in kinds):
        raise config.error(key, f"the kinds of {layers} layers, each mamba, attention, mlp or moe")
    return kinds


def checked(config: Fields, experts: Experts) -> Experts:
    """Return the experts; raise `ModelError` if their groups are impossible."""
    if experts.count % experts.groups or experts.chosen_groups > experts.groups:
        raise ModelError(
            f"{config.path}: {experts.count} experts cannot be divided into {experts.groups} groups to "
            f"choose {experts.chosen_groups} from"
        )
    if experts.chosen > experts.count // experts.groups * experts.chosen_groups:
        raise ModelError(f"{config.path}: {experts.chosen} chosen experts are more than the chosen groups have")
    return experts


def _layers(config: Fields, row: MixtureFields, layers: int) -> list[int]:
    if row.typed and config.has("mlp_layer_types"):
        kinds = config.values["mlp_layer_types"]
        if not isinstance(kinds, list) or len(kinds) != layers or any(one not in ("dense", "sparse") for one in kinds):
            raise config.error("mlp_layer_types", f"a list of {layers} entries, each dense or sparse")
        return [layer for layer, kind in enumerate(kinds) if kind == "sparse"]
    if row.listed:
        return [layer for layer, kind in enumerate(layer_kinds(config, layers)) if kind == "moe"]
    if row.listed_by:
        return _by_list(config, row.listed_by, layers)
    if row.first:
        return list(range(config.integer(row.first, 0, layers, 0), layers))
    if not row.by_layer:
        return list(range(layers))
    step = config.integer("decoder_sparse_step", 1, 1 << 12, 1)
    dense = config.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(one) is not int for one in dense):
        raise config.error("mlp_only_layers", "a list of whole numbers")
    known = frozenset(dense)
    return [layer for layer in range(layers) if layer not in known and (layer + 1) % step == 0]


def _by_list(config: Fields, name: str, layers: int) -> list[int]:
    step = config.integer("interleave_moe_layer_step", 1, 1 << 12, 1)
    listed = config.values.get(name) if config.has(name) else list(range(step - 1, layers, step))
    if not isinstance(listed, list) or any(type(one) is not int or not 0 <= one < layers for one in listed):
        raise config.error(name, f"a list of layers below {layers}")
    return sorted(set(listed))


def mixture_tensors(spec: ModelSpec, experts: Experts) -> dict[str, tuple[int, ...]]:
    """Return name (below the layer) and shape of a mixture's tensors."""
    found: dict[str, tuple[int, ...]] = {ROUTER: (experts.count, spec.hidden)}
    if experts.bias:
        found["mlp.gate.bias"] = (experts.count,)
    if experts.correction:
        found[CORRECTION] = (experts.count,)
    every = [(f"mlp.experts.{number}", experts.ffn, experts.bias) for number in range(experts.count)]
    if experts.shared:
        every.append(("mlp.shared_expert", experts.shared, False))
    for prefix, width, bias in every:
        parts = [("up_proj", width, spec.hidden), ("down_proj", spec.hidden, width)]
        for name, out, inner in [("gate_proj", width, spec.hidden), *parts] if experts.gated else parts:
            found[f"{prefix}.{name}.weight"] = (out, inner)
            if bias:
                found[f"{prefix}.{name}.bias"] = (out,)
    if experts.shared_gate:
        found[SHARED_GATE] = (1, spec.hidden)
    if experts.beside:
        found |= {ROUTER_SCALE: (spec.hidden,), SHARE_SCALE: (experts.count,)}
        found |= dict.fromkeys((BESIDE_NORM, MLP_POST_NORM, BESIDE_POST_NORM), (spec.hidden,))
    return found


def is_router(name: str) -> bool:
    """Return whether a tensor routes tokens; rounding it would send them to other experts."""
    return name.endswith((f".{ROUTER}", f".{SHARED_GATE}"))
