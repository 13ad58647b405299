"""Folders as transformers' own `save_pretrained` writes them: logits within 1e-4 of transformers'.

To test another release's files, put it first on PYTHONPATH.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from cairn.models.spec.config import load_spec
from cairn.text.tokens.tokenizer import Tokenizer
from cairn.types.errors import ModelError
from tests.api.process import served
from tests.text.text_models import QWEN_CONFIG, QWEN_TEMPLATE, byte_level
from tests.text.text_models import write_model as write_text
from tests.tiny_models import MODELS, Driver, load, prompt, write_model

CLOSE = 1e-4
TOKENS = 90


def opened(model_class: Any, folder: Path) -> Any:
    """Return the model of a folder in float64, as transformers runs it."""
    torch.set_num_threads(1)
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return model_class.from_pretrained(folder, dtype=torch.float64, **options).eval()


def saved(model: Any, folder: Path) -> Path:
    """Write a model in float32 with `save_pretrained`, so that no config spelling comes from these tests."""
    model.float().save_pretrained(folder)
    return folder


def check(model_class: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare Cairn's logits for a folder with those of transformers."""
    tokens = prompt(TOKENS)
    model = opened(model_class, folder)
    if model_class is transformers.Llama4ForConditionalGeneration:
        model = model.language_model  # transformers 5.24 runs the whole with images alone
    with torch.no_grad():
        want = model(torch.tensor([tokens])).logits[0].numpy()
    engine = load(folder, kernels="reference")
    driver = Driver(engine, monkeypatch)
    ours = driver.logits(tokens, [53, TOKENS - 53], driver.tables(TOKENS))
    engine.close()
    np.testing.assert_allclose(ours, want, rtol=0, atol=CLOSE)
    assert want.std(axis=-1).min() > 0.3  # logits that hardly differ would hide mistakes


@pytest.mark.parametrize("name", MODELS)
def test_every_family_is_read_as_transformers_writes_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_class = getattr(transformers, MODELS[name]["architecture"])
    by_hand = write_model(tmp_path / "by hand", **MODELS[name])
    folder = saved(opened(model_class, by_hand), tmp_path / "saved")
    check(model_class, folder, monkeypatch)
    ours, theirs = (load_spec(one, identify=False) for one in (by_hand, folder))
    assert (ours.groups, ours.layers, ours.experts) == (theirs.groups, theirs.layers, theirs.experts)


SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "a factor that a norm behind the turn takes away": (
        "llama 4",
        {
            "use_qk_norm": True,
            "rope_scaling": None,
            "rope_parameters": {
                **{"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4},
                "original_max_position_embeddings": 128,
            },
        },
    ),
    "the least step of Nemotron": ("nemotron h", {"time_step_min": 0.5, "time_step_limit": [0.01, 0.2]}),
    "layers without a window, which have no positions": ("command-r 7b", {"layer_types": ["full_attention"] * 4}),
    "heads of keys that GPT-NeoX does not have": ("gpt neox", {"num_key_value_heads": 1, "attention_bias": False}),
    "StarCoder 2's biases taken away": ("starcoder 2", {"use_bias": False, "hidden_act": "gelu"}),
    "a bias that Nemotron's attention does not have": ("nemotron h", {"attention_bias": True}),
}


