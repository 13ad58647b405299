"""Names and fused tensors of families whose safetensors differ from `expected_tensors`.

A stored tensor becomes one or several of ours, as views: data is copied only to change its order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cairn.kernels.elementary import exp
from cairn.models.families.families import without_part
from cairn.models.families.latent_spec import KEYS, VALUES
from cairn.models.families.recurrent_spec import MIXER
from cairn.types.model_spec import ModelSpec, Recurrence

_PREFIXES = {"delta": "linear_attn.", "mamba2": "mamba.", "conv": "conv."}


def _recurrent_tensors(facts: Recurrence, rest: str, array: NDArray[Any]) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield a layer's stored tensor (without the layer's prefix) under our names; others unchanged."""
    prefix = _PREFIXES[facts.kind]
    if not rest.startswith(prefix):
        yield rest, array
        return
    name = MIXER + rest.removeprefix(prefix).replace("conv1d.", "conv.")
    if name == f"{MIXER}A_log":
        yield f"{MIXER}decay", -exp(array.astype(np.float32))
    elif name == f"{MIXER}conv.weight" and array.ndim == 3:  # [C, 1, reach]
        yield name, np.ascontiguousarray(array[:, 0].T).reshape(-1)
    elif name == f"{MIXER}in_proj_qkvz.weight":
        yield from _split(facts, array)
    elif name == f"{MIXER}in_proj_ba.weight":
        for number, rows in enumerate(_by_keys(facts, (facts.heads, facts.heads))):
            yield f"{MIXER}in_proj_{'ba'[number]}.weight", array[rows]
    else:
        yield name, array


def _split(facts: Recurrence, array: NDArray[Any]) -> Iterator[tuple[str, NDArray[Any]]]:
    """Split queries, keys, values and gates, which are stored together for each key head."""
    keys = facts.key_heads * facts.key_size
    query, key, value, gate = _by_keys(facts, (keys, keys, facts.inner, facts.inner))
    yield f"{MIXER}in_proj_qkv.weight", array[np.concatenate([query, key, value])]
    yield f"{MIXER}in_proj_z.weight", array[gate]


