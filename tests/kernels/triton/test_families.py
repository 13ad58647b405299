"""Whole models over the Triton kernels, in the interpreter: near the reference, with the same bits in every
schedule.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: kernels on devices are not tested")
pytest.importorskip("triton", reason="triton is not installed: kernels for GPUs are not tested")

from cairn.kernels import devices
from tests.tiny_models import MODELS, Driver, load, prompt, write_model

BOUND = 2e-4
"""Largest error of a logit, relative to the largest: float32 sums have another order, in every layer."""
LENGTH = 37
OFTEN = {"llama 2", "qwen 3.5, one head of keys"}
"""Families that are always tested; `make gpu-gate` tests the others."""


@pytest.mark.parametrize("name", MODELS)
def test_a_family_is_near_the_reference_and_the_same_in_every_schedule(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prove: bool
) -> None:
    assert set(MODELS) >= OFTEN
    if not prove and name not in OFTEN:
        pytest.skip("only with --prove")
    folder, tokens = write_model(tmp_path, **MODELS[name]), prompt(LENGTH)
    reference = Driver(load(folder, kernels="reference", kv_dtype="f32"), monkeypatch)
    theirs = reference.logits(tokens, [LENGTH], reference.tables(LENGTH))
    reference.engine.close()
    engine = load(folder, device=devices.INTERPRETED, kv_dtype="f32")
    driver = Driver(engine, monkeypatch)
    whole = driver.logits(tokens, [LENGTH], first := driver.tables(LENGTH))
    assert np.abs(whole - theirs).max() <= BOUND * np.abs(theirs).max()
    chunked = driver.logits(tokens, [19, 1, 1, 16], driver.tables(LENGTH))
    np.testing.assert_array_equal(chunked, whole)
    fresh, driver.seen = driver.tables(LENGTH), []
    if not any(group.kind == "state" for group in engine.info.groups):
        for group, copied in enumerate(zip(first, fresh, strict=True)):
            engine.copy_blocks(group, [(copied[0][0], copied[1][0])]).wait()
        driver.step(
            [driver.row(tokens, 16, LENGTH, fresh, 16), driver.row(prompt(9, seed=5), 0, 9, driver.tables(9), 0)]
        )
        np.testing.assert_array_equal(driver.seen[0][1], whole[16:])
    engine.close()
