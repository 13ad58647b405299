"""A GGUF file gives the answer of the safetensors model it was made from, and of what transformers reads from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Type
from safetensors.numpy import load_file, save_file
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from cairn.models.spec.config import load_spec
from cairn.text.tokens.tokenizer import Tokenizer
from tests.api.process import served
from tests.gguf_files import hub_tensors, permuted, write_gguf
from tests.text.text_models import KINDS, LLAMA2_CONFIG, QWEN_CONFIG, QWEN_TEMPLATE
from tests.text.text_models import write_model as write_text
from tests.tiny_models import MODELS, Driver, load, prompt, write_model

LENGTH = 70

# Converters do not write windows of single layers, or gelu, for these architectures.
FAMILIES = {name: fields for name, fields in MODELS.items() if "window" not in name or name == "mistral"}
FAMILIES["llama 4"] = FAMILIES["llama 4"] | {"no_rope_layer_interval": 4, "attention_chunk_size": 8192}
FAMILIES["llama 4"] |= {"floor_scale": 8192}  # whose files lack the chunk length and the scale of queries
for _name in ("gemma 3, new fields", "qwen 3 moe, not normed, some layers dense"):
    del FAMILIES[_name]
for _name in ("olmo 3", "gpt-oss"):  # whose files do not say which layers have a window
    FAMILIES[_name] = FAMILIES[_name] | {"num_hidden_layers": 4, "layer_types": None}
FAMILIES["exaone 4"] = FAMILIES["exaone 4"] | {"rope_scaling": None}  # whose factors are rounded in a file
FAMILIES["exaone 4, all layers alike"] = MODELS["exaone 4 without a window"]
FAMILIES["glm 4.7 flash"] = FAMILIES["glm 4.7 flash"] | {"mlp_layer_types": ["dense", "sparse", "sparse"]}
for _name in ("mixtral", "olmo 3", "gpt-oss", "smollm 3", "command-r"):  # whose defaults a config may leave out
    FAMILIES[_name] = FAMILIES[_name] | {"rope_theta": 5e5}
FAMILIES["smollm 3"] = FAMILIES["smollm 3"] | {"no_rope_layer_interval": 4}
del FAMILIES["lfm 2, biases"]
FAMILIES["mamba 2"] = FAMILIES["mamba 2"] | {"use_bias": False, "time_step_limit": [0.0, float("inf")]}
FAMILIES["lfm 2 moe"] = FAMILIES["lfm 2 moe"] | {"routed_scaling_factor": 1.0}
FAMILIES["qwen 3 next"] = FAMILIES["qwen 3 next"] | {"mlp_only_layers": []}
FAMILIES["granite 4 hybrid, dense"] = FAMILIES["granite 4 hybrid, dense"] | {
    **{"mamba_proj_bias": False, "time_step_limit": None, "intermediate_size": 56}
}
for _name in ("phi with norms of queries and keys", "command-r, biases"):  # which the converter does not write
    del FAMILIES[_name]
FAMILIES["starcoder 2, without biases"] = FAMILIES["starcoder 2"] | {"use_bias": False, "tie_word_embeddings": False}
FAMILIES["phi 2"] = FAMILIES["phi 2"] | {"num_key_value_heads": 4}
FAMILIES["gpt neox, one after the other"] = FAMILIES["gpt neox, one after the other"] | {
    **{"hidden_act": "gelu", "rotary_emb_base": 10_000}
}
FAMILIES["command-r 7b"] = FAMILIES["command-r 7b"] | {"sliding_window_pattern": 4}
for _name in ("gemma 2", "gemma 3"):  # whose files do not say how scores are scaled
    FAMILIES[_name] = FAMILIES[_name] | {"query_pre_attn_scalar": FAMILIES[_name]["head_dim"]}


def logits(model: Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """Return the logits of a prompt computed in two chunks, then of eight greedy tokens."""
    engine = load(model)
    driver = Driver(engine, monkeypatch)
    start = prompt(LENGTH, engine.info.vocab)
    first = driver.logits(start, [LENGTH - 30, 30], driver.tables(LENGTH))
    driver.seen.clear()
    driver.greedy(start, 8)
    engine.close()
    return np.concatenate([first, *(row for _, row in driver.seen)])


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_equals_its_safetensors_form(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, bit for bit.

    A file holds factors in place of llama3's formula, rounded differently; so are a stretched theta and the weight of
    long factors.
    """
    folder = write_model(tmp_path / "model", **FAMILIES[name])
    path = write_gguf(folder, tmp_path / "model.gguf")
    got, want = logits(path, monkeypatch), logits(folder, monkeypatch)
    if "llama 3" in name or name in ("hunyuan", "phi 4 mini"):
        assert "llama 3" not in name or len(load_spec(path).rope_scaling.factors) == load_spec(path).head_dim // 2
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)
    elif load_spec(path).recurrence != load_spec(folder).recurrence:  # whose heads have another order in the file
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)
    else:
        np.testing.assert_array_equal(got, want)