@pytest.mark.parametrize("what", SETTINGS)
def test_settings_are_read_as_transformers_reads_them(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, fields = SETTINGS[what]
    model_class = getattr(transformers, MODELS[name]["architecture"])
    by_hand = write_model(tmp_path / "by hand", **MODELS[name] | fields)
    folder = saved(opened(model_class, by_hand), tmp_path / "saved")
    check(model_class, folder, monkeypatch)


@pytest.mark.parametrize("name", ["llama with biases, tied", "gemma 3", "lfm 2", "qwen 3.5, one head of keys"])
def test_a_head_of_its_own_is_used_though_the_config_ties_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_class = getattr(transformers, MODELS[name]["architecture"])
    by_hand = write_model(tmp_path / "by hand", **MODELS[name])
    folder = saved(opened(model_class, by_hand), tmp_path / "saved")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    table = next(array for stored, array in tensors.items() if stored.endswith("embed_tokens.weight"))
    save_file(tensors | {"lm_head.weight": table.copy()}, path, metadata={"format": "pt"})
    assert load_spec(folder, identify=False).tied
    head = np.random.default_rng(3).standard_normal(table.shape).astype(np.float32)
    save_file(tensors | {"lm_head.weight": head}, path, metadata={"format": "pt"})
    check(model_class, folder, monkeypatch)
    assert not load_spec(folder, identify=False).tied


def test_a_family_that_never_ties_its_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers writes a Nemotron-H's own head beside `tie_word_embeddings: true`."""
    by_hand = write_model(tmp_path / "by hand", **MODELS["nemotron h"])
    model = opened(transformers.NemotronHForCausalLM, by_hand)
    model.config.tie_word_embeddings = True
    check(transformers.NemotronHForCausalLM, saved(model, tmp_path / "saved"), monkeypatch)


def changed(folder: Path, **fields: Any) -> Path:
    """Change fields of a folder's config.json; None removes one."""
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps({name: one for name, one in config.items() if one is not None}))
    return folder


@pytest.mark.parametrize(
    "overrides",
    [
        {"1": {"head_dim": 24, "num_key_value_heads": 1}},  # not all of them
        {"1": {"head_dim": 24}, "3": {"head_dim": 32}},
        {"1": {"head_dim": 24}, "3": {"head_dim": 24}, "2": {"head_dim": 24}},
        {"1": {"intermediate_size": 96}, "3": {"intermediate_size": 96}},
        {"1": 24, "3": 24},
    ],
)
def test_layers_that_differ_otherwise_are_refused_by_name(overrides: Any, tmp_path: Path) -> None:
    folder = write_model(tmp_path, **MODELS["gemma 4"])
    changed(folder, per_layer_config=overrides, global_head_dim=None, num_global_key_value_heads=None)
    with pytest.raises(ModelError, match="per_layer_config"):
        load_spec(folder, identify=False)


def test_layers_without_overrides_have_the_usual_heads(tmp_path: Path) -> None:
    folder = write_model(tmp_path, **MODELS["gemma 4"])
    changed(folder, per_layer_config={}, global_head_dim=None, num_global_key_value_heads=None)
    spec = load_spec(folder, identify=False)
    assert {(group.kv_heads, group.head_dim) for group in spec.groups if group.rope is None} == {(2, 16)}


def test_rotary_settings_in_two_places_are_refused(tmp_path: Path) -> None:
    """transformers merges them; using only one would rotate heads differently."""
    folder = write_model(tmp_path, **MODELS["gemma 3, new fields"])
    changed(folder, rope_scaling={"rope_type": "linear", "factor": 2.0})
    with pytest.raises(ModelError, match="rope_scaling is set beside rope_parameters"):
        load_spec(folder, identify=False)


def test_a_list_of_layers_says_how_many_there_are(tmp_path: Path) -> None:
    folder = write_model(tmp_path, **MODELS["nemotron h"])
    for number in (None, 3, 6):
        assert load_spec(changed(folder, num_hidden_layers=number), identify=False).layers == 6


SEEING = {
    "llama 4": "Llama4ForConditionalGeneration",
    "gemma 3": "Gemma3ForConditionalGeneration",
    "gemma 4": "Gemma4ForConditionalGeneration",
    "gemma 4 e": "Gemma4ForConditionalGeneration",
    "qwen 3.5": "Qwen3_5ForConditionalGeneration",
    "qwen 3.5 moe": "Qwen3_5MoeForConditionalGeneration",
    "mistral": "Mistral3ForConditionalGeneration",
    "ministral 3": "Mistral3ForConditionalGeneration",
    "mistral 4": "Mistral3ForConditionalGeneration",
}
"""Vision models with each kind of text part. Gemma 3n's vision tower needs a library of its own (timm)."""
SIGHT = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2}
SIGHT |= {"head_dim": 16, "vision_output_dim": 24, "projector_input_dim": 24, "projector_output_dim": 24}
SIGHT |= {"num_key_value_heads": 2, "num_heads": 2, "out_hidden_size": 48}
SIGHT |= {"image_size": 32, "patch_size": 16, "num_position_embeddings": 16, "position_embedding_size": 16}


