"""Adapters as llama.cpp writes them: one GGUF file with `general.type` adapter.

Format: github.com/ggml-org/llama.cpp, convert_lora_to_gguf.py. A tensor's pair is named `{tensor}.lora_a` [rank, in]
and `{tensor}.lora_b` [out, rank]; rows of q and k are ordered as in the base's GGUF file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cairn.models.adapters.adapter import AdapterParts, AdapterWeights
from cairn.models.families.tensor_names import unpermute
from cairn.models.gguf.reader import Gguf, read_gguf
from cairn.models.gguf.recurrent import parts as recurrent_parts
from cairn.models.gguf.spec import architecture
from cairn.models.gguf.weights import hub_names, is_turned
from cairn.models.quantization.dequant import dequantize
from cairn.models.safetensors.weights import expected_tensors
from cairn.types.errors import ModelError, ModelFileError
from cairn.types.model_spec import ModelSpec


def read_gguf_adapter(path: Path, spec: ModelSpec) -> AdapterWeights:
    """Read a GGUF adapter for a base. Raise `ModelError` for what is not supported, named by its key or tensor."""
    gguf = read_gguf(path)
    kind, form = gguf.metadata.get("general.type"), gguf.metadata.get("adapter.type")
    if kind != "adapter" or form != "lora":
        raise ModelError(
            f"{path}: general.type is {str(kind)[:40]!r} and adapter.type {str(form)[:40]!r}; expected a LoRA adapter"
        )
    if gguf.metadata.get("adapter.alora.invocation_tokens") is not None:
        raise ModelError(f"{path}: adapter.alora.invocation_tokens is not supported")
    alpha = gguf.fields.number("adapter.lora.alpha", -1e6, 1e6, 0)
    own = architecture(gguf)
    expected = expected_tensors(spec)
    parts = AdapterParts(path, spec)
    for name, pair in _pairs(gguf).items():
        down, up = (_floats(gguf, one) for one in pair)
        if down.ndim != 2 or up.ndim != 2:
            raise ModelError(f"{path}: the adapter of {name[:120]!r} is not supported: it changes no plain matrix")
        if alpha:
            up = up * np.float32(alpha / max(1, len(down)))
        names = hub_names(name, own)
        if (
            not names
            or "{}" in names[0]
            or (spec.recurrence and any(recurrent_parts(names[0], spec.recurrence, spec.hidden)))
        ):
            raise ModelError(f"{path}: the adapter of {name[:120]!r} is not supported on {spec.architecture}")
        at = 0
        for one in names:
            rows = up[at : at + expected.get(one, (len(up),))[0]] if len(names) > 1 else up
            at += len(rows)
            if own.interleaved and is_turned(one) and len(rows) % spec.head_dim == 0:
                rows = unpermute(rows, spec.head_dim, spec.turned)
            parts.add(name, one.removesuffix(".weight"), down, rows)
    return parts.adapter()


def _pairs(gguf: Gguf) -> dict[str, tuple[str, str]]:
    """Return the names of each changed tensor's two matrices."""
    found: dict[str, tuple[str, str]] = {}
    for name in gguf.tensors:
        base, _, half = name.rpartition(".lora_")
        if not base or half not in ("a", "b"):
            raise ModelError(
                f"{gguf.paths[0]}: the tensor {name[:120]!r} is not supported: it is no half of an adapter"
            )
        pair = (f"{base}.lora_a", f"{base}.lora_b")
        if not all(one in gguf.tensors for one in pair):
            raise ModelFileError(f"{gguf.paths[0]}: one half of the adapter of {base[:120]!r} is missing")
        found[base] = pair
    return found


def _floats(gguf: Gguf, name: str) -> NDArray[np.float32]:
    """Return a tensor's numbers in float32."""
    tensor, blocks = gguf.tensors[name], gguf.blocks(name)
    flat: NDArray[Any] = (
        blocks.view(tensor.kind.dtype) if tensor.kind.dtype is not None else dequantize(tensor.kind, blocks)
    )
    return flat.reshape(tensor.shape).astype(np.float32)
