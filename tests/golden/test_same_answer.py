"""A token's logits have the same bits in any chunking, any batch and from any blocks."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cairn.kernels import blas, latent, paged, reference
from cairn.types.errors import ModelError
from cairn.types.step import NO_BLOCK, Row
from tests import tiny_models
from tests.tiny_models import GREEDY, KERNELS, MODELS, SCORED, Driver, prompt, write_model

LENGTH = 150
CHUNKINGS = ([1] * LENGTH, [16] * 9 + [6], [64, 64, 22], [7, 100, 43], [149, 1], [3, 13, 17, 1, 1, 115])


@pytest.fixture(params=[*product(KERNELS, ("f32", "bf16", "q8")), (KERNELS[0], "f16")], ids="-".join)
def load(request: pytest.FixtureRequest) -> Any:
    """Return a loader of engines with one kernel set and one type of KV."""
    kind, dtype = request.param

    def loaded(folder: Path, **options: Any) -> Any:
        try:
            return tiny_models.load(folder, kernels=kind, kv_dtype=dtype, **options)
        except ModelError as refusal:
            if "kv_dtype q8 holds heads of a multiple of 4 numbers" in str(refusal):
                pytest.skip("q8 does not hold heads of an odd size")
            raise

    return loaded


def same_bits(got: np.ndarray, want: np.ndarray) -> bool:
    return got.shape == want.shape and got.tobytes() == want.tobytes()


@pytest.mark.sweep("load")
@pytest.mark.parametrize("name", MODELS)
def test_any_chunking_gives_the_same_bits(
    load: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recomputing in other pieces changes nothing, with a window or without (known failures 17, 36)."""
    driver = Driver(load(write_model(tmp_path, **MODELS[name])), monkeypatch)
    tokens = prompt(LENGTH)
    whole = driver.logits(tokens, [LENGTH], driver.tables(LENGTH))
    for chunks in CHUNKINGS:
        assert same_bits(driver.logits(tokens, chunks, driver.tables(LENGTH)), whole), chunks


def mixed_batch(driver: Driver, rng: np.random.Generator, lengths: list[int]) -> dict[int, np.ndarray]:
    """Return the logits of every position of sequences that advance together, by random amounts in random order."""
    budget, done = driver.engine.info.max_tokens, [0] * len(lengths)
    tables = [driver.tables(length) for length in lengths]
    tokens = [prompt(length, seed=seed) for seed, length in enumerate(lengths)]
    collected: dict[int, list[np.ndarray]] = {seed: [] for seed in range(len(lengths))}
    while any(at < length for at, length in zip(done, lengths, strict=True)):
        rows, owners, room = [], [], budget
        for one in rng.permutation(len(lengths)):
            size = min(int(rng.choice([1, 1, 2, 9, 40, 200])), lengths[one] - done[one], room)
            if size > 0 and rng.random() < 0.8:
                rows.append(driver.row(tokens[one], done[one], done[one] + size, tables[one], done[one]))
                owners.append((int(one), size))
                done[one] += size
                room -= size
        driver.seen.clear()
        driver.step(rows)
        logits = np.concatenate([np.empty((0, driver.engine.info.vocab), np.float32), *(one for _, one in driver.seen)])
        at = 0
        for one, size in owners:
            collected[one].append(logits[at : at + size])
            at += size
    return {one: np.concatenate(parts) for one, parts in collected.items()}


