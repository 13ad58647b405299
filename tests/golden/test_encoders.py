"""Every family of encoders against transformers in float32, with the same vector in any batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cairn.engine.encoder import EncoderEngine
from tests.encoders import ENCODERS, JUDGES, load_encoder, text_row, write_encoder
from tests.tiny_models import KERNELS, prompt

LENGTHS = (1, 2, 15, 16, 17, 33, 64, 65, 100, 130)
CLOSE = 2e-5


def vectors(engine: EncoderEngine, rows: list[Any]) -> list[np.ndarray]:
    results = engine.embed(rows).wait()
    assert not any(one.error for one in results)
    return [np.frombuffer(one.hidden, np.float32) for one in results]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", ENCODERS)
def test_vectors_equal_those_of_transformers(name: str, kernels: str, tmp_path: Path) -> None:
    family, fields = ENCODERS[name]
    model = write_encoder(tmp_path, family, **fields)
    engine = load_encoder(tmp_path, kernels=kernels)
    texts = [prompt(length, 117, seed=length) for length in LENGTHS]
    texts = [[token + 3 for token in text] for text in texts]  # RoBERTa numbers positions after its padding id
    for text, got in zip(texts, vectors(engine, [text_row(text) for text in texts]), strict=True):
        with torch.no_grad():
            states = model(torch.tensor([text])).last_hidden_state[0].numpy()
        np.testing.assert_allclose(got, states.mean(axis=0), rtol=0, atol=CLOSE)
        assert states.std() > 0.1, "states that hardly differ would hide mistakes"
    engine.close()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", JUDGES)
def test_scores_equal_those_of_transformers(name: str, kernels: str, tmp_path: Path) -> None:
    family, fields = JUDGES[name]
    model = write_encoder(tmp_path, family, "ForSequenceClassification", **fields)
    engine = load_encoder(tmp_path, kernels=kernels)
    assert engine.info.generates is False
    texts = [[token + 3 for token in prompt(length, 117, seed=length)] for length in LENGTHS]
    seconds = [len(text) // 2 if family == "Bert" else 0 for text in texts]
    rows = [text_row(text, second) for text, second in zip(texts, seconds, strict=True)]
    for text, second, got in zip(texts, seconds, vectors(engine, rows), strict=True):
        types = {"token_type_ids": torch.tensor([[int(n >= second > 0) for n in range(len(text))]])}
        with torch.no_grad():
            scores = model(torch.tensor([text]), **(types if family == "Bert" else {})).logits[0].numpy()
        np.testing.assert_allclose(got, scores, rtol=0, atol=CLOSE)
    engine.close()


@pytest.mark.parametrize("pooling", ["cls", "last"])
def test_pooling_is_that_of_the_folder(pooling: str, tmp_path: Path) -> None:
    model = write_encoder(tmp_path, "Bert", pooling=pooling)
    engine = load_encoder(tmp_path)
    text = prompt(20, 120)
    (got,) = vectors(engine, [text_row(text)])
    with torch.no_grad():
        states = model(torch.tensor([text])).last_hidden_state[0].numpy()
    np.testing.assert_allclose(got, states[0 if pooling == "cls" else -1], rtol=0, atol=CLOSE)


@pytest.mark.sweep("kernels")
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("weights", ["f32", "bf16", "int8"])
@pytest.mark.parametrize("name", ["bert", "modern bert", "nomic bert"])
def test_a_vector_is_the_same_alone_and_in_any_company(name: str, weights: str, kernels: str, tmp_path: Path) -> None:
    """Bit for bit: alone, among others, in another order, on several threads."""
    family, fields = ENCODERS[name]
    write_encoder(tmp_path, family, **fields | {"hidden_size": 64, "intermediate_size": 96})
    engine = load_encoder(tmp_path, kernels=kernels, weights=weights)
    rows = [text_row(prompt(length, 120, seed=length)) for length in LENGTHS]
    alone = [engine.embed([row]).wait()[0].hidden for row in rows]
    assert [one.hidden for one in engine.embed(rows).wait()] == alone
    back = [one.hidden for one in engine.embed(rows[::-1]).wait()]
    assert back[::-1] == alone
    engine.close()
    other = load_encoder(tmp_path, kernels=kernels, weights=weights, threads=3)
    assert [one.hidden for one in other.embed(rows[3:]).wait()] == alone[3:]
    other.close()


def test_a_token_without_a_number_harms_its_own_text_alone(tmp_path: Path) -> None:
    write_encoder(tmp_path, "Bert")
    engine = load_encoder(tmp_path)
    rows = [text_row(prompt(length, 100, seed=length)) for length in (20, 30)]
    before = [one.hidden for one in engine.embed(rows).wait()]
    table = next(call.arguments[0] for call in engine._body.calls if call.kernel == "embed")
    numbers = getattr(table, "array", table)
    numbers[110] = np.nan
    results = engine.embed([rows[0], text_row([5, 110, 6]), rows[1]]).wait()
    assert results[1].error and not results[1].hidden
    assert [results[0].hidden, results[2].hidden] == before