def _by_keys(facts: Recurrence, sizes: tuple[int, ...]) -> list[NDArray[np.intp]]:
    """Return the rows of each of several parts that are interleaved by key head."""
    order = np.arange(sum(sizes)).reshape(facts.key_heads, -1)
    ends = np.cumsum([size // facts.key_heads for size in sizes])
    return [part.reshape(-1) for part in np.split(order, ends[:-1], axis=1)]


Tensor = tuple[str, NDArray[Any]]

_LAYER = re.compile(r"(?:model|backbone|gpt_neox)\.layers\.(\d{1,5})\.(.+)")
_MIXTRAL = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_OSS = re.compile(r"mlp\.experts\.(gate_up_proj|down_proj)(_bias|_blocks|_scales)?")
_OSS_ENDS = {None: "weight", "_bias": "bias", "_blocks": "weight.blocks", "_scales": "weight.scales"}


_UNREAD = re.compile(r"self_attn\.(k_proj|v_proj|k_norm|v_norm)\.\w+")
"""Tensors that some files have for layers that share an earlier layer's KV; they are ignored."""


def own_tensors(spec: ModelSpec, ahead: int, name: str, array: NDArray[Any]) -> Iterator[Tensor]:
    """Yield a stored tensor as those of `expected_tensors`; the name is "" if it is ignored.

    `ahead`: most multi-token-prediction layers after the last layer.
    """
    match = _LAYER.fullmatch(name)
    if match is None:
        yield _OTHERS.get(spec.architecture, {}).get(name, name), array
        return
    layer, rest = match.groups()
    prefix = f"model.layers.{layer}."
    if spec.layers <= int(layer) < spec.layers + ahead:
        yield "", array
        return
    behind = spec.uneven is not None and spec.kv_layer(int(layer)) != int(layer)
    if behind and _UNREAD.fullmatch(rest):
        yield "", array
        return
    if spec.architecture in ("NemotronHForCausalLM", "Mamba2ForCausalLM"):
        rest = _nemotron(spec, int(layer), rest)
    states = spec.recurrence
    for one, whole in [(rest, array)] if states is None else _recurrent_tensors(states, rest, array):
        for own, part in _RULES.get(without_part(spec.architecture), _as_it_is)(one, whole, spec):
            # In a model without experts, the "shared" one is the MLP.
            named = own.replace("shared.", "mlp.shared_expert." if spec.experts else "mlp.", 1)
            yield prefix + (named if own.startswith("shared.") else own) if own else "", part


def _as_it_is(rest: str, array: NDArray[Any], spec: ModelSpec) -> Iterator[Tensor]:
    yield rest, array


def _mixtral(rest: str, array: NDArray[Any], spec: ModelSpec) -> Iterator[Tensor]:
    match = re.fullmatch(r"block_sparse_moe\.(gate|experts\.\d+\.(w[123]))\.weight", rest)
    if match is None:
        yield rest, array
    elif match[2] is None:
        yield "mlp.gate.weight", array
    else:
        yield f"mlp.{match[1].removesuffix(match[2])}{_MIXTRAL[match[2]]}.weight", array


def _glm(rest: str, array: NDArray[Any], spec: ModelSpec) -> Iterator[Tensor]:
    yield rest.replace("mlp.shared_experts.", "mlp.shared_expert."), array


def _oss(rest: str, array: NDArray[Any], spec: ModelSpec) -> Iterator[Tensor]:
    """Split experts in one tensor, gate and up rows interleaved: [E, in, out] plain, or [E, out, ...] in MXFP4."""
    match = _OSS.fullmatch(rest)
    if match is None:
        yield rest.replace("mlp.router.", "mlp.gate."), array
        return
    end = _OSS_ENDS[match[2]]
    turned = array if match[2] or array.ndim != 3 else array.swapaxes(1, 2)
    for number, one in enumerate(turned):
        at = f"mlp.experts.{number}."
        if match[1] == "down_proj":
            yield f"{at}down_proj.{end}", np.asarray(one)
        else:
            yield f"{at}gate_proj.{end}", one[0::2]
            yield f"{at}up_proj.{end}", one[1::2]


_LLAMA_4 = {"feed_forward.router.": "mlp.gate.", "feed_forward.": "mlp."}


def _llama(rest: str, array: NDArray[Any], spec: ModelSpec) -> Iterator[Tensor]:
    """Split experts in one tensor [E, in, out], gates before up; reorder heads with interleaved rotary pairs."""
    for theirs, ours in _LLAMA_4.items():
        rest = rest.replace(theirs, ours, 1)
    if re.fullmatch(r"self_attn\.[qk]_proj\.(weight|bias)", rest) and array.ndim <= 2:
        yield rest, unpermute(array, spec.head_dim)
    elif rest in ("mlp.experts.gate_up_proj", "mlp.experts.down_proj") and array.ndim == 3:
        yield from _fused(rest, array.swapaxes(1, 2), spec)
    else:
        yield rest, array


def unpermute(rows: NDArray[Any], head_dim: int, turned: int | None = None) -> NDArray[Any]:
    """Reorder q or k rows from interleaved rotary pairs (0, D/2, 1, D/2 + 1, ...) to natural order.

    `turned`: rotary numbers of a head if not all; the others keep their places.
    """
    if turned not in (None, head_dim):
        parts = rows.reshape(-1, head_dim, *rows.shape[1:])
        pairs = unpermute(parts[:, :turned].reshape(-1, *rows.shape[1:]), turned)
        whole = np.concatenate([pairs.reshape(-1, turned, *rows.shape[1:]), parts[:, turned:]], axis=1)
        return whole.reshape(rows.shape)
    heads = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(rows.shape)


def permute(rows: NDArray[Any], head_dim: int) -> NDArray[Any]:
    """Invert `unpermute`."""
    heads = rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(rows.shape)


def _fused(rest: str, array: NDArray[Any], spec: ModelSpec) -> Iterator[Tensor]:
    """Split experts that may be in one tensor [E, out, in], gates above up."""
    match = re.fullmatch(r"mlp\.experts\.(gate_up_proj|down_proj)", rest)
    if match is None or array.ndim != 3:
        yield rest, array
        return
    for number, one in enumerate(array):
        at = f"mlp.experts.{number}."
        if match[1] == "down_proj":
            yield f"{at}down_proj.weight", one
        else:
            half = len(one) // 2
            yield f"{at}gate_proj.weight", one[:half]
            yield f"{at}up_proj.weight", one[half:]


def _gemma(rest: str, array: NDArray[Any], spec: ModelSpec) -> Iterator[Tensor]:
    """Rename experts beside the MLP, which are named beside it too."""
    place, _, name = rest.partition(".")
    if place == "experts":
        yield from _fused(f"mlp.{rest}", array, spec)
    elif place == "router":
        yield f"mlp.gate.{'weight' if name == 'proj.weight' else name}", array
    else:
        yield rest, array


_LFM_NAMES = {
    "operator_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "self_attn.out_proj.weight": "self_attn.o_proj.weight",
    "self_attn.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attn.k_layernorm.weight": "self_attn.k_norm.weight",
    "feed_forward.expert_bias": "mlp.gate.e_score_correction_bias",
}


def _lfm(rest: str, array: NDArray[Any], spec: ModelSpec) -> Iterator[Tensor]:
    match = re.fullmatch(r"feed_forward\.(gate|(?:experts\.\d+\.)?(w[123]))\.weight", rest)
    if match is None:
        yield _LFM_NAMES.get(rest, rest), array
    elif match[2] is None:
        yield "mlp.gate.weight", array
    else:
        yield f"mlp.{match[1].removesuffix(match[2])}{_MIXTRAL[match[2]]}.weight", array


def _granite(rest: str, array: NDArray[Any], spec: ModelSpec) -> Iterator[Tensor]:
    """Split the shared expert (the MLP of a model without others) and fused experts."""
    part, _, name = rest.partition(".")
    if part == "shared_mlp" and name in ("input_linear.weight", "output_linear.weight"):
        if name == "output_linear.weight":
            yield "shared.down_proj.weight", array
        else:
            half = len(array) // 2
            yield "shared.gate_proj.weight", array[:half]
            yield "shared.up_proj.weight", array[half:]
    elif part == "block_sparse_moe":
        yield from _fused(_GRANITE_NAMES.get(name, rest), array, spec)
    else:
        yield rest, array


def _nemotron(spec: ModelSpec, layer: int, rest: str) -> str:
    """Return a layer tensor's name in a model whose layers have one part each, all named mixer."""
    if rest == "norm.weight":
        return "input_layernorm.weight"
    if spec.keeps_state(layer):
        return rest.replace("mixer.", "mamba.", 1)
    own = "self_attn." if spec.attends(layer) else "mlp."
    return rest.replace("mixer.shared_experts.", "mlp.shared_expert.", 1).replace("mixer.", own, 1)


_GRANITE_NAMES = {
    "router.layer.weight": "mlp.gate.weight",
    "input_linear.weight": "mlp.experts.gate_up_proj",
    "output_linear.weight": "mlp.experts.down_proj",
}
_LFM_NORM = {"model.embedding_norm.weight": "model.norm.weight"}
_BACKBONE = {
    **{f"{before}.embeddings.weight": "model.embed_tokens.weight" for before in ("model", "backbone")},
    **{f"{before}.norm_f.weight": "model.norm.weight" for before in ("model", "backbone")},
}
_NEOX = {
    "gpt_neox.embed_in.weight": "model.embed_tokens.weight",
    "embed_out.weight": "lm_head.weight",
    **{f"gpt_neox.final_layer_norm.{end}": f"model.norm.{end}" for end in ("weight", "bias")},
}
_OTHERS = {
    "PhiForCausalLM": {f"model.final_layernorm.{end}": f"model.norm.{end}" for end in ("weight", "bias")},
    "GPTNeoXForCausalLM": _NEOX,
    "Lfm2ForCausalLM": _LFM_NORM,
    "Lfm2MoeForCausalLM": _LFM_NORM,
    "NemotronHForCausalLM": _BACKBONE,
    "Mamba2ForCausalLM": _BACKBONE,
}
"""Tensors outside the layers with other names."""


XIELU = "mlp.act_fn"
"""Prefix of a layer's activation parameters."""
_APERTUS = {"attention_layernorm": "input_layernorm", "feedforward_layernorm": "post_attention_layernorm"}
_XIELU_CONSTANTS = {f"{XIELU}.beta": 0.5, f"{XIELU}.eps": -1e-6}


def _apertus(rest: str, array: NDArray[Any], spec: ModelSpec) -> Iterator[Tensor]:
    if rest in _XIELU_CONSTANTS and array.size == 1:
        # The kernels' own constants are ignored; other values are not supported.
        known = np.isclose(float(array.reshape(-1)[0]), _XIELU_CONSTANTS[rest], rtol=1e-2)
        yield ("" if known else rest), array
        return
    before, dot, end = rest.partition(".")
    yield _APERTUS.get(before, before) + dot + end, array


def _hunyuan(rest: str, array: NDArray[Any], spec: ModelSpec) -> Iterator[Tensor]:
    yield rest.replace(".query_layernorm.", ".q_norm.").replace(".key_layernorm.", ".k_norm."), array


def _deepseek(rest: str, array: NDArray[Any], spec: ModelSpec) -> Iterator[Tensor]:
    """Split the matrix [Q (plain + value), rank] that makes keys and values of latents."""
    latent = spec.latent
    assert latent is not None
    shape = (spec.heads, latent.plain + latent.value, latent.rank)
    if rest != "self_attn.kv_b_proj.weight" or array.shape != (shape[0] * shape[1], shape[2]):
        for own, part in _fused(rest, array, spec):
            yield from _glm(own, part, spec)
        return
    for head, one in enumerate(array.reshape(shape)):
        # Transposed, because queries are multiplied with the key matrix.
        yield f"{KEYS}.{head}.weight", one[: latent.plain].T
        yield f"{VALUES}.{head}.weight", one[latent.plain :]


def _phi(rest: str, array: NDArray[Any], spec: ModelSpec) -> Iterator[Tensor]:
    """Split the fused qkv and gate_up matrices."""
    kv = spec.kv_heads * spec.head_dim
    fused = {
        "self_attn.qkv_proj.weight": [("q", spec.heads * spec.head_dim), ("k", kv), ("v", kv)],
        "mlp.gate_up_proj.weight": [("gate", spec.ffn), ("up", spec.ffn)],
    }
    if rest not in fused or len(array) != sum(rows for _, rows in fused[rest]):
        yield rest, array
        return
    place, at = rest.partition(".")[0], 0
    for name, rows in fused[rest]:
        yield f"{place}.{name}_proj.weight", array[at : at + rows]
        at += rows


def _renamed(modules: dict[str, str]) -> Callable[[str, NDArray[Any], ModelSpec], Iterator[Tensor]]:
    """Return a rule that renames modules of a layer."""

    def rule(rest: str, array: NDArray[Any], spec: ModelSpec) -> Iterator[Tensor]:
        module, dot, end = rest.rpartition(".")
        yield modules.get(module, module) + dot + end, array

    return rule


def _stable(rest: str, array: NDArray[Any], spec: ModelSpec) -> Iterator[Tensor]:
    """Rename the norms of single heads."""
    yield re.sub(r"self_attn\.([qk])_layernorm\.norms\.", r"self_attn.\1_norm.", rest), array


_NEOX_MODULES = {
    "attention.dense": "self_attn.o_proj",
    "mlp.dense_h_to_4h": "mlp.up_proj",
    "mlp.dense_4h_to_h": "mlp.down_proj",
}


def _neox(rest: str, array: NDArray[Any], spec: ModelSpec) -> Iterator[Tensor]:
    """Split the matrix that has each head's query, key and value together."""
    module, dot, end = rest.rpartition(".")
    if module != "attention.query_key_value" or len(array) != 3 * spec.heads * spec.head_dim:
        yield _NEOX_MODULES.get(module, module) + dot + end, array
        return
    heads = array.reshape(spec.heads, 3, spec.head_dim, *array.shape[1:])
    for number, part in enumerate("qkv"):
        yield f"self_attn.{part}_proj.{end}", heads[:, number].reshape(-1, *array.shape[1:])


def _cohere(rest: str, array: NDArray[Any], spec: ModelSpec) -> Iterator[Tensor]:
    """Reorder heads, whose rotary pairs are neighbours; norms of heads are stored as [heads, D]."""
    if re.fullmatch(r"self_attn\.[qk]_proj\.(weight|bias)", rest) and len(array) % spec.head_dim == 0:
        yield rest, unpermute(array, spec.head_dim)
    elif re.fullmatch(r"self_attn\.[qk]_norm\.weight", rest) and array.ndim == 2 and array.shape[1] == spec.head_dim:
        yield rest, unpermute(array.reshape(-1), spec.head_dim)
    else:
        yield rest, array


_GLM_NORMS = {
    "post_self_attn_layernorm.weight": "post_attention_layernorm.weight",
    "post_attention_layernorm.weight": "pre_feedforward_layernorm.weight",
    "post_mlp_layernorm.weight": "post_feedforward_layernorm.weight",
}


def _glm_dense(rest: str, array: NDArray[Any], spec: ModelSpec) -> Iterator[Tensor]:
    """Reorder the rotary part of heads, whose pairs are interleaved, and split gate_up."""
    if re.fullmatch(r"self_attn\.[qk]_proj\.(weight|bias)", rest) and len(array) % spec.head_dim == 0:
        yield rest, unpermute(array, spec.head_dim, spec.turned)
    else:
        yield from _phi(_GLM_NORMS.get(rest, rest), array, spec)


_RULES: dict[str, Callable[[str, NDArray[Any], ModelSpec], Iterator[Tensor]]] = {
    "MixtralForCausalLM": _mixtral,
    "Glm4MoeForCausalLM": _glm,
    "Glm4ForCausalLM": _glm_dense,
    "GptOssForCausalLM": _oss,
    "HunYuanDenseV1ForCausalLM": _hunyuan,
    "ApertusForCausalLM": _apertus,
    "Phi3ForCausalLM": _phi,
    "PhiForCausalLM": _renamed(
        {
            **{"self_attn.dense": "self_attn.o_proj", "mlp.fc1": "mlp.up_proj", "mlp.fc2": "mlp.down_proj"},
            **{f"self_attn.{one}_layernorm": f"self_attn.{one}_norm" for one in "qk"},
        }
    ),
    "Starcoder2ForCausalLM": _renamed({"mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj"}),
    "StableLmForCausalLM": _stable,
    "GPTNeoXForCausalLM": _neox,
    **dict.fromkeys(("CohereForCausalLM", "Cohere2ForCausalLM"), _cohere),
    **dict.fromkeys(
        ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM", "Mistral4ForCausalLM"), _deepseek
    ),
    "Qwen3_5MoeForCausalLM": _fused,
    "Qwen3_5MoeForConditionalGeneration": _fused,
    "Qwen3NextForCausalLM": _fused,
    **dict.fromkeys(("Llama4ForCausalLM", "Llama4ForConditionalGeneration"), _llama),
    "Gemma4ForCausalLM": _gemma,
    "Gemma4ForConditionalGeneration": _gemma,
    "Lfm2ForCausalLM": _lfm,
    "Lfm2MoeForCausalLM": _lfm,
    "GraniteMoeHybridForCausalLM": _granite,
}
