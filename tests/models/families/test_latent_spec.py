"""Latent attention and long-context positions: what is read from files, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cairn.config.config import Config
from cairn.engine.memory import block_bytes, pool_blocks
from cairn.kv.disk.codec import Q8
from cairn.models.families.value_range import reach
from cairn.models.safetensors.weights import open_weights
from cairn.models.spec.config import load_spec
from cairn.types.errors import ModelError, ModelFileError
from tests.gguf_files import write_gguf
from tests.tiny_models import MODELS, load, write_config, write_model

TINY = MODELS["deepseek 3"]


def test_a_page_stores_the_latent_of_all_heads_once(tmp_path: Path) -> None:
    spec = load_spec(write_model(tmp_path, **TINY))
    assert spec.page(0) == (1, 1, 16, 64 + 16)
    assert block_bytes(spec, "bfloat16") == (spec.layers * 16 * (64 + 16) * 2,)
    engine = load(tmp_path)
    assert engine._kv[0].shape[1:] == (spec.layers, 1, 1, 16, 80)
    assert [len(page) for page in engine.read_blocks(0, [0]).wait()] == list(engine.info.block_bytes)
    engine.close()


def test_published_sizes_keep_576_numbers_a_token(tmp_path: Path) -> None:
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    folder = write_config(tmp_path, **TINY | sizes | {"num_attention_heads": 128, "num_key_value_heads": 128})
    spec = load_spec(folder, identify=False)
    assert block_bytes(spec, "bfloat16") == (spec.layers * 16 * 576 * 2,)
    assert pool_blocks(spec, Config(kv_gb=0.1), free=1 << 40) == (0.1e9 // block_bytes(spec, "bfloat16")[0],)


def test_a_stored_page_can_be_rounded_by_rows_of_its_own_length(tmp_path: Path) -> None:
    spec = load_spec(write_model(tmp_path, **MODELS["deepseek 2 lite"]))
    codec = Q8(block_bytes(spec, "float32"), spec.head_dims)
    size = 4 * block_bytes(spec, "float32")[0]
    pages = np.random.default_rng(0).standard_normal(size // 4).astype(np.float32)
    back = np.frombuffer(codec.decode(0, memoryview(codec.encode(0, pages.tobytes()))), np.float32)
    assert codec.size(0) == size // 4 // 48 * (48 + 4)
    assert np.abs(back - pages).max() < np.abs(pages).max() / 200


def test_kept_numbers_stay_within_their_bound(tmp_path: Path) -> None:
    spec = load_spec(write_model(tmp_path, **TINY))
    bound = reach(spec, open_weights(tmp_path, spec))
    engine = load(tmp_path, kernels="reference")
    from cairn.types.request import SamplingParams
    from cairn.types.step import Row

    tokens = list(range(60))
    engine.prefill([Row(tokens, 0, 60, ([0, 1, 2, 3],), 59, 60, SamplingParams(max_tokens=1), 0)]).wait()
    assert 0.1 * bound < np.abs(engine._kv[0]).max() * 20
    assert np.abs(engine._kv[0]).max() <= bound / 2
    engine.close()


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "experts of the best groups by their best": (
        "deepseek 2 lite",
        {"topk_method": "group_limited_greedy", "n_group": 2},
        "topk_method other than greedy",
    ),
    "shares that are normed": ("deepseek 2 lite", {"norm_topk_prob": True}, "norm_topk_prob other than False"),
    "every second layer": ("deepseek 3", {"moe_layer_freq": 2}, "moe_layer_freq other than 1"),
    "another score": ("deepseek 3", {"scoring_func": "softmax"}, "scoring_func other than sigmoid"),
    "a latent that is too wide": ("deepseek 3", {"kv_lora_rank": 1024}, "a head size of 1040"),
    "half a pair": ("deepseek 3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim must be an even number"),
    "no rank": ("deepseek 3", {"kv_lora_rank": None}, "kv_lora_rank must be a whole number"),
    "unknown layers": ("glm 4.7 flash", {"mlp_layer_types": ["dense", "odd", "dense"]}, "each dense or sparse"),
    "a part that is turned": ("glm 4.7 flash", {"partial_rotary_factor": 0.5}, "partial_rotary_factor other than 1"),
    "too few factors": (
        "phi 4 mini",
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
        "must have 3 numbers, found 1",
    ),
    "no long factors": ("phi 4 mini", {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 3}}, "long_factor"),
    "dynamic without alpha": ("hunyuan", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
    "another activation": ("apertus", {"hidden_act": "silu"}, "hidden_act other than xielu"),
    "no scaling": ("apertus", {"rope_parameters": None}, "rope_scaling is missing"),
    "longrope elsewhere": (
        "llama 2",
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [1.0] * 6}},
        "'longrope' is not supported",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_fields_that_would_change_a_number_are_refused_by_name(name: str, tmp_path: Path) -> None:
    model, fields, message = REFUSED[name]
    with pytest.raises(ModelError, match=message):
        load_spec(write_config(tmp_path, **MODELS[model] | fields))


def test_a_file_from_before_latents_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", **TINY)
    path = write_gguf(folder, tmp_path / "old.gguf", without=("deepseek2.attention.key_length_mla",))
    with pytest.raises(ModelFileError, match=r"attention\.key_length_mla"):
        load_spec(path)


def test_groups_of_experts_with_softmax_are_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", **TINY)
    path = write_gguf(folder, tmp_path / "model.gguf", extra={"deepseek2.expert_gating_func": 1})
    with pytest.raises(ModelError, match="expert_group_used_count with softmax"):
        load_spec(path)


def test_one_list_of_factors_of_two_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", **MODELS["phi 4"])
    more = {"rope_factors_long.weight": np.ones(6, np.float32)}
    path = write_gguf(folder, tmp_path / "model.gguf", more=more)
    with pytest.raises(ModelFileError, match="one is missing"):
        load_spec(path)


@pytest.mark.parametrize("name", ["glm 4.5", "deepseek 3"])
def test_layers_that_guess_ahead_are_set_aside(name: str, tmp_path: Path) -> None:
    """They count among a file's blocks, but their tensors are no part of the model."""
    folder = write_model(tmp_path / "model", **MODELS[name])
    spec = load_spec(folder)
    arch = "glm4moe" if name == "glm 4.5" else "deepseek2"
    extra = {f"{arch}.block_count": spec.layers + 1, f"{arch}.nextn_predict_layers": 1}
    more = {f"blk.{spec.layers}.nextn.eh_proj.weight": np.ones((4, 8), np.float32)}
    more[f"blk.{spec.layers}.attn_norm.weight"] = np.ones(48, np.float32)
    path = write_gguf(folder, tmp_path / "model.gguf", extra=extra, more=more)
    found = load_spec(path)
    assert found.layers == spec.layers
    assert set(open_weights(path, found)) == set(open_weights(folder, spec))
    extra[f"{arch}.nextn_predict_layers"] = 0
    with pytest.raises(ModelError, match=r"missing|not part"):
        wrong = write_gguf(folder, tmp_path / "wrong.gguf", extra=extra, more=more)
        open_weights(wrong, load_spec(wrong))


def test_an_activation_with_other_constants_is_refused(tmp_path: Path) -> None:
    spec = load_spec(write_model(tmp_path, **MODELS["apertus"]))
    assert "model.layers.0.mlp.act_fn.beta" not in open_weights(tmp_path, spec)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.act_fn.beta"] = np.array(0.6, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.act_fn\.beta' is not part"):
        open_weights(tmp_path, spec)


@pytest.mark.parametrize("name", ["deepseek 3", "phi 4 mini", "hunyuan"])
def test_a_fact_changes_the_identity(name: str, tmp_path: Path) -> None:
    """KV with another rotation, norm or layout belongs to another model."""
    changes = {
        "deepseek 3": {"rope_interleave": False},
        "phi 4 mini": {"original_max_position_embeddings": 64},
        "hunyuan": {"rope_scaling": {"type": "dynamic", "alpha": 51.0, "factor": 1.0}},
    }
    folder = write_model(tmp_path, **MODELS[name])
    first = load_spec(folder).identity
    write_config(folder, **MODELS[name] | changes[name])
    assert load_spec(folder).identity != first
