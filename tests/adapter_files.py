"""Tiny random adapters for tests, in the formats of PEFT and llama.cpp."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from cairn.models.safetensors.weights import expected_tensors
from cairn.models.spec.config import load_spec

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def shapes(base: Path, targets: Sequence[str] = ALL) -> dict[str, tuple[int, int]]:
    """Return the shapes [out, in] of the model's matrices whose module names end in one of `targets`."""
    sizes = {}
    for name, shape in expected_tensors(load_spec(base, identify=False)).items():
        module = name.removesuffix(".weight")
        if name.startswith("model.layers.") and name.endswith(".weight") and module.rpartition(".")[2] in targets:
            sizes[module] = (shape[0], shape[1])
    return sizes


def pairs(base: Path, targets: Sequence[str] = ALL, rank: int = 4, seed: int = 0, size: float = 0.3) -> dict[str, Any]:
    """Return random matrices (A, B) for each such module."""
    rng = np.random.default_rng(seed)
    return {
        module: (
            (rng.standard_normal((rank, inner)) / np.sqrt(inner)).astype(np.float32),
            (size * rng.standard_normal((out, rank))).astype(np.float32),
        )
        for module, (out, inner) in shapes(base, targets).items()
    }


def write_peft(
    folder: Path, matrices: Mapping[str, tuple[np.ndarray, np.ndarray]], dtype: Any = np.float32, **config: Any
) -> Path:
    """Write these pairs as a PEFT folder."""
    folder.mkdir(parents=True, exist_ok=True)
    rank = max(len(down) for down, _ in matrices.values())
    plain = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none", "target_modules": list(ALL)}
    (folder / "adapter_config.json").write_text(json.dumps(plain | config))
    tensors = {}
    for module, (down, up) in matrices.items():
        tensors[f"base_model.model.{module}.lora_A.weight"] = down.astype(dtype)
        tensors[f"base_model.model.{module}.lora_B.weight"] = up.astype(dtype)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def random_peft(folder: Path, base: Path, seed: int, **options: Any) -> Path:
    """Write a random adapter of a base's linear layers."""
    return write_peft(folder, pairs(base, seed=seed, **options))
