"""Random batches, chunks and restores give the same bits, for each shape of model.

A schedule is several sequences that advance together by random amounts. Each must give the logits that it gives alone.
So must each one continued in another engine from what the first one kept of its beginning: its KV, the blocks that a
window still sees, its state.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cairn.types.model_spec import BLOCK_TOKENS
from cairn.types.step import NO_BLOCK
from tests.golden.test_same_answer import mixed_batch, same_bits
from tests.tiny_models import KERNELS, MODELS, Driver, load, prompt, write_model

SHAPES = {
    "qwen 3.5": "gated delta net",
    "granite 4 hybrid": "Mamba 2 and attention",
    "mamba 2": "Mamba 2 alone",
    "deepseek 3": "latents and experts",
    "mistral 4": "latents with scaled queries",
    "gemma 4 e": "windows and shared keys",
    "gemma 4 moe": "windows, and experts beside the MLP",
    "gemma 3n": "streams",
    "qwen 3 with window layers": "windows",
    "qwen 3 moe": "experts",
    "gpt-oss": "experts, windows and sinks",
    "llama 4": "pieces of the context, and experts",
    "gpt neox": "layer norms, and attention beside the MLP",
}
"""What is special about each model."""


def tables_of(driver: Driver, length: int, hit: int) -> tuple[list[int], ...]:
    """Return fresh blocks for a sequence, and states after `hit` tokens and at its end."""
    made = [list(table) for table in driver.tables(length)]
    for number, group in enumerate(driver.engine.info.groups):
        if group.kind == "state":
            first, last = made[number][0], -(-length // BLOCK_TOKENS) - 1
            own = [NO_BLOCK] * (last + 1)
            own[last] = first
            if hit:
                own[hit // BLOCK_TOKENS - 1] = first + 1
            made[number] = own
    return tuple(made)


def run(driver: Driver, tokens: list[int], start: int, tables: tuple[Any, ...]) -> np.ndarray:
    driver.seen.clear()
    driver.step([driver.row(tokens, start, len(tokens), tables, start)])
    return np.concatenate([logits for _, logits in driver.seen])


def restored(driver: Driver, other: Driver, tokens: list[int], hit: int, tables: tuple[Any, ...]) -> np.ndarray:
    """Return the logits from `hit` on, computed by another engine over what the first one kept."""
    own = tables_of(other, len(tokens), hit)
    blocks = hit // BLOCK_TOKENS
    for number, group in enumerate(driver.engine.info.groups):
        first = blocks - 1 if group.kind == "state" else 0
        if group.kind == "window":
            first = max(0, hit - group.window + 1) // BLOCK_TOKENS
        pages = driver.engine.read_blocks(number, tables[number][first:blocks]).wait()
        other.engine.write_blocks(number, own[number][first:blocks], pages).wait()
        if group.kind == "window":
            own[number][:first] = [NO_BLOCK] * first
    return run(other, tokens, hit, own)


@pytest.mark.parametrize("kernels", [KERNELS[0], "reference"])
@pytest.mark.parametrize("name", SHAPES)
def test_any_schedule_and_any_restore_gives_the_same_bits(
    name: str,
    kernels: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    prove: bool,
    figure: Callable[[str, str], None],
) -> None:
    if kernels == "reference" and not prove:
        pytest.skip("a sweep of `make prove`")
    folder = write_model(tmp_path, **MODELS[name])
    driver, other = (Driver(load(folder, kernels=kernels, context=256), monkeypatch) for _ in range(2))
    count, restores = (200 if kernels == KERNELS[0] else 20) if prove else 2, 0
    for seed in range(count):
        rng = np.random.default_rng(seed)
        lengths = [int(rng.integers(1, 80)) for _ in range(int(rng.integers(1, 7)))]
        driver._next = [0] * len(driver._next)
        together = mixed_batch(driver, rng, lengths)
        driver._next, other._next = [0] * len(driver._next), [3] * len(other._next)
        for one, length in enumerate(lengths):
            tokens = prompt(length, seed=one)
            hit = int(rng.integers(0, (length - 1) // BLOCK_TOKENS + 1)) * BLOCK_TOKENS
            tables = tables_of(driver, length, hit)
            alone = run(driver, tokens, 0, tables)
            assert same_bits(together[one], alone), (seed, one)
            if hit:
                assert same_bits(restored(driver, other, tokens, hit, tables), alone[hit:]), (seed, one, hit)
                restores += 1
    assert restores >= count, "schedules that restore hardly anything prove little"
    for one in (driver, other):
        one.engine.close()
    figure(f"same answer, {SHAPES[name]}, {kernels} kernels", f"{count} schedules, {restores} restores, bit for bit")


@pytest.mark.parametrize("name", ["mamba 2", "deepseek 3", "qwen 3 with window layers"])
def test_a_wrongly_restored_number_is_caught(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the test itself: one changed number in what is restored must give other logits."""
    folder, tokens, hit = write_model(tmp_path, **MODELS[name]), prompt(60), 32
    driver, other = (Driver(load(folder, kernels="reference", context=256), monkeypatch) for _ in range(2))
    tables = tables_of(driver, 60, hit)
    alone = run(driver, tokens, 0, tables)
    assert same_bits(restored(driver, other, tokens, hit, tables), alone[hit:])
    pool = driver.engine._kv[0]
    pool[tables[0][1]] *= np.float32(1.001)
    assert not same_bits(restored(driver, other, tokens, hit, tables), alone[hit:])
