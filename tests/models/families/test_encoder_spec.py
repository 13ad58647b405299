"""The spec of an encoder from its folder's files, and every refusal of what is unsupported or wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from cairn.models.forward.projection import open_projection
from cairn.models.safetensors.weights import open_weights
from cairn.models.spec.config import check_decodes, load_spec
from cairn.types.errors import ModelError, ModelFileError
from cairn.types.model_spec import Embedding
from cairn.types.step import Row
from tests.encoders import write_encoder, write_modules
from tests.tiny_models import GREEDY, load, prompt, random_tensors, write_config


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_encoder(tmp_path, "Bert")
    return tmp_path


def change(path: Path, **fields: Any) -> None:
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | fields))


def test_an_encoder_of_a_folder(folder: Path) -> None:
    change(folder / "sentence_bert_config.json", max_seq_length=128)
    prompts = {"query": "query: ", "document": ""}
    change(folder / "config_sentence_transformers.json", prompts=prompts, default_prompt_name=None)
    spec = load_spec(folder)
    assert (spec.kind, spec.context, spec.longest_text, spec.groups) == ("embed", 300, 128, ())
    assert spec.embedding == Embedding(pooling="mean", max_tokens=128, prompts=prompts)
    (folder / "modules.json").unlink()
    assert load_spec(folder).embedding == Embedding(pooling="mean")
    with pytest.raises(ModelError, match="is an encoder"):
        check_decodes(spec)


def test_old_names_of_norms_and_places_that_are_listed(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    spelt = {name.replace("LayerNorm.weight", "LayerNorm.gamma"): one for name, one in tensors.items()}
    spelt = {f"bert.{name.replace('LayerNorm.bias', 'LayerNorm.beta')}": one for name, one in spelt.items()}
    spelt["bert.embeddings.position_ids"] = np.arange(300)[None]
    spelt["cls.predictions.bias"] = np.zeros(120, np.float32)
    save_file(spelt, path)
    weights = open_weights(folder, load_spec(folder, identify=False))
    assert weights["layers.1.mlp_norm.bias"].tobytes() == tensors["encoder.layer.1.output.LayerNorm.bias"].tobytes()
    save_file(spelt | {"bert.embeddings.word_embeddings.weight": np.zeros((120, 48), np.int64)}, path)
    with pytest.raises(ModelFileError, match=r"embed_tokens\.weight has the type 'I64'; supported are F32"):
        open_weights(folder, load_spec(folder, identify=False))
    del spelt["bert.embeddings.LayerNorm.gamma"]
    save_file(spelt, path)
    with pytest.raises(ModelFileError, match=r"embed_norm\.weight .* is missing"):
        open_weights(folder, load_spec(folder, identify=False))
    save_file(spelt | {"bert.something": np.zeros(2, np.float32)}, path)
    with pytest.raises(ModelFileError, match=r"'bert\.something' is not part of a BertModel"):
        open_weights(folder, load_spec(folder, identify=False))


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("config.json", {"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key'"),
        ("config.json", {"hidden_act": "relu"}, "hidden_act 'relu' is not supported; supported are gelu"),
        ("config.json", {"is_decoder": True}, "is_decoder other than False is not supported for BertModel"),
        ("config.json", {"add_cross_attention": True}, "add_cross_attention other than False"),
        ("config.json", {"is_encoder_decoder": True}, "is_encoder_decoder other than False"),
        ("config.json", {"hidden_size": 50}, "num_attention_heads must be such that"),
        (
            "config.json",
            {"architectures": ["DebertaModel"]},
            "'DebertaModel' is not supported; supported are Apertus, Bert, ",
        ),
        ("config.json", {"quantization_config": {}}, "quantised safetensors"),
        ("1_Pooling/config.json", {"pooling_mode_cls_token": True}, "must be true, found pooling_mode_cls_token, poo"),
        ("1_Pooling/config.json", {"pooling_mode": "max"}, "pooling_mode must be one of cls, mean"),
        ("sentence_bert_config.json", {"max_seq_length": 0}, "max_seq_length must be a whole number from 1"),
        ("config_sentence_transformers.json", {"default_prompt_name": "x"}, "default_prompt_name must be one of"),
    ],
)
def test_invalid_input_is_named_in_the_error(name: str, fields: dict[str, Any], said: str, folder: Path) -> None:
    change(folder / name, **fields)
    with pytest.raises(ModelError, match=said.replace("[", r"\[")) as caught:
        load_spec(folder)
    assert str(folder / name) in str(caught.value)


def test_lowercasing_is_left_to_the_tokenizer(folder: Path) -> None:
    """Published models name do_lower_case beside a tokenizer that does it."""
    change(folder / "sentence_bert_config.json", do_lower_case=False)
    load_spec(folder)
    change(folder / "sentence_bert_config.json", do_lower_case=True, max_seq_length=128)
    bert, plain = ({"type": "BertNormalizer", "lowercase": flag} for flag in (True, False))
    for does in (bert, {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]}):
        change(folder / "tokenizer.json", normalizer=does)
        assert load_spec(folder).longest_text == 128
    for does_not in (None, plain, {"type": "NFC"}, {"type": "Sequence", "normalizers": [{"type": "NFC"}, plain]}):
        change(folder / "tokenizer.json", normalizer=does_not)
        with pytest.raises(ModelError, match=r"sentence_bert_config\.json: do_lower_case is not supported where"):
            load_spec(folder)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ModelFileError, match=r"tokenizer\.json: not a tokenizer\.json"):
        load_spec(folder)


@pytest.mark.parametrize(
    ("modules", "said"),
    [
        ([{"type": "a.Transformer", "path": ""}], "names no Pooling"),
        ([{"type": "a.Transformer", "path": "0_Transformer"}], "must be in the folder itself"),
        ([{"type": "a.WordWeights", "path": ""}], "the module 'WordWeights' is not supported"),
        (
            [
                {"type": "a.Transformer", "path": ""},
                {"type": "a.Normalize", "path": "2_Normalize"},
                {"type": "a.Pooling", "path": "1_Pooling"},
            ],
            "must be in the order Transformer, Pooling, Dense, Normalize",
        ),
        ([{"type": "a.Pooling", "path": "../other"}], "path must be the name of a folder"),
        ({"a": 1}, "a list of at most 16 modules"),
        ([1], "a list of at most 16 modules"),
    ],
)
def test_modules_that_are_not_built(modules: Any, said: str, folder: Path) -> None:
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelError, match=said):
        load_spec(folder)


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3Model"])
def test_a_decoder_that_makes_embeddings(architecture: str, tmp_path: Path) -> None:
    """Like Qwen3-Embedding: tensor names lack their first part, and there is no head."""
    plain = write_config(tmp_path / "plain", tie_word_embeddings=True)
    tensors = random_tensors(plain)
    save_file(tensors, plain / "model.safetensors")
    bare = write_config(tmp_path / "bare", tie_word_embeddings=False)
    change(bare / "config.json", architectures=[architecture])
    write_modules(bare, "last")
    save_file({name.removeprefix("model."): one for name, one in tensors.items()}, bare / "model.safetensors")
    spec = load_spec(bare)
    assert (spec.kind, spec.embedding.pooling, load_spec(plain).kind) == ("embed", "last", "chat")
    tokens = prompt(30)
    row = Row(tokens, 0, 30, ([0, 1],), 29, 30, GREEDY, 0, want="hidden")
    vectors = [load(one).embed([row]).wait()[0].hidden for one in (plain, bare)]
    assert vectors[0] == vectors[1] != b""
    assert not spec.whole
    write_modules(bare, "mean")
    with pytest.raises(ModelError, match="is made for embeddings: it generates nothing"):
        check_decodes(load_spec(bare))


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("2_Dense/config.json", {"in_features": 40}, "in_features must be 48, the size of its input, found 40"),
        ("3_Dense/config.json", {"in_features": 40}, "in_features must be 20, the size of its input, found 40"),
        ("2_Dense/config.json", {"activation_function": "torch.nn.GELU"}, "'GELU' is not supported; supported are Ide"),
        ("2_Dense/config.json", {"module_input_name": "token_embeddings"}, "module_input_name other than sentence"),
        ("2_Dense/config.json", {"bias": False}, r"'linear\.bias' is not part of a Dense module"),
        ("2_Dense/config.json", {"out_features": 20, "in_features": "x"}, "in_features must be a whole number"),
        ("1_Pooling/config.json", {"include_prompt": False}, "include_prompt is false"),
    ],
)
def test_matrices_that_are_wrong(name: str, fields: dict[str, Any], said: str, folder: Path) -> None:
    change(folder / "config_sentence_transformers.json", prompts={"query": "query: "})
    linear = [torch.nn.Linear(48, 20), torch.nn.Linear(20, 20, bias=False)]
    write_modules(folder, "mean", [torch.nn.Sequential(one) for one in linear])
    open_projection(load_spec(folder), folder, {})
    change(folder / name, **fields)
    with pytest.raises(ModelError, match=said) as caught:
        open_projection(load_spec(folder), folder, {})
    assert name.partition("/")[0] in str(caught.value)


def test_both_directions_that_are_not_built(tmp_path: Path) -> None:
    plain = write_config(tmp_path, tie_word_embeddings=True)
    for fields in ({"is_causal": False}, {"use_bidirectional_attention": True}):
        change(write_config(plain) / "config.json", **fields)
        write_modules(plain, "mean")
        with pytest.raises(ModelError, match="attention in both directions is not supported for Qwen3ForCausalLM"):
            load_spec(plain)
