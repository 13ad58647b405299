"""Models with packed or rounded weights: near the numbers of their files, and the same in any batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from tests.golden.test_same_answer import mixed_batch, same_bits
from tests.models.packing.test_weight_format import PACKED, SIZES, packed_model
from tests.tiny_models import KERNELS, MODELS, Driver, load, prompt, write_model

FORMS = ("bf16", "int8", "int4")
LENGTH = 60
ODD = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 32, "vocab_size": 171, "tie_word_embeddings": True}


def logits(model: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> np.ndarray:
    engine = load(model, **options)
    driver = Driver(engine, monkeypatch)
    result = driver.logits(prompt(LENGTH, engine.info.vocab), [LENGTH], driver.tables(LENGTH))
    engine.close()
    return result


@pytest.mark.sweep("kernels")
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("kind", PACKED, ids=[kind.name for kind in PACKED])
def test_packed_weights_answer_as_the_numbers_they_stand_for(
    kind: Any, kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside packed weights activations are rounded to 8 bits, which moves logits by about a hundredth.

    A wrong scale, order of codes or row would move them by their own size.
    """
    path = packed_model(tmp_path, Type[kind.name])
    want = logits(path, monkeypatch, weights="f32", kernels="reference")
    got = logits(path, monkeypatch, weights="stored", kernels=kernels)
    assert np.isfinite(want).all() and want.std() > 0
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    assert error < 0.04


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("form", FORMS)
def test_rounded_weights_answer_nearly_as_the_stored_ones(
    form: str, kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path, **SIZES)
    want = logits(folder, monkeypatch, weights="f32", kernels="reference")
    got = logits(folder, monkeypatch, weights=form, kernels=kernels)
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    assert 0 < error < {"bf16": 0.02, "int8": 0.04, "int4": 0.3}[form]


@pytest.mark.sweep("kernels")
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_weights_of_any_family_give_the_same_bits(
    name: str, kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small models are held in float32 unasked, so that other tests of families hardly multiply bfloat16."""
    engine = load(write_model(tmp_path, **MODELS[name]), kernels=kernels, weights="bf16")
    driver = Driver(engine, monkeypatch)
    tokens = prompt(LENGTH, engine.info.vocab)
    whole = driver.logits(tokens, [LENGTH], driver.tables(LENGTH))
    assert np.isfinite(whole).all() and whole.std() > 0
    for chunks in ([1] * LENGTH, [17, 1, 32, 10], [33, 27]):
        assert same_bits(driver.logits(tokens, chunks, driver.tables(LENGTH)), whole), chunks
    engine.close()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("form", ("f32", *FORMS, "Q4_K_M", "Q5_K_M"))
def test_any_schedule_gives_the_same_bits(
    form: str, kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prove: bool, figure: Any
) -> None:
    """With packed weights activations are rounded too, and that must not depend on the batch."""
    if form in ("Q4_K_M", "Q5_K_M"):
        most, more = Type[form[:4]], ("v_proj", "down", "embed")
        model = packed_model(tmp_path, lambda name, array: Type.Q6_K if any(one in name for one in more) else most)
        driver = Driver(load(model, weights="stored", kernels=kernels), monkeypatch)
    else:
        driver = Driver(load(write_model(tmp_path, **ODD), weights=form, kernels=kernels), monkeypatch)
    count = 200 if prove else 4
    for seed in range(count):
        rng = np.random.default_rng(seed)
        lengths = [int(rng.integers(1, 60)) for _ in range(int(rng.integers(1, 7)))]
        driver._next = [0] * len(driver._next)
        together = mixed_batch(driver, rng, lengths)
        driver._next = [0] * len(driver._next)
        for one, length in enumerate(lengths):
            alone = driver.logits(prompt(length, seed=one), [length], driver.tables(length))
            assert same_bits(together[one], alone), (seed, one)
    figure(f"same answer, {form} weights, {kernels} kernels", f"{count} schedules, logits equal bit for bit")
