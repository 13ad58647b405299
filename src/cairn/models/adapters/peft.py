"""Adapters as PEFT writes them: a folder with adapter_config.json and adapter_model.safetensors.

Formats: https://huggingface.co/docs/peft, "PEFT checkpoint format" and `LoraConfig`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cairn.models.adapters.adapter import MAX_RANK, AdapterParts, AdapterWeights
from cairn.models.families.families import AHEAD, FAMILIES
from cairn.models.families.tensor_names import own_tensors
from cairn.models.files import Fields, read_json
from cairn.models.safetensors.weights import DTYPES, open_tensors, own_name
from cairn.types.errors import ModelError, ModelFileError
from cairn.types.model_spec import ModelSpec

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PICKLE = "adapter_model.bin"
_PREFIX = "base_model.model."
_MOST_PATTERNS = 1 << 12

_UNSUPPORTED = {
    "use_dora": "DoRA changes the length of the base's weights",
    "modules_to_save": "whole modules are stored beside the adapter",
    "use_qalora": "QA-LoRA pools its inputs",
    "fan_in_fan_out": "its matrices are transposed",
    "lora_bias": "its second matrices have biases",
    "trainable_token_indices": "it changes single rows of the embedding",
    "target_parameters": "it changes parameters that are no modules, such as fused experts",
    "layer_replication": "it repeats layers of the base",
    "alora_invocation_tokens": "it applies only behind certain tokens",
}
"""Fields that must be absent, false or empty, and what they mean."""
_CHANGED_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of init_lora_weights whose training started from another base than the published one."""
_PATTERN = re.compile(r"[\w.-]+")


def read_peft(folder: Path, spec: ModelSpec) -> AdapterWeights:
    """Read a PEFT folder for a base. Raise `ModelError` for what is not supported, named by its field or tensor."""
    scaling = _Scaling(folder / CONFIG)
    path = folder / WEIGHTS
    if not path.is_file():
        if (folder / _PICKLE).is_file():
            raise ModelFileError(
                f"{folder}: the adapter is in {_PICKLE}, a pickle, which is never opened; use {WEIGHTS}"
            )
        raise ModelFileError(f"{folder}: {WEIGHTS} is missing")
    found: dict[str, dict[str, NDArray[Any]]] = {}
    for name, array in open_tensors(path).items():
        module, half = _module(path, name)
        if array.dtype not in DTYPES.values() or array.ndim != 2:
            raise ModelFileError(f"{path}: the tensor {name[:120]!r} must be a matrix of F32, F16 or BF16")
        if half in found.setdefault(module, {}):
            raise ModelFileError(f"{path}: the tensor {name[:120]!r} is stored under two names")
        found[module][half] = array
    parts = AdapterParts(folder, spec)
    for module, pair in found.items():
        if len(pair) != 2:
            raise ModelFileError(f"{path}: lora_{'B' if 'A' in pair else 'A'} of {module[:120]!r} is missing")
        down, up = pair["A"], pair["B"].astype(np.float32)
        up *= np.float32(scaling.of(module, len(down)))
        for own, rows in _own_parts(spec, module, up):
            parts.add(module, own, down, rows)
    return parts.adapter()


def _module(path: Path, name: str) -> tuple[str, str]:
    """Return the module that a tensor belongs to, and which half it is."""
    module, dot, rest = name.removeprefix(_PREFIX).rpartition(".lora_")
    pieces = rest.split(".")
    if not dot or pieces[0] not in ("A", "B") or pieces[-1] != "weight" or len(pieces) > 3:
        raise ModelError(
            f"{path}: the tensor {name[:120]!r} is not supported: only lora_A and lora_B of linear layers are, not "
            "embeddings, biases, magnitudes or whole modules"
        )
    return module, pieces[0]


def _own_parts(spec: ModelSpec, module: str, up: NDArray[np.float32]) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yield our names of a module with their rows of its second matrix: a fused module is several of ours."""
    ahead = bool(FAMILIES[spec.architecture].ahead) * AHEAD
    for name, rows in own_tensors(spec, ahead, own_name(f"{module}.weight", spec), up):
        yield name.removesuffix(".weight"), rows


class _Scaling:
    """An adapter's config: the factor of each module. Raises `ModelError` for what is not supported."""

    def __init__(self, path: Path) -> None:
        self._fields = fields = Fields(read_json(path), path)
        if (kind := fields.text("peft_type", "LORA")) != "LORA":
            raise ModelError(f"{path}: peft_type is {kind[:40]!r}; only LORA is supported")
        for name, meaning in _UNSUPPORTED.items():
            if fields.values.get(name):
                raise ModelError(f"{path}: {name} is not supported: {meaning}")
        if (bias := fields.text("bias", "none")) != "none":
            raise ModelError(f"{path}: bias {bias[:40]!r} is not supported: the base's biases would change")
        start = fields.values.get("init_lora_weights")
        if isinstance(start, str) and start.startswith(_CHANGED_BASES):
            raise ModelError(
                f"{path}: init_lora_weights {start[:40]!r} is not supported: the adapter belongs to a changed base; "
                "convert it to a plain adapter when saving"
            )
        self._rank = fields.integer("r", 1, MAX_RANK, 8)
        self._alpha = fields.number("lora_alpha", -1e6, 1e6, 8)
        self._root = fields.flag("use_rslora", False)
        self._ranks, self._alphas = self._patterns("rank_pattern"), self._patterns("alpha_pattern")

    def of(self, module: str, rank: int) -> float:
        """Return a module's factor. Raise `ModelFileError` if its rank is not the config's."""
        wanted = _matched(self._ranks, module, self._rank)
        if rank != wanted:
            raise self._fields.error("r", f"{rank}, as the tensors of {module[:120]} have it")
        alpha = _matched(self._alphas, module, self._alpha)
        return alpha / (math.sqrt(rank) if self._root else rank)

    def _patterns(self, name: str) -> dict[str, float]:
        """Return the ends of module names that have a number of their own."""
        found: dict[str, float] = {}
        given = self._fields.object(name)
        if len(given.values) > _MOST_PATTERNS:
            raise self._fields.error(name, f"an object of at most {_MOST_PATTERNS} entries")
        for pattern in given.values:
            end = pattern.removeprefix("^").removesuffix("$").replace("\\.", ".")
            if not _PATTERN.fullmatch(end):
                raise ModelError(
                    f"{given.path}: {name} {pattern[:80]!r} is not supported: name a module, or the end of its name, "
                    "without wildcards"
                )
            found[end] = given.number(pattern, -1e6, 1e6)
        return found


def _matched(patterns: dict[str, float], module: str, default: float) -> float:
    """Return the number of the first pattern that is the module's name or its end after a dot."""
    return next((one for end, one in patterns.items() if f".{module}".endswith(f".{end}")), default)
