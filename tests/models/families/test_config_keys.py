"""The tables of config fields against transformers' configuration classes, and what they refuse."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import cairn.models.spec.config as loading
from cairn.models.families.config_keys import COMMON, ENCODER_ROWS, EVERYWHERE, HARMLESS, ROWS, ConfigKeys
from cairn.models.families.families import FAMILIES
from cairn.models.files import Fields
from cairn.models.spec.config import load_spec
from cairn.types.errors import ModelError, ModelFileError
from tests.tiny_models import MODELS, write_config

NONE_LISTED = {**MODELS["qwen 3 with window layers"], "layer_types": None}


def class_fields(architecture: str) -> set[str]:
    """Return the fields, and their aliases, that a family's configuration class of transformers takes."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: nothing to compare with")
    config_class = getattr(transformers, architecture).config_class
    return {field.name for field in dataclasses.fields(config_class)} | set(config_class.attribute_map)


def missing(row: ConfigKeys, fields: set[str], common: frozenset[str] = frozenset()) -> list[str]:
    known = row.used | row.harmless | set(row.only) | set(row.aliases) | common | HARMLESS | set(EVERYWHERE)
    return sorted(fields - known)


@pytest.mark.parametrize("architecture", ROWS)
def test_every_field_that_transformers_reads_is_in_the_table(architecture: str) -> None:
    assert missing(ROWS[architecture], class_fields(architecture), COMMON) == []


@pytest.mark.parametrize("family", ENCODER_ROWS)
def test_every_field_that_transformers_reads_of_an_encoder_is_in_the_table(family: str) -> None:
    assert missing(ENCODER_ROWS[family], class_fields(f"{family}Model")) == []


def test_a_field_that_is_in_no_column_is_found() -> None:
    """Guards the test itself: without a field's row the comparison names the field."""
    row = ROWS["OlmoeForCausalLM"]
    bare = dataclasses.replace(row, only={})
    assert missing(bare, class_fields("OlmoeForCausalLM"), COMMON) == ["clip_qkv"]


def test_every_family_has_a_row() -> None:
    plain = {name for name, family in FAMILIES.items() if not family.nested}
    assert plain == set(ROWS)


class Watched(dict[str, Any]):
    """A config's fields, with the names of those that were read."""

    def __init__(self, values: dict[str, Any], asked: set[str]) -> None:
        super().__init__(values)
        self.asked = asked

    def __getitem__(self, name: str) -> Any:
        self.asked.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.asked.add(name)
        return super().get(name, default)

    def __contains__(self, name: object) -> bool:
        self.asked.add(str(name))
        return super().__contains__(name)


@pytest.mark.parametrize("architecture", ROWS)
def test_fields_that_the_table_calls_used_are_read(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: set[str] = set()
    real = loading.understood

    def watched(config: Fields, *rest: Any) -> Fields:
        spec = real(config, *rest)
        return Fields(Watched(spec.values, asked), spec.path, spec.prefix)

    monkeypatch.setattr(loading, "understood", watched)
    for number, fields in enumerate([*MODELS.values(), NONE_LISTED]):
        if fields["architecture"] == architecture:
            load_spec(write_config(tmp_path / str(number), **fields), identify=False)
    assert ROWS[architecture].used <= asked


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "clipped keys": ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is not supported"),
    "a window of OLMoE": ("olmoe", {"sliding_window": 16}, "sliding_window is not supported"),
    "windows of SmolLM3": ("smollm 3", {"use_sliding_window": True, "sliding_window": 16}, "use_sliding_window other"),
    "layers with a window": (
        "smollm 3",
        {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 16},
        "layer_types other than full_attention",
    ),
    "another gate": ("gpt-oss", {"swiglu_alpha": 2.5}, "swiglu_alpha other than 1.702"),
    "another bound": ("gpt-oss", {"swiglu_limit": 5}, "swiglu_limit other than 7"),
    "layers that differ": ("llama 2", {"per_layer_config": {"1": {"rms_norm_eps": 0.1}}}, "per_layer_config is not"),
    "an activation of states": ("qwen 3.5", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act other than silu"),
    "that of Granite": ("granite 4 hybrid", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act other than silu"),
    "that of Mamba": ("mamba 2", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act other than silu"),
    "that of Nemotron": ("nemotron h", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act other than silu"),
    "biases of DeepSeek 2": ("deepseek 2 lite", {"mlp_bias": True}, "mlp_bias other than False"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_setting_that_is_not_built_is_refused_by_name(what: str, tmp_path: Path) -> None:
    name, fields, sentence = REFUSED[what]
    load_spec(write_config(tmp_path / "as it was", **MODELS[name]), identify=False)
    with pytest.raises(ModelError, match=sentence):
        load_spec(write_config(tmp_path / "changed", **MODELS[name] | fields), identify=False)


def test_other_spellings_of_a_field_are_read(tmp_path: Path) -> None:
    fields = MODELS["nemotron h"]
    usual = load_spec(write_config(tmp_path / "usual", **fields, conv_kernel=3), identify=False)
    older = write_config(tmp_path / "older", **fields | {"mamba_n_groups": 2, "n_groups": None, "mamba_d_conv": 3})
    assert usual.recurrence == load_spec(older, identify=False).recurrence
    both = write_config(tmp_path / "both", **fields, mamba_n_groups=3)
    with pytest.raises(ModelFileError, match="mamba_n_groups must be what n_groups says"):
        load_spec(both, identify=False)
