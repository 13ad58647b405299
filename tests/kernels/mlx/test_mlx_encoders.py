"""Encoders on MLX's CPU: embeddings and scores equal the reference's, whatever else is in the batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="mlx is not installed: its encoders are not tested")
pytest.importorskip("torch", reason="torch is not installed: it writes these models")

from tests.encoders import ENCODERS, JUDGES, load_encoder, text_row, write_encoder
from tests.golden.test_encoders import vectors
from tests.tiny_models import prompt

LENGTHS = (1, 7, 33, 120)
BOUND = 2e-4
CASES = [
    *(("Model", *ENCODERS[name]) for name in ENCODERS),
    *(("ForSequenceClassification", *one) for one in JUDGES.values()),
]


@pytest.mark.parametrize(("task", "family", "fields"), CASES, ids=str)
def test_vectors_and_scores_are_those_of_the_reference(
    task: str, family: str, fields: dict[str, object], tmp_path: Path
) -> None:
    write_encoder(tmp_path, family, task, **fields)
    rows = [text_row([token + 3 for token in prompt(length, 117, seed=length)]) for length in LENGTHS]
    results = []
    for options in ({"kernels": "reference"}, {"device": "mlx-cpu"}):
        engine = load_encoder(tmp_path, **options)
        results.append(vectors(engine, rows))
        alone = [vectors(engine, [row])[0] for row in rows]
        for together, apart in zip(results[-1], alone, strict=True):
            np.testing.assert_allclose(together, apart, rtol=0, atol=BOUND * np.abs(apart).max())
        engine.close()
    for ours, theirs in zip(*results, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=BOUND * np.abs(theirs).max())
