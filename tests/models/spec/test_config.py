"""The spec of a model from its folder: facts, end tokens, identity, and refusals by field."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import transformers

from cairn.models.families.families import ENCODERS, FAMILIES
from cairn.models.spec.config import load_spec
from cairn.models.spec.generation_config import generation_fault
from cairn.types.errors import ModelError, ModelFileError
from cairn.types.model_spec import CacheGroup, RopeScaling
from tests.tiny_models import LLAMA3, MODELS, load, write_config, write_model


def put(folder: Path, name: str, value: Any) -> Path:
    (folder / name).write_text(json.dumps(value))
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_every_test_model_has_a_spec(name: str, tmp_path: Path) -> None:
    fields = MODELS[name]
    spec = load_spec(write_config(tmp_path, **fields))
    assert spec.architecture == fields["architecture"] and len(spec.identity) == 32
    kept = sorted(layer for group in spec.groups for layer in group.layers)
    # In a model whose layers do one thing each, MLPs are in no group.
    keep = [layer for layer in range(spec.layers) if spec.attends(layer) or spec.keeps_state(layer)]
    assert kept == sorted({spec.kv_layer(layer) for layer in keep})


def test_family_facts(tmp_path: Path) -> None:
    llama = load_spec(write_config(tmp_path / "l", "LlamaForCausalLM", attention_bias=True, mlp_bias=True))
    assert (llama.qkv_bias, llama.out_bias, llama.mlp_bias, llama.qk_norm) == (True, True, True, False)
    qwen2 = load_spec(write_config(tmp_path / "q2", "Qwen2ForCausalLM"))
    assert (qwen2.qkv_bias, qwen2.out_bias, qwen2.mlp_bias, qwen2.qk_norm) == (True, False, False, False)
    qwen3 = load_spec(write_config(tmp_path / "q3", "Qwen3ForCausalLM", head_dim=24))
    assert (qwen3.qkv_bias, qwen3.out_bias, qwen3.qk_norm, qwen3.head_dim) == (False, False, True, 24)
    assert qwen3.groups == (CacheGroup(kind="full", layers=(0, 1)),)


def test_windows_become_cache_groups(tmp_path: Path) -> None:
    def groups(name: str, architecture: str, **fields: Any) -> tuple[CacheGroup, ...]:
        return load_spec(write_config(tmp_path / name, architecture, **fields)).groups

    full = (CacheGroup(kind="full", layers=(0, 1)),)
    assert groups("a", "MistralForCausalLM", sliding_window=24) == (
        CacheGroup(kind="window", layers=(0, 1), window=24),
    )
    assert groups("b", "MistralForCausalLM", sliding_window=None) == full
    # transformers' default is 4,096, which no context of 512 tokens outgrows.
    assert groups("c", "MistralForCausalLM") == full
    assert groups("d", "MistralForCausalLM", max_position_embeddings=8192) == (
        CacheGroup(kind="window", layers=(0, 1), window=4096),
    )
    assert groups("e", "Qwen2ForCausalLM", use_sliding_window=False, sliding_window=24) == full
    assert groups("f", "Qwen2ForCausalLM", use_sliding_window=True, sliding_window=24, max_window_layers=1) == (
        CacheGroup(kind="full", layers=(0,)),
        CacheGroup(kind="window", layers=(1,), window=24),
    )
    kinds = ["sliding_attention", "full_attention"]
    assert groups("g", "Qwen3ForCausalLM", use_sliding_window=True, sliding_window=24, layer_types=kinds) == (
        CacheGroup(kind="full", layers=(1,)),
        CacheGroup(kind="window", layers=(0,), window=24),
    )


def test_an_explicit_null_is_no_missing_field(tmp_path: Path) -> None:
    """As in transformers: as many key-value heads as heads, and no window."""
    spec = load_spec(write_config(tmp_path / "a", "Qwen2ForCausalLM", num_key_value_heads=None))
    assert spec.kv_heads == spec.heads
    windowed = {"use_sliding_window": True, "max_window_layers": 0, "max_position_embeddings": 8192}
    spec = load_spec(write_config(tmp_path / "b", "Qwen3ForCausalLM", sliding_window=None, **windowed))
    assert [group.kind for group in spec.groups] == ["full"]


@pytest.mark.parametrize(
    "fields",
    [
        {
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
        {"rope_parameters": {"full_attention": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}}},
        {"rope_scaling": {"rope_type": "default", "mrope_section": [16, 24, 24]}},
    ],
)
def test_rotary_settings_that_would_be_left_out_are_refused(fields: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"rope_scaling and rope_parameters|in its rotary settings"):
        load_spec(write_config(tmp_path, "Qwen3ForCausalLM", **fields))


def test_rope_scaling_in_both_spellings(tmp_path: Path) -> None:
    llama3 = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    old = load_spec(write_config(tmp_path / "old", "LlamaForCausalLM", rope_theta=5e5, rope_scaling=llama3))
    new = load_spec(write_config(tmp_path / "new", "LlamaForCausalLM", rope_parameters={**llama3, "rope_theta": 5e5}))
    assert old.rope_scaling == new.rope_scaling == RopeScaling(kind="llama3", factor=8.0, original_context=64)
    assert old.rope_theta == new.rope_theta == 5e5 and old.context == new.context == 512
    linear = load_spec(
        write_config(tmp_path / "linear", "LlamaForCausalLM", rope_scaling={"type": "linear", "factor": 4})
    )
    assert linear.rope_scaling.kind == "linear" and linear.context == 2048
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "beta_fast": 16.0}
    spec = load_spec(write_config(tmp_path / "yarn", "Qwen2ForCausalLM", rope_scaling=yarn))
    assert spec.rope_scaling == RopeScaling(kind="yarn", factor=4.0, original_context=512, beta_fast=16.0)
    assert spec.context == 2048
    plain = load_spec(write_config(tmp_path / "plain", "LlamaForCausalLM", rope_scaling=None))
    assert plain.rope_scaling == RopeScaling() and plain.rope_theta == 10000.0


@pytest.mark.parametrize("fields", [{}, {"no_rope_layer_interval": 4}])
def test_an_empty_list_of_layers_without_positions_means_the_pattern(fields: dict[str, Any], tmp_path: Path) -> None:
    """As published Llama 4 models have it."""
    fields = MODELS["llama 4"] | {"num_hidden_layers": 8, "no_rope_layers": []} | fields
    spec = load_spec(write_config(tmp_path, **fields))
    flags = transformers.AutoConfig.from_pretrained(tmp_path).no_rope_layers
    assert spec.unturned == tuple(layer for layer, turned in enumerate(flags) if not turned)
    assert len(spec.unturned) == 2


def test_eos_is_what_all_files_say_together(tmp_path: Path) -> None:
    """EOS is what the model's files say, one or several, and never a constant (known failure 21)."""
    folder = write_config(tmp_path, eos_token_id=7, bos_token_id=5)
    assert load_spec(folder).eos_ids == (7,) and load_spec(folder).bos_id == 5
    put(folder, "generation_config.json", {"eos_token_id": [11, 12, 11]})
    assert load_spec(folder).eos_ids == (11, 12, 7)
    put(folder, "generation_config.json", {"eos_token_id": 13})
    assert load_spec(folder).eos_ids == (13, 7)
    # A token that the tokenizer knows as an ordinary word came with another model's config.json.
    put(folder, "tokenizer.json", {"added_tokens": [{"id": 13, "content": "<|im_end|>"}]})
    assert load_spec(folder).eos_ids == (13,)
    put(folder, "tokenizer.json", {"added_tokens": [{"id": 7, "content": "<|endoftext|>"}]})
    assert load_spec(folder).eos_ids == (13, 7)
    added = {"3": {"content": "<a>"}, "9": {"content": "<end>"}}
    put(folder, "tokenizer_config.json", {"eos_token": "<end>", "added_tokens_decoder": added})
    assert load_spec(folder).eos_ids == (13, 7, 9)
    write_config(folder)
    put(folder, "generation_config.json", {})
    assert load_spec(folder).eos_ids == (9,)
    put(folder, "tokenizer_config.json", {"eos_token": {"content": "<a>"}, "added_tokens_decoder": added})
    assert load_spec(folder).eos_ids == (3,)
    (folder / "tokenizer_config.json").unlink()
    assert load_spec(folder).eos_ids == ()


