"""Sampling settings that makers recommend outside a model's files, in its card on the hub.

A row is for one model, identified by its exact hub id or by the digest of its file; never for a family, because
fine-tuned models are sampled otherwise. A repository of the same weights in GGUF has a row of its own. A model's own
files take precedence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from cairn.models.files import is_gguf
from cairn.models.hub.addresses import KNOWN
from cairn.models.hub.digests import file_digest
from cairn.types.model_spec import MakersSampling, ModelSpec

_READ = "2026-11-28"
_HUB = "https://huggingface.co/"


def _rows(
    hub_ids: Iterable[str], values: dict[str, float], *, thinking: dict[str, float] | None = None, source: str = ""
) -> dict[str, MakersSampling]:
    """Return a row for each id. `source`: URL, where it is not the id's own card."""
    return {
        name: MakersSampling(values=values, thinking=thinking or {}, source=source or _HUB + name, read=_READ)
        for name in hub_ids
    }


def _draw(temperature: float, top_p: float, top_k: float, **others: float) -> dict[str, float]:
    return {"temperature": temperature, "top_p": top_p, "top_k": top_k, **others}


_SMOLLM2 = {"temperature": 0.2, "top_p": 0.9}
_R1 = {"temperature": 0.6, "top_p": 0.95}
_GPT_OSS = {"temperature": 1.0, "top_p": 1.0}
_NEMO = {"temperature": 0.3}
_QWEN3_SIZES = ("0.6B", "1.7B", "4B", "8B", "14B", "32B", "30B-A3B", "235B-A22B")
_R1_SIZES = ("Qwen-1.5B", "Qwen-7B", "Qwen-14B", "Qwen-32B", "Llama-8B", "Llama-70B")
_PENALTY = {"presence_penalty": 1.5}
"""What Qwen's card recommends besides, of Qwen3 for files in few bits."""

BY_HUB_ID: Mapping[str, MakersSampling] = {
    **_rows(("HuggingFaceTB/SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-1.7B-Instruct"), _SMOLLM2),
    **_rows(
        ("HuggingFaceTB/SmolLM2-1.7B-Instruct-GGUF",), _SMOLLM2, source=f"{_HUB}HuggingFaceTB/SmolLM2-1.7B-Instruct"
    ),
    **_rows(("HuggingFaceTB/SmolLM3-3B",), {"temperature": 0.6, "top_p": 0.95}),
    **_rows((f"Qwen/Qwen3-{size}" for size in _QWEN3_SIZES), _draw(0.7, 0.8, 20), thinking=_draw(0.6, 0.95, 20)),
    **_rows(
        (f"Qwen/Qwen3-{size}-GGUF" for size in _QWEN3_SIZES),
        _draw(0.7, 0.8, 20, **_PENALTY),
        thinking=_draw(0.6, 0.95, 20, **_PENALTY),
    ),
    **_rows(
        ("Qwen/Qwen3.6-27B", "Qwen/Qwen3.8-27B"),
        _draw(0.7, 0.8, 20, **_PENALTY),
        thinking=_draw(1.0, 0.95, 20),
    ),
    **_rows(("google/gemma-4-31B-it",), _draw(1.0, 0.95, 64)),
    **_rows(
        ("openai/gpt-oss-20b", "openai/gpt-oss-120b", "ggml-org/gpt-oss-20b-GGUF"),
        _GPT_OSS,
        source="https://github.com/openai/gpt-oss",
    ),
    **_rows(("mistralai/Mistral-Nemo-Instruct-2407",), _NEMO),
    **_rows(
        ("bartowski/Mistral-Nemo-Instruct-2407-GGUF",), _NEMO, source=f"{_HUB}mistralai/Mistral-Nemo-Instruct-2407"
    ),
    **_rows((f"deepseek-ai/DeepSeek-R1-Distill-{size}" for size in _R1_SIZES), _R1),
    **_rows(
        (f"bartowski/DeepSeek-R1-Distill-Qwen-{size}-GGUF" for size in ("1.5B", "7B")),
        _R1,
        source=f"{_HUB}deepseek-ai/DeepSeek-R1",
    ),
}
BY_DIGEST: Mapping[tuple[int, str], MakersSampling] = {
    (KNOWN["smollm2"].size, KNOWN["smollm2"].sha256): BY_HUB_ID["HuggingFaceTB/SmolLM2-135M-Instruct"]
}
"""Size in bytes and SHA-256 of a model's only file -> its row."""


def makers_sampling(spec: ModelSpec, place: Path) -> MakersSampling | None:
    """Return the makers' sampling settings for a model; None if unknown.

    Only a file whose size is in the table is hashed. Raise `ModelFileError` if it cannot be read.
    """
    # A GGUF file of a repository is called ORG/NAME:FILE.
    if (found := BY_HUB_ID.get(spec.name.partition(":")[0])) is not None:
        return found
    if not is_gguf(place) or not place.is_file():
        return None
    size = place.stat().st_size
    if all(known != size for known, _ in BY_DIGEST):
        return None
    return BY_DIGEST.get((size, file_digest(place).hex()))
