"""Tiny models with a draft head (MTP), as their files have it.

The head's layer is a copy of the model's last attention layer. The other layers contribute little, so the model
predicts nearly what that layer alone makes of the embeddings, and the head is often right: embeddings have a root
mean square of 1, which a norm layer leaves alone, and the head passes on the embedding and, scaled by `state`, some of
the state before it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from safetensors.numpy import save_file

from cairn.models.families.mtp_spec import EMBEDDING_NORM, JOIN, STATE_NORM, mtp_spec
from cairn.models.files import is_gguf
from cairn.models.safetensors.weights import open_weights, stored_names
from cairn.models.spec.config import load_spec
from cairn.types.model_spec import ModelSpec
from tests.gguf_files import hub_tensors, named, write_gguf
from tests.tiny_models import MODELS, random_tensors, stored, write_config

HEADS: dict[str, dict[str, Any]] = {
    "qwen 3.5": MODELS["qwen 3.5"],
    "qwen 3.5 moe": MODELS["qwen 3.5 moe"],
    "qwen 3 next": MODELS["qwen 3 next"] | {"mlp_only_layers": []},
    "glm 4.5": MODELS["glm 4.5"],
    "deepseek 3": MODELS["deepseek 3"],
    "glm 4.7 flash": MODELS["glm 4.7 flash"],
}
_QUIET = 0.1
_OUTPUTS = ("o_proj.weight", "out_proj.weight", "down_proj.weight")


def write_with_head(folder: Path, name: str, *, state: float = 0.02, seed: int = 0, **fields: Any) -> Path:
    """Write a model of `HEADS` with its head in one model.safetensors."""
    fields = {**HEADS[name], "eos_token_id": None, **fields}
    write_config(folder, **fields)
    spec = load_spec(folder)
    tensors, layer = likely(spec, random_tensors(folder, seed))
    apart = "Qwen" in spec.architecture
    files, behind = stored(spec, tensors), stored_layer(spec, tensors, layer)
    own = head_tensors(spec, state)
    if apart:
        files |= {f"mtp.layers.0.{name}": array for name, array in behind.items()}
        names = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        files |= {f"mtp.{name}.weight": array for name, array in zip(names, own, strict=True)}
        files["mtp.norm.weight"] = tensors["model.norm.weight"]
    else:
        prefix = f"model.layers.{spec.layers}."
        names = ("eh_proj", "enorm", "hnorm")
        files |= {f"{prefix}{name}": array for name, array in behind.items()}
        files |= {f"{prefix}{name}.weight": array for name, array in zip(names, own, strict=False)}
        files[f"{prefix}shared_head.norm.weight"] = tensors["model.norm.weight"]
        files[f"{prefix}shared_head.head.weight"] = files["lm_head.weight"]
        files[f"{prefix}embed_tokens.weight"] = files["model.embed_tokens.weight"]
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    save_file({name: np.ascontiguousarray(array) for name, array in files.items()}, folder / "model.safetensors")
    return folder


def stored_layer(spec: ModelSpec, tensors: dict[str, np.ndarray], layer: int) -> dict[str, np.ndarray]:
    """Return the tensors of one attention layer as files have them, without the layer's prefix."""
    experts = None if spec.experts is None else msgspec.structs.replace(spec.experts, layers=(0,))
    one = msgspec.structs.replace(spec, layers=1, experts=experts, groups=spec.groups[:1], recurrence=None)
    prefix, first = f"model.layers.{layer}.", "model.layers.0."
    own = {name.replace(prefix, first): array for name, array in tensors.items() if name.startswith(prefix)}
    return {name.removeprefix(first): array for name, array in stored(one, own).items() if name.startswith(first)}


def likely(spec: ModelSpec, tensors: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], int]:
    """Damp all layers but the last attention layer; return the tensors and that layer's number."""
    sparse = () if spec.experts is None else spec.experts.layers
    layer = max(number for number in range(spec.layers) if spec.attends(number) and (not sparse or number in sparse))
    damped = {}
    for name, array in tensors.items():
        if name.endswith(_OUTPUTS) and f"layers.{layer}." not in name:
            array = _QUIET * array
        if name == "model.embed_tokens.weight":
            array = array / np.sqrt(np.square(array).mean(axis=1, keepdims=True))
        damped[name] = array.astype(np.float32)
    return damped, layer


def head_tensors(spec: ModelSpec, state: float) -> tuple[np.ndarray, ...]:
    """Return the joining matrix, its two norms and the last norm."""
    eye = np.eye(spec.hidden, dtype=np.float32)
    centred = 0.0 if spec.architecture.startswith("Qwen") else 1.0
    ones = np.full(spec.hidden, centred, np.float32)
    return np.concatenate([eye, state * eye], axis=1), ones, ones, ones


def write_gguf_with_head(folder: Path, path: Path, *, last_norm: bool = True, **options: Any) -> Path:
    """Write the model and head of `write_with_head` as a GGUF file; `options` are those of `write_gguf`."""
    config, spec = json.loads((folder / "config.json").read_text()), load_spec(folder)
    arch, tensors = named(config), hub_tensors(folder, config)
    head = open_weights(folder, head_spec(folder))
    sparse = () if spec.experts is None else spec.experts.layers
    layer = max(number for number in range(spec.layers) if spec.attends(number) and (not sparse or number in sparse))
    own, prefix = f"blk.{layer}.", f"blk.{spec.layers}."
    more = {prefix + name.removeprefix(own): array for name, array in tensors.items() if name.startswith(own)}
    names = {JOIN: "eh_proj", EMBEDDING_NORM: "enorm", STATE_NORM: "hnorm", "model.norm.weight": "shared_head_norm"}
    more |= {f"{prefix}nextn.{theirs}.weight": np.asarray(head[ours], np.float32) for ours, theirs in names.items()}
    if not last_norm:
        del more[f"{prefix}nextn.shared_head_norm.weight"]
    extra = {f"{arch}.block_count": spec.layers + 1, f"{arch}.nextn_predict_layers": 1}
    return write_gguf(folder, path, extra=extra, more=more, **options)


def head_spec(folder: Path) -> ModelSpec:
    """Return the spec of the head in a folder or a GGUF file."""
    head = mtp_spec(load_spec(folder), stored_names(folder), gguf=is_gguf(folder))
    assert isinstance(head, ModelSpec), head
    return head