def seeing(name: str, folder: Path) -> Any:
    """Return a vision model whose text part is the model of a folder."""
    text = opened(getattr(transformers, MODELS[name]["architecture"]), folder)
    model_class = getattr(transformers, SEEING[name])
    inner = json.loads((folder / "config.json").read_text()) | {"pad_token_id": 0}  # which stands for images
    model = model_class(model_class.config_class(text_config=inner, vision_config=SIGHT)).eval()
    model.get_decoder().load_state_dict(text.get_decoder().state_dict())
    model.get_output_embeddings().weight.data = text.get_output_embeddings().weight.data
    return model


@pytest.mark.parametrize("name", SEEING)
def test_models_that_also_see_are_read_as_transformers_writes_them(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_hand = write_model(tmp_path / "by hand", **MODELS[name])
    folder = saved(seeing(name, by_hand), tmp_path / "saved")
    check(getattr(transformers, SEEING[name]), folder, monkeypatch)
    engine = load(folder)
    assert "without images" in engine.info.note
    engine.close()


ONE_EACH = {fields["architecture"]: name for name, fields in reversed(MODELS.items())}
"""One model of each architecture."""
IN_EVERY_RUN = ("LlamaForCausalLM", "Gemma4ForCausalLM", "NemotronHForCausalLM")


def with_words(name: str, folder: Path) -> int:
    """Write a model with a chat model's tokenizer; return that tokenizer's vocabulary size."""
    write_text(folder, byte_level(), QWEN_CONFIG, QWEN_TEMPLATE)
    vocab = Tokenizer.load(folder).vocab_size
    sizes = {"vocab_size": vocab} | ({"vocab_size_per_layer_input": vocab} if "gemma" in name else {})
    write_model(folder, **MODELS[name] | sizes)
    return vocab


def check_server(model: Any, folder: Path, vocab: int) -> None:
    """Compare a server's log-probabilities of the likeliest tokens, and the chosen token, with transformers'."""
    tokens = prompt(40, vocab)
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, -1]
    want = torch.log_softmax(logits, dim=-1).numpy()
    best = np.argsort(-want)[:5]
    with served(model=str(folder), engine="auto", kv_gb=0.05) as server:
        body = {"model": "saved", "prompt": tokens, "max_tokens": 1, "temperature": 0, "logprobs": 5}
        (choice,) = server.post("/v1/completions", body)["choices"]
    likeliest = sorted(choice["logprobs"]["top_logprobs"][0].values(), reverse=True)[:5]
    np.testing.assert_allclose(likeliest, want[best][: len(likeliest)], rtol=0, atol=2e-3)
    assert len(likeliest) > 2, "tokens whose texts are alike are told once"


@pytest.mark.parametrize("architecture", ONE_EACH)
def test_a_server_answers_as_transformers(architecture: str, prove: bool, tmp_path: Path) -> None:
    """Over HTTP, with no option set by hand."""
    if not prove and architecture not in IN_EVERY_RUN:
        pytest.skip("a server for each family is started by `make prove`")
    by_hand = tmp_path / "by hand"
    vocab = with_words(ONE_EACH[architecture], by_hand)
    model_class = getattr(transformers, architecture)
    folder = write_text(tmp_path / "saved", byte_level(), QWEN_CONFIG, QWEN_TEMPLATE)
    saved(opened(model_class, by_hand), folder)
    check_server(opened(model_class, folder), folder, vocab)


@pytest.mark.parametrize("name", SEEING)
def test_a_server_of_a_model_that_also_sees_answers_as_transformers(name: str, prove: bool, tmp_path: Path) -> None:
    if not prove:
        pytest.skip("a server for each family is started by `make prove`")
    by_hand = tmp_path / "by hand"
    vocab = with_words(name, by_hand)
    folder = write_text(tmp_path / "saved", byte_level(), QWEN_CONFIG, QWEN_TEMPLATE)
    saved(seeing(name, by_hand), folder)
    model = opened(getattr(transformers, SEEING[name]), folder)
    if SEEING[name] == "Llama4ForConditionalGeneration":
        model = model.language_model  # transformers 5.24 runs the whole with images alone
    check_server(model, folder, vocab)
