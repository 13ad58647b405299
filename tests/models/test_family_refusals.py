"""Config fields of later families that would change a number and are unsupported: refused by name, before loading."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cairn.models.safetensors.weights import open_weights
from cairn.models.spec.config import load_spec
from cairn.types.errors import ModelError
from tests.gguf_files import write_gguf
from tests.tiny_models import MODELS, write_config, write_model

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "widths by layer": ("gemma 3n", {"intermediate_size": [80] * 5 + [96]}, "intermediate_size that differs by layer"),
    "a share of gates for too few": ("gemma 3n", {"activation_sparsity_pattern": [0.5]}, "a list of 6 numbers"),
    "no gate at all": ("gemma 3n", {"activation_sparsity_pattern": [1.0] * 6}, "from 0 to less than 1"),
    "a stream that is not there": ("gemma 3n", {"altup_active_idx": 3}, "altup_active_idx"),
    "scaled positions": ("gemma 3n", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling is set"),
    "two experts a token": ("llama 4", {"num_experts_per_tok": 2}, "num_experts_per_tok other than 1"),
    "an unknown kind of layer": ("llama 4", {"layer_types": ["sliding_attention"] * 4}, "or chunked_attention"),
    "experts of a layer that is not there": ("llama 4", {"moe_layers": [4]}, "moe_layers must be a list of layers"),
    "heads that make no width": ("mamba 2", {"num_heads": 5}, "are not expand"),
    "a convolution that sees too far": ("mamba 2", {"conv_kernel": 17}, "conv_kernel"),
    "half of the turned part": (
        "mistral 4",
        {"rope_parameters": {**MODELS["mistral 4"]["rope_parameters"], "partial_rotary_factor": 0.5}},
        "partial_rotary_factor other than 1",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_fields_that_would_change_a_number_are_refused_by_name(name: str, tmp_path: Path) -> None:
    model, fields, message = REFUSED[name]
    load_spec(write_config(tmp_path / "right", **MODELS[model]), identify=False)
    with pytest.raises(ModelError, match=message):
        load_spec(write_config(tmp_path / "wrong", **MODELS[model] | fields))


def test_a_part_of_another_family_is_refused(tmp_path: Path) -> None:
    outer = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {"model_type": "pixtral"}}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    with pytest.raises(ModelError, match="whose text part is 'pixtral'"):
        load_spec(tmp_path)


FILES: dict[str, tuple[str, dict[str, Any], str]] = {
    "no pieces": ("llama 4", {"llama4.attention.sliding_window": 0}, "sliding_window of 0"),
    "two experts a token": ("llama 4", {"llama4.expert_used_count": 2}, "expert_used_count other than 1"),
    "another curve": ("apertus", {"xielu.beta": 0.25}, r"xielu\.beta other than 0\.5"),
    "a curve of too few layers": (
        "apertus",
        {"xielu.alpha_p": [0.5]},
        r"xielu\.alpha_p must be a number, or a list of 2",
    ),
    "heads that turn in part": (
        "gemma 4",
        {"gemma4.rope.dimension_count_swa": 8},
        "rope.dimension_count_swa other than",
    ),
    "shares of gates that are none": ("gemma 3n", {"gemma3n.activation_sparsity_scale": [1.0]}, "activation_sparsity"),
}


@pytest.mark.parametrize("name", FILES)
def test_unsupported_facts_of_a_file_are_refused(name: str, tmp_path: Path) -> None:
    model, extra, message = FILES[name]
    fields = MODELS[model] | ({"no_rope_layer_interval": 4} if model == "llama 4" else {})
    path = write_gguf(write_model(tmp_path / "model", **fields), tmp_path / "m.gguf", extra=extra)
    with pytest.raises(ModelError, match=message):
        open_weights(path, load_spec(path))
