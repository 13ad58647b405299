"""GGUF files for tests: tiny models in safetensors with a tokenizer.json, converted with the gguf package."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from safetensors.numpy import load_file

from cairn.models.safetensors.weights import open_weights
from cairn.models.spec.config import load_spec
from cairn.text.tokens.gguf import BYTE, CONTROL, UNKNOWN, UNUSED, USER
from tests import gguf_layer_norms, gguf_recurrent, gguf_uneven

NAMES = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2"}
NAMES |= {"Qwen3ForCausalLM": "qwen3", "Gemma2ForCausalLM": "gemma2", "Gemma3ForCausalLM": "gemma3"}
NAMES |= {"Qwen2MoeForCausalLM": "qwen2moe", "Qwen3MoeForCausalLM": "qwen3moe", "MixtralForCausalLM": "llama"}
NAMES |= {"OlmoeForCausalLM": "olmoe", "GptOssForCausalLM": "gpt-oss", "GraniteForCausalLM": "granite"}
NAMES |= {"SmolLM3ForCausalLM": "smollm3", "Olmo2ForCausalLM": "olmo2", "Olmo3ForCausalLM": "olmo2"}
NAMES |= {"SeedOssForCausalLM": "seed_oss", "Phi3ForCausalLM": "phi3", "Glm4MoeForCausalLM": "glm4moe"}
NAMES |= {"HunYuanDenseV1ForCausalLM": "hunyuan-dense"}
NAMES |= {"Ministral3ForCausalLM": "mistral3", "DeepseekV2ForCausalLM": "deepseek2"}
NAMES |= {"DeepseekV3ForCausalLM": "deepseek2", "Glm4MoeLiteForCausalLM": "deepseek2"}
NAMES |= {"Mistral4ForCausalLM": "mistral4", "Llama4ForCausalLM": "llama4", "ApertusForCausalLM": "apertus"}
NAMES |= {"Gemma4ForCausalLM": "gemma4", "Gemma3nForCausalLM": "gemma3n"}
NAMES |= {"Exaone4ForCausalLM": "exaone4", "Glm4ForCausalLM": "glm4"}
INTERLEAVED = ("llama4", "llama", "granite", "granitehybrid", "smollm3", "mistral3")
NAMES |= {"Qwen3_5ForCausalLM": "qwen35", "Qwen3_5MoeForCausalLM": "qwen35moe", "Qwen3NextForCausalLM": "qwen3next"}
NAMES |= {"Lfm2ForCausalLM": "lfm2", "Lfm2MoeForCausalLM": "lfm2moe", "GraniteMoeHybridForCausalLM": "granitehybrid"}
NAMES |= {"NemotronHForCausalLM": "nemotron_h", "Mamba2ForCausalLM": "mamba2"}
NAMES |= gguf_layer_norms.NAMES
PLAIN = 1

Choose = Callable[[str, np.ndarray], Type]


def write_gguf(
    folder: Path,
    path: Path,
    *,
    pre: str = "qwen2",
    kind: Type | Choose = Type.F32,
    parts: int = 1,
    extra: Mapping[str, Any] | None = None,
    without: tuple[str, ...] = (),
    packed: Callable[[np.ndarray, Type], np.ndarray] = gguf.quants.quantize,
    arch: str = "",
    more: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Write the model in a folder (safetensors, and its tokenizer.json if there is one) as a GGUF file.

    Matrices have the type `kind`, everything else F32. `extra` are metadata, `without` keys to leave out, `arch`
    replaces the architecture of the folder, and `more` are additional tensors. With several `parts` the file is split;
    the path of the first part is returned.
    """
    config = json.loads((folder / "config.json").read_text())
    own = named(config)
    arch = arch or own
    per_part = -(-len(tensors := hub_tensors(folder, config) | dict(more or {})) // parts)
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=per_part if parts > 1 else 0)
    spec = load_spec(folder)
    beside = gguf_recurrent.keys(config, spec, own) | gguf_uneven.keys(config, spec, own)
    kept = {f"{own}.{key}": value for key, value in beside.items()}
    known = {key.replace(f"{own}.", f"{arch}.", 1): value for key, value in (metadata(config) | kept).items()}
    if own == "apertus":
        known |= gguf_uneven.constants(open_weights(folder, spec), own)
    fields = known | (tokenizer(folder, config, pre) if (folder / "tokenizer.json").exists() else {})
    put(writer, {key: value for key, value in (fields | dict(extra or {})).items() if key not in without})
    for name, array in tensors.items():
        wanted = kind(name, array) if callable(kind) else kind
        tensor_kind = wanted if array.ndim > 1 else Type.F32
        if tensor_kind == Type.F32:
            writer.add_tensor(name, array.astype(np.float32))
        else:
            writer.add_tensor(name, packed(array.astype(np.float32), tensor_kind), raw_dtype=tensor_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if parts == 1 else path.with_name(f"{path.stem}-00001-of-{parts:05}.gguf")


def write_tokenizer(folder: Path, path: Path, *, pre: str = "qwen2", **extra: Any) -> Path:
    """Write only the text part of a model, with no tensors. `extra`: keys of `tokenizer.`, with "__" for each dot."""
    writer = gguf.GGUFWriter(path, "llama")
    fields = tokenizer(folder, {}, pre) | {f"tokenizer.{key.replace('__', '.')}": value for key, value in extra.items()}
    put(writer, {key: value for key, value in fields.items() if value is not None})
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def named(config: Mapping[str, Any]) -> str:
    """Return GGUF's name of a config's architecture."""
    own = NAMES[config["architectures"][0]]
    return "nemotron_h_moe" if own == "nemotron_h" and config.get("n_routed_experts") else own


def put(writer: gguf.GGUFWriter, values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, np.float64):
            writer.add_float64(key, float(value))
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_array(key, value)


def metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata that llama.cpp's converter writes for a config.json."""
    arch, heads = named(config), config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    fields: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "attention.key_length": size,
        "attention.value_length": size,
        "rope.dimension_count": int(size * config.get("partial_rotary_factor", 1.0)),
        "rope.freq_base": theta(config),
        "vocab_size": config["vocab_size"],
    }
    rope = scaling(config)
    kind = rope.get("rope_type", rope.get("type"))
    if kind in ("linear", "yarn"):
        fields |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
    if kind == "yarn":
        fields["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if arch in ("llama", "gemma2", "gemma3", "phi3") and config.get("sliding_window"):
        fields["attention.sliding_window"] = config["sliding_window"]
    if arch == "gemma2":
        fields["attn_logit_softcapping"] = config["attn_logit_softcapping"]
        fields["final_logit_softcapping"] = config["final_logit_softcapping"]
    if arch == "gemma3":
        fields["rope.freq_base_swa"] = config["rope_local_base_freq"]
        fields["attention.sliding_window_pattern"] = config["sliding_window_pattern"]
    fields |= others(config, arch)
    fields = gguf_layer_norms.keys(config, arch, fields)
    return {f"{arch}.{key}": value for key, value in fields.items()}


def others(config: Mapping[str, Any], arch: str) -> dict[str, Any]:
    """Return the metadata of windows, multipliers and experts."""
    fields: dict[str, Any] = {}
    if arch in ("gpt-oss", "olmo2") and config.get("sliding_window"):
        fields["attention.sliding_window"] = config["sliding_window"]
    if arch == "exaone4" and config.get("sliding_window"):
        period, layers = config["sliding_window_pattern"], config["num_hidden_layers"]
        fields["attention.sliding_window"] = config["sliding_window"]
        fields["attention.sliding_window_pattern"] = [(layer + 1) % period > 0 for layer in range(layers)]
    if arch == "granite":
        fields |= {
            "attention.scale": config["attention_multiplier"],
            "embedding_scale": config["embedding_multiplier"],
            "residual_scale": config["residual_multiplier"],
            "logit_scale": config["logits_scaling"],
        }
    fields |= positions(config, arch)
    count = config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts")
    if config.get("n_routed_experts"):
        fields |= {
            "expert_gating_func": 1 if config["architectures"][0].startswith(("DeepseekV2", "Mistral4")) else 2,
            "expert_shared_count": config["n_shared_experts"],
            "expert_weights_scale": config["routed_scaling_factor"],
            "expert_weights_norm": config.get("norm_topk_prob", True),
            "expert_group_count": config["n_group"],
            "expert_group_used_count": config["topk_group"],
        }
        if arch != "nemotron_h_moe":
            fields["leading_dense_block_count"] = config.get("first_k_dense_replace", 1)
    if count:
        fields |= {"expert_count": count, "expert_used_count": config.get("num_experts_per_tok", 1)}
        fields["expert_feed_forward_length"] = config.get("moe_intermediate_size") or config["intermediate_size"]
        if config.get("shared_expert_intermediate_size"):
            fields["expert_shared_feed_forward_length"] = config["shared_expert_intermediate_size"]
    return fields


def positions(config: Mapping[str, Any], arch: str) -> dict[str, Any]:
    """Return the metadata of unusual rotary positions."""
    rope, fields = scaling(config), dict[str, Any]()
    if arch == "mistral3":
        fields["rope.scaling.yarn_log_multiplier"] = rope["mscale_all_dim"]
        fields["attention.temperature_scale"] = rope["llama_4_scaling_beta"]
    if arch in ("deepseek2", "mistral4"):
        turned = config["qk_rope_head_dim"]
        fields |= {
            "attention.head_count_kv": 1,
            "attention.q_lora_rank": config["q_lora_rank"] or 0,
            "attention.kv_lora_rank": config["kv_lora_rank"],
            "attention.key_length": config["kv_lora_rank"] + turned,
            "attention.value_length": config["kv_lora_rank"],
            "attention.key_length_mla": config["qk_nope_head_dim"] + turned,
            "attention.value_length_mla": config["v_head_dim"],
            "rope.dimension_count": turned,
        }
        if rope.get("mscale_all_dim"):
            fields["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    if "long_factor" in rope:
        old = config["original_max_position_embeddings"]
        spread = np.log(config["max_position_embeddings"] / old) / np.log(old)
        fields["rope.scaling.original_context_length"] = old
        fields["rope.scaling.attn_factor"] = float(np.sqrt(1 + spread))
    return fields


def scaling(config: Mapping[str, Any]) -> dict[str, Any]:
    return config.get("rope_scaling") or config.get("rope_parameters") or {}


def theta(config: Mapping[str, Any]) -> float:
    base, size = float(scaling(config).get("rope_theta", config.get("rope_theta", 10000.0))), config.get("head_dim", 0)
    alpha = scaling(config).get("alpha", 1.0)
    return base if alpha == 1.0 else float(base * alpha ** (size / (size - 2)))


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """Reorder rows of q or k as llama files do: each head's halves interleaved."""
    size = len(rows) // heads
    return rows.reshape(heads, 2, size // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def hub_tensors(folder: Path, config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the folder's tensors under GGUF's names, and llama3's rope factors."""
    arch = named(config)
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[arch], config["num_hidden_layers"])
    found, spec = {}, load_spec(folder)
    every = tensors_of(folder, config, own=spec.recurrence is not None or arch in gguf_uneven.OWN)
    every = gguf_layer_norms.laid_out(config, arch, gguf_uneven.together(every, arch))
    for name, array in every.items():
        if (other := gguf_uneven.named(name)) is not None:
            found[other] = array
            continue
        if ".mixer." in name:
            found |= gguf_recurrent.tensor(spec, arch, name, every)
            continue
        if arch in INTERLEAVED and ".q_proj." in name:
            array = permuted(array, config["num_attention_heads"])
        if arch in INTERLEAVED and ".k_proj." in name:
            array = permuted(array, config["num_key_value_heads"])
        if arch in ("gemma2", "gemma3") and name.endswith("norm.weight"):
            array = array + 1
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        if arch.startswith("lfm2"):
            name = name.replace("model.norm.", "model.embedding_norm.")
        found[names.get_name(name, (".weight", ".bias")) + (".weight" if name.endswith("sinks") else "")] = array
    found |= gguf_uneven.more(spec, arch)
    rope = scaling(config)
    if rope.get("rope_type") == "llama3":
        size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        found["rope_freqs.weight"] = rope_factors(rope, size, theta(config))
    for kind in ("short", "long"):
        if f"{kind}_factor" in rope:
            found[f"rope_factors_{kind}.weight"] = np.array(rope[f"{kind}_factor"], np.float32)
    return found


def tensors_of(folder: Path, config: Mapping[str, Any], *, own: bool = False) -> dict[str, np.ndarray]:
    """Return the folder's tensors, if it has experts or if `own` keeps Cairn's names.

    All experts of a layer are joined, as in GGUF.
    """
    if not own and not (config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts")):
        return load_file(folder / "model.safetensors")
    joined: dict[str, Any] = {}
    for name, array in open_weights(folder, load_spec(folder)).items():
        merged = re.sub(r"\.(experts|[kv]_b_proj|altup\w*_projections)\.\d+\.", r".\1.", name)
        if merged != name:
            joined.setdefault(merged, []).append(array)
        else:
            joined[name] = array.reshape(-1) if name.endswith("shared_expert_gate.weight") else array
    return {name: np.stack(one) if isinstance(one, list) else one for name, one in joined.items()}


def rope_factors(rope: Mapping[str, Any], size: int, base: float) -> np.ndarray:
    """Return the divisors of the frequencies in llama3's scaling."""
    old = rope["original_max_position_embeddings"]
    slow, fast = old / rope["low_freq_factor"], old / rope["high_freq_factor"]
    factors = []
    for wave in 2 * np.pi * base ** (np.arange(0, size, 2) / size):
        smooth = (old / wave - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
        between = 1 / ((1 - smooth) / rope["factor"] + smooth)
        factors.append(1.0 if wave < fast else rope["factor"] if wave > slow else between)
    return np.array(factors, np.float32)


def tokenizer(folder: Path, config: Mapping[str, Any], pre: str) -> dict[str, Any]:
    """Return tokenizer.json and tokenizer_config.json as metadata; `pre` names the split of a byte-level one."""
    data = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    path = folder / "tokenizer_config.json"
    named = json.loads(path.read_text("utf-8")) if path.exists() else {}
    model, added = data["model"], {token["id"]: token for token in data["added_tokens"]}
    texts = {number: text for text, number in model["vocab"].items()} | {
        i: token["content"] for i, token in added.items()
    }
    count = config.get("vocab_size", max(texts) + 1)
    tokens = [texts.get(number, f"[PAD{number}]") for number in range(count)]
    kinds = [PLAIN if number in texts else UNUSED for number in range(count)]
    for number, one in added.items():
        kinds[number] = CONTROL if one["special"] else USER
    pieces = model.get("byte_fallback", False)
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]
    fields: dict[str, Any] = {"tokenizer.ggml.model": "llama" if pieces else "gpt2", "tokenizer.ggml.tokens": tokens}
    if pieces:
        rank = {"".join(pair.split(" ")): n for n, pair in reversed(list(enumerate(merges)))}
        fields["tokenizer.ggml.scores"] = [-float(rank.get(token, -1000)) for token in tokens]
        kinds = [BYTE if token[:3] == "<0x" else kind for token, kind in zip(tokens, kinds, strict=True)]
        kinds = [UNKNOWN if token == "<unk>" else kind for token, kind in zip(tokens, kinds, strict=True)]
        fields["tokenizer.ggml.add_space_prefix"] = True
    else:
        fields |= {"tokenizer.ggml.pre": pre, "tokenizer.ggml.merges": merges}
    fields["tokenizer.ggml.token_type"] = kinds
    numbers = {text: number for number, text in texts.items()}
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        text = named.get(name)
        text = text["content"] if isinstance(text, dict) else text
        if text in numbers:
            fields[f"tokenizer.ggml.{key}_token_id"] = numbers[text]
    if "add_bos_token" in named:
        fields["tokenizer.ggml.add_bos_token"] = named["add_bos_token"]
    if isinstance(named.get("chat_template"), str):
        fields["tokenizer.chat_template"] = named["chat_template"]
    return fields


POOLINGS = {"mean": 1, "cls": 2, "last": 3}
ENCODERS = {"BertModel": "bert", "NomicBertModel": "nomic-bert", "ModernBertModel": "modern-bert"}


def write_encoder_gguf(folder: Path, path: Path, pooling: str = "mean", kind: Type = Type.F32, **extra: Any) -> Path:
    """Write the encoder in a folder (safetensors, and a WordPiece tokenizer.json if there is one) as a GGUF file.

    `extra` are keys below the architecture's name, with "__" for each dot.
    """
    config = json.loads((folder / "config.json").read_text())
    arch = ENCODERS[config["architectures"][0]]
    writer = gguf.GGUFWriter(path, arch)
    fields: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.layer_norm_epsilon": float(config.get("layer_norm_eps", config.get("norm_eps", 1e-5))),
        "attention.causal": False,
        "pooling_type": POOLINGS[pooling],
    }
    if arch == "nomic-bert":
        fields["rope.freq_base"] = float(config["rope_parameters"]["rope_theta"])
    if arch == "modern-bert":
        ropes = config["rope_parameters"]
        fields["rope.freq_base"] = float(ropes["full_attention"]["rope_theta"])
        fields["rope.freq_base_swa"] = float(ropes["sliding_attention"]["rope_theta"])
        fields["attention.sliding_window"] = config["local_attention"]
        fields["attention.sliding_window_pattern"] = config.get("global_attn_every_n_layers", 3)
    fields |= {key.replace("__", "."): value for key, value in extra.items()}
    put(writer, {f"{arch}.{key}": value for key, value in fields.items()})
    if (folder / "tokenizer.json").exists():
        put(writer, pieces(folder, config["vocab_size"]))
    names = gguf.get_tensor_name_map(
        getattr(gguf.MODEL_ARCH, arch.upper().replace("-", "_")), config["num_hidden_layers"]
    )
    for name, array in load_file(folder / "model.safetensors").items():
        if name.startswith("pooler."):
            continue
        own = names.get_name(name, (".weight", ".bias"))
        assert own is not None, name
        tensor_kind = kind if array.ndim == 2 and ".attn" in own else Type.F32
        packed = (
            array.astype(np.float32)
            if tensor_kind == Type.F32
            else gguf.quants.quantize(array.astype(np.float32), tensor_kind)
        )
        writer.add_tensor(own, packed, raw_dtype=None if tensor_kind == Type.F32 else tensor_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def pieces(folder: Path, count: int) -> dict[str, Any]:
    """Return a WordPiece tokenizer.json as metadata, as llama.cpp's converter writes it."""
    data = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    texts = {number: text for text, number in data["model"]["vocab"].items()}
    special = {token["id"] for token in data["added_tokens"]}
    tokens = [texts.get(number, f"[PAD{number}]") for number in range(count)]
    kinds = [CONTROL if n in special else PLAIN if n in texts else UNUSED for n in range(count)]
    named = {"cls": "[CLS]", "seperator": "[SEP]", "padding": "[PAD]", "unknown": "[UNK]"}
    phantom = [
        token if kind == CONTROL else token[2:] if token.startswith("##") else f"\u2581{token}"
        for token, kind in zip(tokens, kinds, strict=True)
    ]
    return {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": phantom,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.token_type_count": 2,
        **{f"tokenizer.ggml.{key}_token_id": tokens.index(text) for key, text in named.items()},
    }
