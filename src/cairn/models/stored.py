"""How safetensors files of a family name and fuse tensors where that is not `expected_tensors`' way.

A stored tensor becomes one or several of ours, as views: nothing is copied but where an order has to change.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cairn.models import stored_recurrent
from cairn.types import ModelSpec

Tensor = tuple[str, NDArray[Any]]

_LAYER = re.compile(r"(model\.layers\.(\d{1,5})\.)(.+)")
_MIXTRAL = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_OSS = re.compile(r"mlp\.experts\.(gate_up_proj|down_proj)(_bias|_blocks|_scales)?")
_OSS_ENDS = {None: "weight", "_bias": "bias", "_blocks": "weight.blocks", "_scales": "weight.scales"}


def own_tensors(spec: ModelSpec, ahead: int, name: str, array: NDArray[Any]) -> Iterator[Tensor]:
    """A stored tensor as those of `expected_tensors`; one with the name "" where it is set aside.

    `ahead`: how many layers behind the last guess further tokens.
    """
    match = _LAYER.fullmatch(name)
    if match is None:
        yield _OTHERS.get(spec.architecture, {}).get(name, name), array
        return
    prefix, layer, rest = match.groups()
    if spec.layers <= int(layer) < spec.layers + ahead:
        yield "", array
        return
    states = spec.recurrence
    for one, whole in [(rest, array)] if states is None else stored_recurrent.own(states, rest, array):
        for own, part in _RULES.get(spec.architecture, _as_it_is)(one, whole):
            # A shared expert is the MLP of a model without others.
            named = own.replace("shared.", "mlp.shared_expert." if spec.experts else "mlp.", 1)
            yield prefix + (named if own.startswith("shared.") else own), part


def _as_it_is(rest: str, array: NDArray[Any]) -> Iterator[Tensor]:
    yield rest, array


def _mixtral(rest: str, array: NDArray[Any]) -> Iterator[Tensor]:
    match = re.fullmatch(r"block_sparse_moe\.(gate|experts\.\d+\.(w[123]))\.weight", rest)
    if match is None:
        yield rest, array
    elif match[2] is None:
        yield "mlp.gate.weight", array
    else:
        yield f"mlp.{match[1].removesuffix(match[2])}{_MIXTRAL[match[2]]}.weight", array


def _glm(rest: str, array: NDArray[Any]) -> Iterator[Tensor]:
    yield rest.replace("mlp.shared_experts.", "mlp.shared_expert."), array


def _oss(rest: str, array: NDArray[Any]) -> Iterator[Tensor]:
    """Experts in one tensor, gates and what they let through as neighbours: [E, in, out] of plain numbers, or of MXFP4
    [E, out, ...]."""
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


def _fused(rest: str, array: NDArray[Any]) -> Iterator[Tensor]:
    """Experts that may be in one tensor [E, out, in], gates above what they let through."""
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


_LFM_NAMES = {
    "operator_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "self_attn.out_proj.weight": "self_attn.o_proj.weight",
    "self_attn.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attn.k_layernorm.weight": "self_attn.k_norm.weight",
    "feed_forward.expert_bias": "mlp.gate.e_score_correction_bias",
}


def _lfm(rest: str, array: NDArray[Any]) -> Iterator[Tensor]:
    match = re.fullmatch(r"feed_forward\.(gate|(?:experts\.\d+\.)?(w[123]))\.weight", rest)
    if match is None:
        yield _LFM_NAMES.get(rest, rest), array
    elif match[2] is None:
        yield "mlp.gate.weight", array
    else:
        yield f"mlp.{match[1].removesuffix(match[2])}{_MIXTRAL[match[2]]}.weight", array


def _granite(rest: str, array: NDArray[Any]) -> Iterator[Tensor]:
    """The shared expert, which is the MLP of a model without others, and those in one tensor."""
    part, _, name = rest.partition(".")
    if part == "shared_mlp" and name in ("input_linear.weight", "output_linear.weight"):
        if name == "output_linear.weight":
            yield "shared.down_proj.weight", array
        else:
            half = len(array) // 2
            yield "shared.gate_proj.weight", array[:half]
            yield "shared.up_proj.weight", array[half:]
    elif part == "block_sparse_moe":
        yield from _fused(_GRANITE_NAMES.get(name, rest), array)
    else:
        yield rest, array


_GRANITE_NAMES = {
    "router.layer.weight": "mlp.gate.weight",
    "input_linear.weight": "mlp.experts.gate_up_proj",
    "output_linear.weight": "mlp.experts.down_proj",
}
_OTHERS = {
    name: {"model.embedding_norm.weight": "model.norm.weight"} for name in ("Lfm2ForCausalLM", "Lfm2MoeForCausalLM")
}
"""Tensors beside the layers that have another name."""

_RULES: dict[str, Callable[[str, NDArray[Any]], Iterator[Tensor]]] = {
    "MixtralForCausalLM": _mixtral,
    "Glm4MoeForCausalLM": _glm,
    "GptOssForCausalLM": _oss,
    "Qwen3_5MoeForCausalLM": _fused,
    "Qwen3_5MoeForConditionalGeneration": _fused,
    "Qwen3NextForCausalLM": _fused,
    "Lfm2ForCausalLM": _lfm,
    "Lfm2MoeForCausalLM": _lfm,
    "GraniteMoeHybridForCausalLM": _granite,
}
