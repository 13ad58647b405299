"""Reading an adapter of either form."""

from __future__ import annotations

from pathlib import Path

from cairn.models.adapters.adapter import AdapterWeights
from cairn.models.adapters.gguf import read_gguf_adapter
from cairn.models.adapters.peft import CONFIG, WEIGHTS, read_peft
from cairn.models.files import is_gguf, reading
from cairn.types.errors import ModelError, ModelFileError
from cairn.types.model_spec import ModelSpec


def read_adapter(place: Path, spec: ModelSpec) -> AdapterWeights:
    """Read the adapter at `place`, a PEFT folder or a GGUF file, for a base. Raise `ModelError`."""
    if spec.encoder is not None:
        raise ModelError(f"{spec.name} is an encoder; adapters are for models that generate text")
    if is_gguf(place):
        return read_gguf_adapter(place, spec)
    with reading(place):
        if place.is_dir() and (place / CONFIG).is_file():
            return read_peft(place, spec)
    raise ModelFileError(
        f"{place}: no adapter is there; expected a folder with {CONFIG} and {WEIGHTS}, or a .gguf file"
    )
