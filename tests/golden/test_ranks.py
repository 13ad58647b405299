"""Every family over two and four ranks: one rank's tokens, and the same bits however a step is composed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: ranks meet through it")

from cairn.engine.shards import check_parallel
from cairn.models.spec.config import load_spec
from cairn.types.errors import ModelError
from tests.engine.rank_threads import ThreadedRanks, dividing
from tests.tiny_models import MODELS, Driver, load, prompt, write_model

BOUND = 2e-4
"""Largest difference of a logit from one rank's, as a share of the largest logit."""
LENGTH = 70
OFTEN = {
    "llama 2",
    "gemma 3",
    "glm 4.7 flash",
    "deepseek 3",
    "gpt-oss",
    "qwen 2 moe, shared expert",
    "phi 4",
    "llama 4",
}
"""Families tested each time; the others by `make prove`."""
ALONE = {"recurrent layers", "layers that differ", "a norm over all heads together", "a norm for each head"}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_ranks_give_the_tokens_of_one(
    name: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prove: bool
) -> None:
    """In one step, in chunks, from a cache and beside a neighbour, bit for bit; a family that cannot is refused."""
    assert set(MODELS) >= OFTEN
    fields = MODELS[name]
    spec = load_spec(write_model(tmp_path / "as it is", **fields))
    folder = write_model(tmp_path / "model", **dividing(fields, spec))
    try:
        check_parallel(load_spec(folder), ranks)
    except ModelError as error:
        assert spec.architecture in str(error) and any(kind in str(error) for kind in ALONE), error
        assert spec.recurrence is not None or spec.uneven is not None or spec.qk_norm_whole or spec.qk_norm_apart
        return
    if not prove and name not in OFTEN:
        pytest.skip("only with --prove")
    tokens = prompt(LENGTH)
    alone = Driver(load(folder, kv_dtype="f32"), monkeypatch)
    theirs = alone.logits(tokens, [LENGTH], alone.tables(LENGTH))
    engine = ThreadedRanks(folder, ranks)
    driver = Driver(engine, monkeypatch)  # type: ignore[arg-type]
    ours = driver.logits(tokens, [LENGTH], first := driver.tables(LENGTH))
    assert np.abs(ours - theirs).max() <= BOUND * np.abs(theirs).max()
    lead = np.diff(np.sort(theirs, axis=1)[:, -2:], axis=1)[:, 0]
    clear = lead > 2 * BOUND * np.abs(theirs).max()
    assert clear.sum() > LENGTH // 2
    assert (ours.argmax(axis=1) == theirs.argmax(axis=1))[clear].all()
    np.testing.assert_array_equal(driver.logits(tokens, [33, 1, 14, 22], driver.tables(LENGTH)), ours)
    fresh, driver.seen = driver.tables(LENGTH), []
    for group, copied in enumerate(zip(first, fresh, strict=True)):
        engine.copy_blocks(group, [(copied[0][0], copied[1][0])]).wait()
    driver.step([driver.row(tokens, 16, LENGTH, fresh, 16), driver.row(prompt(9, seed=5), 0, 9, driver.tables(9), 0)])
    np.testing.assert_array_equal(driver.seen[0][1], ours[16:])
    assert engine.info.identity != alone.engine.info.identity, "one rank would find the KV of several"
    engine.close()
    alone.engine.close()
