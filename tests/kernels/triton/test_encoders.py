"""Encoders, and decoders that make embeddings, over the Triton kernels in the interpreter.

Results are near the reference, and bit for bit equal alone and in batches.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: kernels on devices are not tested")
pytest.importorskip("triton", reason="triton is not installed: kernels for GPUs are not tested")

from cairn.config.config import Config
from cairn.engine.load_engine import load_engine
from cairn.kernels import devices
from tests.encoders import ENCODERS, JUDGES, text_row, write_encoder, write_modules, write_reranker
from tests.golden.test_embedders import write_gemma
from tests.tiny_models import MODELS, prompt, write_model

BOUND = 2e-4
LENGTHS = (1, 18)
OFTEN = "qwen 3 reranker"
"""The encoder that is always tested; `make gpu-gate` tests the others."""


def _gemma(folder: Path) -> None:
    write_gemma(folder)
    write_modules(folder)


def _qwen(folder: Path) -> None:
    write_model(folder, **MODELS["qwen 3, head size of its own"])
    write_modules(folder, "last")


FOLDERS: dict[str, Callable[[Path], Any]] = {
    **{name: lambda folder, own=own: write_encoder(folder, own[0], **own[1]) for name, own in ENCODERS.items()},
    **{
        f"judge, {name}": lambda folder, own=own: write_encoder(folder, own[0], "ForSequenceClassification", **own[1])
        for name, own in JUDGES.items()
    },
    "gemma that embeds": _gemma,
    "qwen 3 that embeds": _qwen,
    "qwen 3 reranker": write_reranker,
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_text_is_near_the_reference_and_the_same_in_any_company(name: str, tmp_path: Path, prove: bool) -> None:
    if not prove and name != OFTEN:
        pytest.skip("only with --prove")
    FOLDERS[name](folder := tmp_path / "model")
    rows = [text_row([token + 3 for token in prompt(length, 110, seed=length)]) for length in LENGTHS]
    results = []
    for options in ({"kernels": "reference"}, {"device": devices.INTERPRETED}):
        config = Config(step_tokens=256, max_running=4, threads=1, kv_gb=0.01, kv_dtype="f32", context=100, **options)
        spec, engine = load_engine(config, folder)
        batch = rows
        if not spec.whole:  # a reranking decoder keeps KV
            tables = [tuple([[at, at + 1, at + 2]] * len(engine.info.groups)) for at in range(0, 3 * len(rows), 3)]
            batch = [msgspec.structs.replace(row, tables=table) for row, table in zip(rows, tables, strict=True)]
        answers = engine.embed(batch).wait()
        alone = [engine.embed([row]).wait()[0].hidden for row in batch]
        assert not any(answer.error for answer in answers)
        assert [answer.hidden for answer in answers] == alone
        results.append([np.frombuffer(answer.hidden, np.float32) for answer in answers])
        engine.close()
    for ours, theirs in zip(results[1], results[0], strict=True):
        assert np.abs(ours - theirs).max() <= BOUND * max(1.0, float(np.abs(theirs).max()))
        assert len(ours) == 1 or ours.std() > 0.001, "nearly equal numbers would hide mistakes"