def test_a_first_token_outside_the_vocabulary_is_dropped(tmp_path: Path) -> None:
    assert load_spec(write_config(tmp_path, bos_token_id=1 << 20)).bos_id is None
    assert load_spec(write_config(tmp_path, bos_token_id=-1)).bos_id is None


def test_sampling_defaults(tmp_path: Path) -> None:
    folder = write_config(tmp_path)
    assert load_spec(folder).defaults == {}
    put(folder, "generation_config.json", {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_length": 9})
    assert load_spec(folder).defaults == {"temperature": 0.6, "top_k": 20.0, "top_p": 0.95}
    put(folder, "generation_config.json", {"top_k": -1, "top_p": 0})
    assert load_spec(folder).defaults == {"top_k": -1.0, "top_p": 0.0}
    put(folder, "generation_config.json", {"temperature": 0.6, "do_sample": False})
    assert load_spec(folder).defaults == {"temperature": 0.0}


YARN = {"rope_type": "yarn", "factor": 4.0}


def test_turns_of_yarn_that_are_0_are_the_usual_ones(tmp_path: Path) -> None:
    zero = YARN | {"beta_fast": 0, "beta_slow": 0.0}
    assert load_spec(write_config(tmp_path, rope_scaling=zero)).rope_scaling.beta_fast == RopeScaling().beta_fast
    assert load_spec(tmp_path).rope_scaling.beta_slow == RopeScaling().beta_slow


def test_identity_changes_with_everything_that_can_change_a_number(tmp_path: Path) -> None:
    """Two models of one shape must never share KV (known failure 28)."""
    rope = {"rope_type": "linear", "factor": 2.0}
    changes: list[dict[str, Any]] = [
        {},
        {"seed": 1},
        {"rope_theta": 20000.0},
        {"rope_scaling": rope},
        {"rms_norm_eps": 1e-5},
        {"hidden_act": "gelu_pytorch_tanh"},
        {"architecture": "LlamaForCausalLM"},
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": 21, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ]
    specs = [load_spec(write_model(tmp_path / str(number), **change)) for number, change in enumerate(changes)]
    assert len({spec.identity for spec in specs}) == len(changes)
    folder = tmp_path / "0"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        put(folder, name, {"version": "1.0"})
        specs.append(load_spec(folder))
    assert len({spec.identity for spec in specs}) == len(specs)


def test_identity_is_the_content_not_the_place(tmp_path: Path) -> None:
    """The same model has the same identity in every process and folder (known failure 27)."""
    first, second = write_model(tmp_path / "a"), write_model(tmp_path / "b")
    put(second, "generation_config.json", {"temperature": 0.5, "eos_token_id": 3})
    (second / "README.md").write_text("unrelated")
    (second / "consolidated.safetensors").write_bytes(b"not a file that is loaded")
    assert load_spec(first).identity == load_spec(second).identity


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"architectures": None}, ["architectures", "a list with one architecture name"]),
        ({"architectures": ["A", "B"]}, ["architectures"]),
        ({"hidden_size": 0}, ["hidden_size", "from 1"]),
        ({"hidden_size": "48"}, ["hidden_size", "'48'"]),
        ({"hidden_size": True}, ["hidden_size", "True"]),
        ({"num_hidden_layers": 1 << 40}, ["num_hidden_layers"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads", "a divisor of num_attention_heads (4)"]),
        ({"num_key_value_heads": 8}, ["num_key_value_heads"]),
        ({"head_dim": 15}, ["head_dim", "even"]),
        ({"head_dim": 1026}, ["head_dim", "1024"]),
        ({"vocab_size": (1 << 22) + 1}, ["vocab_size", str(1 << 22)]),
        ({"vocab_size": None}, ["vocab_size", "nothing"]),
        ({"vocab_size": 1.5}, ["vocab_size"]),
        ({"rms_norm_eps": -1.0}, ["rms_norm_eps"]),
        ({"rope_theta": 0}, ["rope_theta"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, ["rope_scaling.factor"]),
        ({"rope_scaling": {"rope_type": "linear"}}, ["rope_scaling.factor", "nothing"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["rope_scaling.low_freq_factor"]),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.5}}, ["low_freq_factor", "at most high_freq_factor (4)"]),
        ({"rope_theta": 1, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, ["rope_theta", "more than 1"]),
        ({"rope_scaling": YARN | {"beta_fast": 1e-320}}, ["rope_scaling.beta_fast", "0, or a number from 1e-06"]),
        ({"rope_scaling": YARN | {"beta_slow": 1e-320}}, ["rope_scaling.beta_slow", "0, or a number from 1e-06"]),
        ({"rope_scaling": YARN | {"beta_fast": 2e6}}, ["rope_scaling.beta_fast", "to 1e+06, found 2000000.0"]),
        ({"rope_scaling": [1]}, ["rope_scaling", "an object"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings", "true or false"]),
        ({"eos_token_id": 160}, ["eos_token_id", "below 160"]),
        ({"eos_token_id": -1}, ["eos_token_id"]),
        ({"eos_token_id": [1, "2"]}, ["eos_token_id"]),
        ({"use_sliding_window": True, "sliding_window": 0}, ["sliding_window"]),
        ({"use_sliding_window": True, "layer_types": ["full_attention"]}, ["layer_types", "2 entries"]),
        ({"use_sliding_window": True, "layer_types": ["linear_attention"] * 2}, ["layer_types"]),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    with pytest.raises(ModelFileError) as caught:
        load_spec(write_config(tmp_path, **fields))
    for word in ["config.json", *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"hidden_act": "relu"}, "relu"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantization_config"),
    ],
)
def test_unsupported_features_are_refused_by_name(fields: dict[str, Any], word: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        load_spec(write_config(tmp_path, **fields))
    assert word in str(caught.value) and caught.value.exit_code == 2


def test_an_unknown_architecture_names_those_that_are_supported(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as caught:
        load_spec(write_config(tmp_path, architectures=["DebertaModel"]))
    families = {name.partition("For")[0].removesuffix("Model") for name in (*FAMILIES, *ENCODERS)}
    assert all(f" {name}" in str(caught.value) for name in families)


def test_a_missing_or_broken_config(tmp_path: Path) -> None:
    """A broken file is one clear sentence (known failure 30)."""
    with pytest.raises(ModelFileError, match=r"expected a \.gguf file, or a folder with config\.json"):
        load_spec(tmp_path / "nothing")
    with pytest.raises(ModelFileError, match=r"config\.json: the file is missing"):
        load_spec(tmp_path)
    for text in ("", "{", "[1]", '"x"', "[" * 100_000, "{" * 5, "nul", "\udcff".encode("utf-8", "surrogateescape")):
        (tmp_path / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(ModelFileError, match=r"config\.json: "):
            load_spec(tmp_path)
    write_config(tmp_path)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "not valid JSON"),
        ('{"eos_token_id": 999}', "eos_token_id must be a token id"),
        ('{"temperature": "hot"}', "temperature must be a number"),
        ('{"do_sample": "yes"}', "do_sample must be true or false"),
    ],
)
def test_an_unreadable_generation_config_is_reported_and_ignored(text: str, sentence: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path, eos_token_id=7)
    put(folder, "generation_config.json", {"temperature": 0.5, "eos_token_id": 3})
    engine = load(folder)
    assert (load_spec(folder).eos_ids, engine.info.note) == ((3, 7), "")
    engine.close()
    (folder / "generation_config.json").write_text(text)
    spec = load_spec(folder)
    assert (spec.eos_ids, spec.defaults) == ((7,), {})
    engine = load(folder)
    assert f"generation_config.json: {sentence}" in engine.info.note
    assert "passed over" in engine.info.note
    engine.close()


def test_a_sampling_default_that_is_out_of_range_or_no_number_is_ignored(
    tmp_path: Path,
) -> None:
    folder = write_config(tmp_path)
    for name, value, found in [
        ("temperature", -1, {"temperature": 0.0}),
        ("temperature", 20, {}),
        ("top_p", 1.0000001, {"top_p": 1.0}),
        ("top_p", 1.1, {}),
        ("min_p", -1e-7, {"min_p": 0.0}),
        ("repetition_penalty", 0, {}),
        ("repetition_penalty", 1e9, {}),
    ]:
        put(folder, "generation_config.json", {name: value})
        assert load_spec(folder).defaults == found, name
    for name, value in [("top_k", "x"), ("temperature", True), ("top_p", [1])]:
        put(folder, "generation_config.json", {name: value})
        assert load_spec(folder).defaults == {}
        assert re.search(rf"generation_config\.json: {name}", generation_fault(folder, 160))


def test_a_spec_travels_over_the_wire(tmp_path: Path) -> None:
    spec = load_spec(write_config(tmp_path))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=type(spec)) == spec


def test_a_folder_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_dir", refuse)
    with pytest.raises(ModelFileError, match=r"cannot be read \(Permission denied\)"):
        load_spec(tmp_path)
    monkeypatch.undo()
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ModelFileError, match=r"config\.json: cannot be read \(Is a directory\)"):
        load_spec(tmp_path)


LATER = {
    "LlamaForCausalLM": "bdb51be7b5296fd783a912ec58eef93f6450ef86b3e56f73b0229ed886dcabdb",
    "Qwen3ForCausalLM": "1cdfeab0a792e9032ea187e69f99c214dc2d95b3a2468fda35535b4c9343dc2a",
}
WINDOWS = {
    "use_sliding_window": True,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"],
}


@pytest.mark.parametrize("architecture", LATER)
def test_facts_that_came_later_leave_the_identity_of_other_models_alone(architecture: str, tmp_path: Path) -> None:
    """Otherwise every new family would cost other models their stored KV."""
    more = WINDOWS if architecture.startswith("Qwen") else {}
    folder = write_config(tmp_path, architecture, **more)
    config = json.loads((folder / "config.json").read_text())
    del config["model_type"]
    assert load_spec(put(folder, "config.json", config)).identity.hex() == LATER[architecture]


GEMMA_3 = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "sliding_window": 32,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
}


