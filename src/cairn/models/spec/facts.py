"""What a model's files say of it: how many bytes they hold in which number format."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from cairn.models.files import is_gguf
from cairn.models.gguf.reader import read_gguf
from cairn.models.safetensors.coded_weights import CodedWeights
from cairn.models.safetensors.weights import open_weights
from cairn.types.model_spec import ModelSpec

_KINDS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def bytes_by_format(place: Path, spec: ModelSpec) -> Counter[str]:
    """Bytes of the tensors by number format. Raises CairnError where they cannot be read."""
    found: Counter[str] = Counter()
    if is_gguf(place):
        for tensor in read_gguf(place).tensors.values():
            found[tensor.kind.name] += tensor.size
    else:
        weights = open_weights(place, spec)
        if isinstance(weights, CodedWeights):
            for kind, size in map(weights.stored, weights):
                found[kind] += size
            return found
        for array in weights.values():
            found[_KINDS.get(array.dtype.name, array.dtype.name)] += array.nbytes
    return found