def random_blocks(array: np.ndarray, kind: Type) -> np.ndarray:
    """Return blocks of any type, also those the package cannot pack, with scales that keep values near `array`'s."""
    values, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(array.size)
    blocks = rng.integers(0, 256, (array.size // values, size), dtype=np.uint8)
    places = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "TQ1_0": (52,)}
    share = 40 if kind.name == "TQ1_0" else 4000
    for place in places.get(kind.name, (0,)):
        blocks[:, place : place + 2] = np.float16(np.abs(array).max() / share).view(np.uint16).reshape(1).view(np.uint8)
    if kind == Type.MXFP4:
        blocks[:, 0] = 122
    return blocks.reshape(*array.shape[:-1], -1)


def unpacked(folder: Path, path: Path, target: Path) -> Path:
    """Return the folder with its weights replaced by what the gguf package reads from the file."""
    config = json.loads((folder / "config.json").read_text())
    read = {one.name: gguf.quants.dequantize(one.data, one.tensor_type) for one in gguf.GGUFReader(path).tensors}
    arch, tensors = config["architectures"][0], {}
    for (ours, tensor), theirs in zip(
        load_file(folder / "model.safetensors").items(), hub_tensors(folder, config), strict=True
    ):
        array = read[theirs].reshape(tensor.shape).astype(np.float32)
        for part, heads in ((".q_proj.", "num_attention_heads"), (".k_proj.", "num_key_value_heads")):
            if arch == "LlamaForCausalLM" and part in ours:
                order = permuted(np.arange(len(array))[:, None], config[heads]).reshape(-1)
                array = array[np.argsort(order)]
        tensors[ours] = np.ascontiguousarray(array)
    target.mkdir()
    (target / "config.json").write_text(json.dumps(config))
    save_file(tensors, target / "model.safetensors")
    return target


BIG: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
TYPES = ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4")
K_TYPES = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "IQ1_S", "TQ1_0")
ROW_TYPES = ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")


@pytest.mark.parametrize("kind", [*TYPES, *K_TYPES, *ROW_TYPES])
def test_every_type_is_read_exactly(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits are those of the unpacked weights in float32, bit for bit."""
    folder = write_model(tmp_path / "model", "LlamaForCausalLM", **BIG)
    packs = kind in TYPES and kind not in ("IQ4_NL", "MXFP4")
    packed = gguf.quants.quantize if packs else random_blocks
    path = write_gguf(folder, tmp_path / "model.gguf", kind=Type[kind], packed=packed)
    want = logits(unpacked(folder, path, tmp_path / "unpacked"), monkeypatch)
    assert np.isfinite(want).all() and want.std(axis=-1).min() > 0.01
    np.testing.assert_array_equal(logits(path, monkeypatch), want)


@pytest.mark.parametrize("name", ["llama 2", "qwen 2, three heads a group", "qwen 3, head size of its own"])
def test_transformers_reads_the_same_from_the_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(tmp_path / "model", **MODELS[name])
    path = write_gguf(folder, tmp_path / "model.gguf", extra={"general.name": "tiny"})
    got = logits(path, monkeypatch)[:LENGTH]
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(folder), dtype=torch.float32, attn_implementation="eager"
    )
    read = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    report = model.load_state_dict({key: torch.as_tensor(value) for key, value in read.items()}, strict=False)
    assert not report.unexpected_keys and set(report.missing_keys) <= {"lm_head.weight"}
    model.tie_weights()
    with torch.no_grad():
        want = model.eval()(torch.tensor([prompt(LENGTH)])).logits[0].numpy()
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM"])
def test_a_server_answers_from_a_file_as_from_a_folder(architecture: str, tmp_path: Path) -> None:
    """Tokenizer, template, weights and end tokens all come from the one file."""
    llama = architecture == "LlamaForCausalLM"
    text = KINDS["sentencepiece" if llama else "byte-level"]()
    config = {**LLAMA2_CONFIG} if llama else {**QWEN_CONFIG}
    # A file that wants BOS has it before a chat too; a folder has what its template writes.
    template = "{{ bos_token }}" + QWEN_TEMPLATE if llama else QWEN_TEMPLATE
    folder = write_text(tmp_path / "tiny", text, config, template)
    tokenizer = Tokenizer.load(folder)
    ends = ["</s>"] if llama else ["<|im_end|>", "<|endoftext|>"]
    write_model(
        folder, architecture, vocab_size=tokenizer.vocab_size, eos_token_id=[tokenizer.token_id(end) for end in ends]
    )
    path = write_gguf(folder, tmp_path / "tiny.gguf")
    asked: dict[str, Any] = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello <|im_end|> Größe"}]},
        "/v1/completions": {"prompt": "The quick brown fox\n  Ærø", "logprobs": 2},
    }
    options = {"model": "tiny", "max_tokens": 40, "temperature": 0}
    answers = []
    for model in (folder, path):
        with served(model=str(model), engine="auto", kv_gb=0.01) as server:
            said = [server.post(url, body | options) for url, body in asked.items()]
            answers.append([(one["choices"], one["usage"]["prompt_tokens"], one["model"]) for one in said])
    assert answers[0] == answers[1]
    assert answers[0][0][0][0]["message"]["content"]
