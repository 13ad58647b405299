"""The engine of recorded steps: identity, rows and pages, refusals, and memory given back."""

from __future__ import annotations

import gc
import platform
import weakref
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import threadpoolctl

from cairn.config.config import Config
from cairn.engine import recorded
from cairn.engine.load_engine import load_engine
from cairn.engine.recorded import RecordedEngine
from cairn.engine.row_results import NOT_FINITE, LogitsQuestion
from cairn.kernels import native, reference
from cairn.models.spec.config import load_spec
from cairn.types.errors import ModelError
from cairn.types.model_spec import BLOCK_TOKENS
from cairn.types.request import SamplingParams
from cairn.types.step import NO_BLOCK, Row, RowResult
from tests.tiny_models import (
    GREEDY,
    KERNELS,
    MODELS,
    SCORED,
    Driver,
    load,
    prompt,
    random_tensors,
    write_config,
    write_model,
)


def test_info_says_what_was_loaded(tmp_path: Path) -> None:
    folder = write_model(tmp_path, **MODELS["qwen 3 with window layers"])
    info = load(folder, context=300, step_tokens=100, max_running=7).info
    assert [group.kind for group in info.groups] == ["full", "window"]
    token = 2 * 2 * 16 * 4  # keys and values, two heads of 16 numbers of 4 bytes
    assert info.block_bytes == (1 * BLOCK_TOKENS * token, 2 * BLOCK_TOKENS * token)
    assert (info.context, info.max_tokens, info.max_rows, info.vocab) == (300, 100, 7, 160)
    assert sum(b * s for b, s in zip(info.blocks, info.block_bytes, strict=True)) <= 0.05 * 10**9
    assert load(folder).info.context == 512
    assert info.kv_dtype == "float32"
    for name, dtype in (("bf16", "bfloat16"), ("f16", "float16")):
        narrow = load(folder, kv_dtype=name)
        assert narrow.info.kv_dtype == dtype == str(narrow._kv[0].dtype)
        assert narrow.info.block_bytes == tuple(size // 2 for size in info.block_bytes)
        (page,) = narrow.read_blocks(1, [3]).wait()
        assert page.nbytes == narrow.info.block_bytes[1]
    small = load(folder, kv_dtype="q8")
    assert small.info.kv_dtype == "int8" == str(small._kv[0].dtype)
    assert small.info.block_bytes == tuple(size * (16 + 4) // (16 * 4) for size in info.block_bytes)
    (page,) = small.read_blocks(1, [3]).wait()
    assert page.nbytes == small.info.block_bytes[1]


def test_identity_is_stable_and_names_what_can_move_a_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same engine in another process has the same identity; anything that could move a bit changes it.

    Known failures 27, 28.
    """
    folder = write_model(tmp_path / "a")
    first = load(folder).info.identity
    assert first == load(folder, threads=2, context=128, step_tokens=32).info.identity
    identities = {first, load(write_model(tmp_path / "b", seed=1)).info.identity}
    spec = load_spec(folder)
    for kind in KERNELS:
        engine = load(folder, kernels=kind)
        identities.add(engine.info.identity)
        for module, name in (
            (recorded, "LAYOUT"),
            (recorded, "BLOCK_TOKENS"),
            (reference, "VERSION"),
            (native, "VERSION"),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(module, name, 99)
                identities.add(recorded.identity(spec, engine._kernels, "f32", "float32"))
        identities |= {load(folder, kernels=kind, kv_dtype=name).info.identity for name in ("bf16", "f16", "q8")}
    forms = {load(folder, weights=form).info.identity for form in ("stored", "bf16", "int8", "int4", "f32")}
    assert len(forms) == 5 and first in forms, "auto is f32 for a model of this size"
    with monkeypatch.context() as patch:
        other = [{"user_api": "blas", "internal_api": "other", "filepath": "/lib"}]
        patch.setattr(reference, "threadpool_info", lambda: other)
        identities.add(load(folder, kernels="reference").info.identity)
    # The other model, the other BLAS, and for each kind itself, three changes and three types of KV;
    # the default is one of the kinds.
    assert len(identities) == 2 + 7 * len(KERNELS)


def test_identity_does_not_depend_on_what_else_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = reference.ReferenceKernels()
    before, real = kernels.numerics, reference.threadpool_info()
    other = {"user_api": "blas", "internal_api": "openblas", "filepath": "/lib/scipy.libs/openblas.so"}
    monkeypatch.setattr(reference, "threadpool_info", lambda: [other, *real, {"user_api": "openmp"}])
    assert kernels.numerics == before
    kernels.close()


@pytest.mark.parametrize("kind", KERNELS)
def test_identity_outlives_an_upgrade_of_the_system(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No bit comes from the C library or the operating system's kernel, so stored KV is found after an upgrade."""
    folder = write_model(tmp_path)
    before = load(folder, kernels=kind).info.identity
    for name, answer in (("libc_ver", ("musl", "9.9")), ("release", "9.9"), ("version", "#9"), ("platform", "other")):
        monkeypatch.setattr(platform, name, lambda *_, answer=answer, **__: answer)
    assert load(folder, kernels=kind).info.identity == before


def test_rows_without_wanted_logits_return_none(tmp_path: Path) -> None:
    engine = load(write_model(tmp_path))
    tokens = prompt(40)
    rows = [
        Row(tokens, 0, 20, (list(range(3)),), None, 40, GREEDY, 0),
        Row(tokens, 0, 40, (list(range(3, 6)),), 39, 40, GREEDY, 0),
        Row(tokens, 0, 7, (list(range(6, 9)),), None, 40, GREEDY, 0),
    ]
    results = engine.prefill(rows).wait()
    assert results[0] == results[2] == RowResult() and results[1].token is not None
    assert engine.prefill([]).wait() == []
    assert engine.prefill(rows[:1]).wait() == [RowResult()]


def test_seeded_sampling_is_the_same_alone_and_in_a_batch(tmp_path: Path) -> None:
    """Options do not make a request unbatchable, and the batch does not change its tokens (known failure 14)."""
    engine = load(write_model(tmp_path))
    sampling = [
        SamplingParams(max_tokens=9, temperature=1.3, seed=5, top_k=40),
        SamplingParams(max_tokens=9, temperature=0.9, seed=6, repetition_penalty=1.3, logprobs=True, top_logprobs=3),
        SamplingParams(max_tokens=9, temperature=0, logit_bias=((3, 100.0),)),
    ]
    rows = [
        Row(prompt(30, seed=n), 0, 30, ([2 * n, 2 * n + 1],), 29, 30, params, n) for n, params in enumerate(sampling)
    ]
    together = engine.prefill(rows).wait()
    assert together == [engine.prefill([row]).wait()[0] for row in rows]
    assert together[2].token == 3


@pytest.mark.parametrize("kind", KERNELS)
def test_numbers_that_are_not_finite_fail_their_own_row(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A NaN in one row is that row's error; its neighbours' answers keep every bit."""
    folder = write_config(tmp_path, tie_word_embeddings=False)
    weights = dict(random_tensors(folder))
    weights["model.embed_tokens.weight"][7] = np.nan
    config = Config(step_tokens=64, max_running=4, threads=1, kv_gb=0.01, kernels=kind)  # type: ignore[arg-type]
    driver = Driver(RecordedEngine(load_spec(folder), weights, config, (40,)), monkeypatch)
    good, bad = [t for t in prompt(60) if t != 7][:30], [1, 2, 7, 3]
    alone = driver.step([Row(good, 0, 30, (driver.tables(30)[0],), 29, 30, GREEDY, 0)])
    want = driver.seen.pop()[1]
    tables = driver.tables(64)
    mixed = [
        Row(bad, 0, 4, driver.tables(4), 3, 4, GREEDY, 0),
        Row(good, 0, 30, tables, 29, 30, GREEDY, 0),
        Row(bad[:2], 0, 2, driver.tables(4), 1, 2, GREEDY, 0),
    ]
    results = driver.step(mixed)
    assert "not finite" in results[0].error and results[0].token is None
    assert results[1] == alone[0] and driver.seen[1][1].tobytes() == want.tobytes()
    assert results[2].error == ""


def test_pages_are_views_and_come_back(tmp_path: Path) -> None:
    engine = load(write_model(tmp_path, **MODELS["qwen 2 with windows"]))
    tokens = prompt(32)
    engine.prefill([Row(tokens, 0, 32, ([3, 5], [4, 6]), None, 32, GREEDY, 0)])
    for group, ids in enumerate([[3, 5], [4, 6]]):
        pages = engine.read_blocks(group, ids).wait()
        assert [len(page) for page in pages] == [engine.info.block_bytes[group]] * 2
        assert pages[0].tobytes() != pages[1].tobytes() and any(pages[0].tobytes())
        assert np.shares_memory(np.asarray(pages[0]), engine._kv[group])
        kept = [memoryview(page.tobytes()) for page in pages]
        engine.write_blocks(group, [8, 9], kept).wait()
        assert [page.tobytes() for page in engine.read_blocks(group, [8, 9]).wait()] == kept


def test_a_page_of_the_wrong_size_writes_nothing(tmp_path: Path) -> None:
    """A restore is complete or an error (known failures 38, 39)."""
    engine = load(write_model(tmp_path))
    before = engine._kv[0].tobytes()
    size = engine.info.block_bytes[0]
    good = memoryview(b"\1" * size)
    for pages in ([good, memoryview(b"\1" * (size - 1))], [good, memoryview(b"\1" * (size + 1))], [good]):
        with pytest.raises(ValueError):
            engine.write_blocks(0, [1, 2], pages)
        assert engine._kv[0].tobytes() == before


def test_broken_rows_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    engine = load(write_model(tmp_path), step_tokens=64, max_running=2)
    row = Row(prompt(40), 0, 40, ([0, 1, 2],), 39, 40, GREEDY, 0)
    broken: list[list[Row]] = [
        [row, row],
        [msgspec.structs.replace(row, end=1)] * 3,
        [msgspec.structs.replace(row, end=41)],
        [msgspec.structs.replace(row, start=40)],
        [msgspec.structs.replace(row, tables=([0, NO_BLOCK, 2],))],
        [msgspec.structs.replace(row, tables=([0, 1],))],
        [msgspec.structs.replace(row, tables=([0, 1, 2], [0, 1, 2]))],
        [msgspec.structs.replace(row, tokens=[160] * 40)],
        [msgspec.structs.replace(row, tokens=[-1] * 40)],
    ]
    for rows in broken:
        with pytest.raises(ValueError):
            engine.prefill(rows)
    assert not engine._kv[0].any()


def test_a_step_of_the_largest_size(tmp_path: Path) -> None:
    engine = load(write_model(tmp_path), step_tokens=48, max_running=48)
    rows = [Row([n], 0, 1, ([n],), 0, 1, GREEDY, 0) for n in range(48)]
    many = engine.prefill(rows).wait()
    assert many == [engine.decode([row]).wait()[0] for row in rows]


def test_too_little_memory_is_known_before_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(tmp_path)
    loaded: list[Any] = []
    monkeypatch.setattr(recorded.devices, "load", lambda *arguments: loaded.append(arguments))
    monkeypatch.setattr("cairn.engine.memory.memory_available", lambda: 1_000_000)
    with pytest.raises(ModelError, match=r"needs .* GB of memory \(.* weights, .* KV pool, .* buffers\), 0\.00 GB are"):
        load(folder, kv_gb=None)
    assert loaded == []


def test_close_gives_blas_its_threads_back(tmp_path: Path) -> None:
    def threads() -> list[int]:
        return [pool["num_threads"] for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"]

    gc.collect()  # engines that other tests left open
    before = threads()
    threadpoolctl.threadpool_limits(2, user_api="blas")
    two = threads()
    folder = write_model(tmp_path)
    first, second = (load(folder, threads=count, kernels="reference") for count in (2, 1))
    assert set(threads()) == {1}
    first.close()
    first.close()
    assert set(threads()) == {1}, "the other engine still computes"
    second.close()
    assert threads() == two
    threadpoolctl.threadpool_limits(max(before), user_api="blas")


@pytest.mark.parametrize("kind", KERNELS)
def test_close_gives_the_pools_and_weights_back(kind: str, tmp_path: Path) -> None:
    engine = load(write_model(tmp_path), kernels=kind)
    pool = weakref.ref(engine._kv[0])
    matrix = engine._head.calls[0].arguments[4]
    held = weakref.ref(matrix.parts[0][1].panels if kind == "reference" else matrix)
    del matrix
    engine.close()
    gc.collect()
    assert pool() is None and held() is None


def test_a_step_shows_the_kernels_no_block_of_the_step_before(tmp_path: Path) -> None:
    """Entries that a shorter row does not use are -1, whatever stood there before (known failure 9)."""
    engine = load(write_model(tmp_path))
    tokens = prompt(100)
    engine.prefill([Row(tokens, 0, 100, (list(range(7)),), None, 100, GREEDY, 0)])
    engine.prefill([Row(tokens, 0, 20, ([8, 9, 10, 11],), None, 100, GREEDY, 0)])
    table = engine._buffers.tables[0][0]
    assert table[:2].tolist() == [8, 9] and set(table[2:].tolist()) == {NO_BLOCK}


def test_a_row_whose_first_slice_failed_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later slices must not turn the error into a token (known failure 15)."""
    engine = load(write_model(tmp_path))
    slices = list[int]()

    def broken_first(self: LogitsQuestion, sampler: Any, logits: Any, count: int) -> None:
        if not slices:
            logits[0] = np.nan
        slices.append(count)
        real(self, sampler, logits, count)

    real = LogitsQuestion.answer
    monkeypatch.setattr(LogitsQuestion, "answer", broken_first)
    row = Row(prompt(40), 0, 40, (list(range(3)),), 0, 40, SCORED, 0)
    assert engine.prefill([row]).wait() == [RowResult(error=NOT_FINITE)]
    assert slices == [32, 8]


def test_slow_kernels_are_reported_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(tmp_path)
    assert not load(folder).info.note or KERNELS == ["reference"]
    monkeypatch.setattr(native, "variants", dict)
    assert load(folder).info.note.startswith("reference kernels (numpy, slow: the native kernels were not compiled")
    assert not load(folder, kernels="reference").info.note


def test_a_model_that_changes_while_it_is_loaded_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its KV would be stored under the identity of the earlier files (known failure 28)."""
    folder = write_model(tmp_path)
    real = recorded.open_weights

    def replaced(*arguments: Any) -> Any:
        write_model(tmp_path, seed=1)
        return real(*arguments)

    monkeypatch.setattr(recorded, "open_weights", replaced)
    with pytest.raises(ModelError, match="was changed while it was loaded; start again"):
        load_engine(Config(kv_gb=0.05, threads=1), folder)