def test_a_gemma_config_may_leave_out_what_the_family_has(tmp_path: Path) -> None:
    """As do those of the larger ones, whose text part is in `text_config`."""
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106], "text_config": GEMMA_3}
    spec = load_spec(put(tmp_path, "config.json", outer))
    assert (spec.heads, spec.kv_heads, spec.head_dim, spec.vocab, spec.tied) == (8, 4, 256, 262_208, True)
    assert (spec.activation, spec.post_norms, spec.embedding_scale) == ("gelu_tanh", True, 8.0)
    assert spec.context == 131_072 and spec.eos_ids == (1, 106) and spec.bos_id == 2
    full, limited = spec.groups
    assert (full.layers, limited.layers, limited.window) == ((5,), (0, 1, 2, 3, 4, 6), 32)
    assert spec.rope(0).theta == 1e6 and spec.rope(0).scaling.factor == 8
    assert spec.rope(1).theta == 1e4 and spec.rope(1).scaling == RopeScaling()
    assert spec.attention_scale is None and not spec.attention_softcap and not spec.logit_softcap


def test_gemma_2_has_softcaps_and_full_attention_in_every_second_layer(tmp_path: Path) -> None:
    config = {"architectures": ["Gemma2ForCausalLM"], "num_hidden_layers": 4, "query_pre_attn_scalar": 144}
    spec = load_spec(put(tmp_path, "config.json", config))
    assert (spec.attention_softcap, spec.logit_softcap, spec.attention_scale) == (50.0, 30.0, 1 / 12)
    assert [(group.layers, group.window, group.rope) for group in spec.groups] == [
        ((1, 3), 0, None),
        ((0, 2), 4096, None),
    ]
    none = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    spec = load_spec(put(tmp_path, "config.json", config | none))
    assert not spec.attention_softcap and not spec.logit_softcap


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"use_bidirectional_attention": True}, "does not generate text"),
        ({"sliding_window": None}, "sliding_window must be a whole number"),
        ({"hidden_activation": "relu"}, "hidden_activation 'relu' is not supported"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be a number"),
    ],
)
def test_a_gemma_config_that_means_something_else_is_refused(
    fields: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    config = {"architectures": ["Gemma3ForCausalLM"], **GEMMA_3, **fields}
    with pytest.raises(ModelError, match=sentence):
        load_spec(put(tmp_path, "config.json", config))