@pytest.mark.sweep("load")
@pytest.mark.parametrize(
    "name",
    [
        "qwen 3, eight heads a group",
        "qwen 2 with windows",
        "llama 2",
        "mistral",
        "qwen 3 moe",
        "gpt-oss",
        "deepseek 3",
        "gemma 4 e",
    ],
)
def test_any_batch_gives_the_same_bits(load: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences that share steps share nothing else (known failure 9)."""
    driver = Driver(load(write_model(tmp_path, **MODELS[name])), monkeypatch)
    lengths = [1, 2, 15, 16, 17, 33, 64, 90, 130, 201]
    alone = [driver.logits(prompt(n, seed=seed), [n], driver.tables(n)) for seed, n in enumerate(lengths)]
    for seed in range(3):
        driver._next = [0] * len(driver._next)
        together = mixed_batch(driver, np.random.default_rng(seed), lengths)
        for one, want in enumerate(alone):
            assert same_bits(together[one], want), (seed, lengths[one])


@pytest.mark.parametrize(
    "name", ["qwen 3, head size of its own", "qwen 3 with window layers", "glm 4.7 flash", "gemma 4 e"]
)
def test_cached_blocks_give_the_same_bits(
    load: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefix read through other tables, or restored from pages, equals a computed one (known failures 33, 38)."""
    folder = write_model(tmp_path, **MODELS[name])
    driver = Driver(load(folder), monkeypatch)
    tokens = prompt(LENGTH)
    cold_tables = driver.tables(LENGTH)
    cold = driver.logits(tokens, [LENGTH], cold_tables)
    other = Driver(load(folder), monkeypatch)
    other._next = [9] * len(other._next)
    restored = other.tables(LENGTH)
    for hit in (16, 64, 144):
        shared = hit // 16
        fresh = driver.tables(LENGTH)
        mixed = tuple([*old[:shared], *new[shared:]] for old, new in zip(cold_tables, fresh, strict=True))
        driver.seen.clear()
        driver.step([driver.row(tokens, hit, LENGTH, mixed, hit)])
        assert same_bits(np.concatenate([logits for _, logits in driver.seen]), cold[hit:])
        for group, (source, target) in enumerate(zip(cold_tables, restored, strict=True)):
            pages = driver.engine.read_blocks(group, source[:shared]).wait()
            other.engine.write_blocks(group, target[:shared], pages).wait()
        other.seen.clear()
        other.step([other.row(tokens, hit, LENGTH, restored, hit)])
        assert same_bits(np.concatenate([logits for _, logits in other.seen]), cold[hit:])


@pytest.mark.parametrize(
    "name", ["qwen 3, head size of its own", "qwen 3 with window layers", "mistral", "glm 4.7 flash", "gemma 4 e"]
)
def test_a_copy_of_a_block_gives_the_same_bits_as_far_as_its_tokens_agree(
    load: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy's slots after the common tokens hold another text and are never read."""
    driver = Driver(load(write_model(tmp_path, **MODELS[name])), monkeypatch)
    other, tokens = prompt(LENGTH), prompt(LENGTH)
    held = driver.tables(LENGTH)
    driver.logits(other, [LENGTH], held)
    for at in (1, 9, 16 + 15, 64 + 3, 128 + 12):
        tokens = [*other[:at], *prompt(LENGTH - at, seed=at)]
        cold = driver.logits(tokens, [LENGTH], driver.tables(LENGTH))
        tables = tuple(
            [*old[: at // 16], *new[at // 16 :]] for old, new in zip(held, driver.tables(LENGTH), strict=True)
        )
        for group, (source, target) in enumerate(zip(held, tables, strict=True)):
            page = driver.engine.read_blocks(group, [source[at // 16]]).wait()
            driver.engine.write_blocks(group, [target[at // 16]], page).wait()
        driver.seen.clear()
        driver.step([driver.row(tokens, at, LENGTH, tables, at)])
        assert same_bits(np.concatenate([logits for _, logits in driver.seen]), cold[at:])
        driver._next = [-(-LENGTH // 16)] * len(driver._next)


def test_blocks_that_a_window_passed_are_not_read(load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the passed blocks gone (`NO_BLOCK`) the answer is the same, bit for bit (known failure 36)."""
    driver = Driver(load(write_model(tmp_path, **MODELS["mistral"])), monkeypatch)
    tokens, (table,) = prompt(LENGTH), driver.tables(LENGTH)
    whole = driver.logits(tokens, [LENGTH], (table,))
    at, driver.seen = 0, []
    for size in (50, 3, 1, 1, 30, 16, 49):
        passed = max(0, at - 24 + 1) // 16
        held = [NO_BLOCK] * passed + table[passed:]
        driver.step([driver.row(tokens, at, at + size, (held,), at)])
        at += size
    assert same_bits(np.concatenate([logits for _, logits in driver.seen]), whole)


@pytest.mark.sweep("load")
@pytest.mark.parametrize("name", ["llama 2", "mistral", "qwen 2 with windows", "deepseek 2 lite", "gemma 4"])
def test_a_blocks_earlier_content_is_not_read(
    load: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks full of NaN, given to a new sequence, change no bit of its answer (known failures 9, 38)."""
    driver = Driver(load(write_model(tmp_path, **MODELS[name])), monkeypatch)
    tokens = prompt(LENGTH)
    clean = driver.logits(tokens, [LENGTH], driver.tables(LENGTH))
    for pool in driver.engine._kv:
        # All bits set are a NaN in every float type, and in a scale; as codes they mean anything.
        pool.reshape(-1).view(np.uint8)[:] = 255
    for chunks in ([LENGTH], [40, 1, 1, 108], [41, 2, 107]):
        assert same_bits(driver.logits(tokens, chunks, driver.tables(LENGTH)), clean)


def test_any_number_of_threads_gives_the_same_bits(load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(tmp_path, vocab_size=700, intermediate_size=600)
    monkeypatch.setattr(blas, "_WORTH_THREADS", 0)
    results = []
    for threads in (1, 2, 3):
        driver = Driver(load(folder, threads=threads), monkeypatch)
        results.append(driver.logits(prompt(100), [60, 40], driver.tables(100)))
        driver.engine.close()
    assert same_bits(results[0], results[1]) and same_bits(results[0], results[2])


def test_the_sampler_sees_the_same_bits_for_one_position_and_for_all(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scoring a prompt and answering it agree, also across slices of the logits."""
    driver = Driver(load(write_model(tmp_path)), monkeypatch)
    tokens = prompt(100)
    every = driver.logits(tokens, [100], driver.tables(100))
    driver.seen.clear()
    rows = [Row(tokens, 0, 100, driver.tables(100), 99, 100, GREEDY, 0) for _ in range(2)]
    driver.step(rows)
    assert all(same_bits(logits, every[99:]) for _, logits in driver.seen)


def neighbour(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply whole matrices in one BLAS call, which lets rows affect each other's bits."""

    def planted(self: Any, x: Any, packed: Any) -> Any:
        ((_, matrix),) = packed.parts
        whole = matrix.panels.transpose(1, 0, 2).reshape(x.shape[1], -1)
        got = (x @ whole)[:, : matrix.out]
        return got if matrix.bias is None else got + matrix.bias

    monkeypatch.setattr(reference.ReferenceKernels, "_project", planted)


def relative_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sum the softmax over all positions at once instead of over fixed spans in order."""

    def planted(q: Any, pages: Any, seen: Any, scale: float, *_: Any) -> Any:
        rows, heads, tiles, tile, size = q.shape
        keys = pages.keys(slice(0, seen.shape[2])).reshape(rows, heads, 1, -1, size)
        values = pages.values(slice(0, seen.shape[2])).reshape(rows, heads, 1, -1, size)
        scores = np.matmul(q, keys.swapaxes(-1, -2)) * np.float32(scale)
        mask = seen.transpose(0, 1, 3, 2, 4).reshape(rows, 1, tiles, tile, -1)
        weights = np.where(mask, np.exp(scores - np.where(mask, scores, -np.inf).max(-1, keepdims=True)), 0)
        return np.matmul(weights, values) / weights.sum(-1, keepdims=True)

    monkeypatch.setattr(paged, "_attend", planted)


@pytest.mark.parametrize("plant", [neighbour, relative_spans])
def test_an_order_that_depends_on_the_batch_is_caught(
    plant: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path, hidden_size=256, num_attention_heads=4, head_dim=64)
    driver = Driver(tiny_models.load(folder, kernels="reference"), monkeypatch)
    plant(monkeypatch)
    tokens = prompt(LENGTH)
    whole = driver.logits(tokens, [LENGTH], driver.tables(LENGTH))
    assert not all(same_bits(driver.logits(tokens, chunks, driver.tables(LENGTH)), whole) for chunks in CHUNKINGS)


def expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attend to a prompt's latents in one product over all positions, but to those of one token in spans."""
    real = latent.attention

    def planted(query: Any, kv: Any, layer: int, rows: Any, tables: Any, scale: float, out: Any) -> None:
        real(query, kv, layer, rows, tables, scale, out)
        for row, (first, count, start) in enumerate(rows.tolist()):
            if count > 1:
                places = np.arange(start + count)
                kept = kv[tables[row, places // 16], layer, 0, 0, places % 16].astype(np.float32)
                scores = np.einsum("mqd,pd->qmp", query[first : first + count], kept) * np.float32(scale)
                scores[:, places[None] > (start + np.arange(count))[:, None]] = -np.inf
                weights = np.exp(scores - scores.max(-1, keepdims=True))
                mixed = np.einsum("qmp,pl->mql", weights, kept[:, : out.shape[2]])
                out[first : first + count] = mixed / weights.sum(-1).T[:, :, None]

    monkeypatch.setattr(latent, "attention", planted)


def test_another_arithmetic_for_prompts_over_latents_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(tiny_models.load(write_model(tmp_path, **MODELS["deepseek 3"]), kernels="reference"), monkeypatch)
    tokens = prompt(LENGTH)
    right = driver.logits(tokens, [LENGTH], driver.tables(LENGTH))
    expanded(monkeypatch)
    whole = driver.logits(tokens, [LENGTH], driver.tables(LENGTH))
    np.testing.assert_allclose(whole, right, rtol=0, atol=1e-4)  # it still computes attention
    assert not same_bits(driver.logits(tokens, [1] * LENGTH, driver.tables(LENGTH)), whole)


def test_scores_survive_a_slice_boundary(load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits come in slices of 32 rows."""
    driver = Driver(load(write_model(tmp_path)), monkeypatch)
    tokens = prompt(100)
    rows = [Row(tokens, 0, 100, driver.tables(100), 0, 100, SCORED, 0) for _ in range(2)]
    first, second = driver.step(rows)
    assert first == second and first.token is not None
    assert [score.token for score in first.prompt_logprobs] == tokens[1:]
    logits = np.concatenate([logits for row, logits in driver.seen])[:100].astype(np.float64)
    want = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    got = [score.logprob for score in first.prompt_logprobs]
    np.testing.assert_allclose(got, want[np.arange(99), tokens[1:]], atol=1e-5)
