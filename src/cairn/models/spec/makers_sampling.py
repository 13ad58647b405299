"""Sampling settings that makers recommend outside a model's files, in its card on the hub.

A row is for one model, identified by its exact hub id or by the digest of its file; never for a family, because
fine-tuned models are sampled otherwise. A model's own files take precedence.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from cairn.models.files import is_gguf
from cairn.models.hub.addresses import KNOWN
from cairn.models.hub.digests import file_digest
from cairn.types.model_spec import MakersSampling, ModelSpec

_SMOLLM2 = MakersSampling(
    values={"temperature": 0.2, "top_p": 0.9},
    source="https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct",
    read="2026-11-28",
)
BY_HUB_ID: Mapping[str, MakersSampling] = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": _SMOLLM2,
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": msgspec.structs.replace(
        _SMOLLM2, source="https://huggingface.co/HuggingFaceTB/SmolLM2-1.7B-Instruct"
    ),
}
BY_DIGEST: Mapping[tuple[int, str], MakersSampling] = {(KNOWN["smollm2"].size, KNOWN["smollm2"].sha256): _SMOLLM2}
"""Size in bytes and SHA-256 of a model's only file -> its row."""


def makers_sampling(spec: ModelSpec, place: Path) -> MakersSampling | None:
    """Return the makers' sampling settings for a model; None if unknown.

    Only a file whose size is in the table is hashed. Raise `ModelFileError` if it cannot be read.
    """
    if (found := BY_HUB_ID.get(spec.name)) is not None:
        return found
    if not is_gguf(place) or not place.is_file():
        return None
    size = place.stat().st_size
    if all(known != size for known, _ in BY_DIGEST):
        return None
    return BY_DIGEST.get((size, file_digest(place).hex()))
