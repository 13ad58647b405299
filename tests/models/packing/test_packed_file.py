"""Packed weights that are kept for the next start."""

from __future__ import annotations

import errno
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from safetensors.numpy import load_file, save_file

from cairn.models.packing import packed_file, packed_matrices
from cairn.models.packing.weight_format import HeldWeights
from tests.models.packing.test_weight_format import SIZES, packed_model
from tests.tiny_models import KERNELS, MODELS, Driver, load, prompt, write_model

if KERNELS == ["reference"]:
    pytest.skip("the native kernels were not compiled", allow_module_level=True)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set a cache folder of its own, in which files of any size are kept; return it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(packed_file, "KEPT_FROM", 0)
    return packed_file.folder()


def answer(model: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[bytes, str, int]:
    """Return a prompt's logits, the message about rounding, and the layers packed from the model's files."""
    packed = []
    with monkeypatch.context() as patch:
        real = HeldWeights.__getitem__

        def made(self: HeldWeights, name: str) -> Any:
            packed_matrix = real(self, name)
            packed.extend([name] * (len(packed_matrix.shape) == 2 and "layers" in name))
            return packed_matrix

        patch.setattr(HeldWeights, "__getitem__", made)
        engine = load(model, **options)
        driver = Driver(engine, patch)
        logits = driver.logits(prompt(20, engine.info.vocab), [20], driver.tables(20))
        engine.close()
    assert np.isfinite(logits).all()
    return logits.tobytes(), engine.info.note, len(packed)


def a_model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", **MODELS["llama with biases, tied"])


@pytest.mark.parametrize("form", ["f32", "bf16", "int8", "int4", "stored"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_second_start_packs_nothing_and_answers_the_same(
    form: str, tied: bool, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if form == "stored":
        kinds = {"down": Type.Q6_K, "gate": Type.Q2_K, "q_proj": Type.Q4_K, "up": Type.Q5_K}
        model = packed_model(
            tmp_path, lambda name, array: next((kinds[kind] for kind in kinds if kind in name), Type.Q4_1)
        )
    else:
        model = write_model(tmp_path / "m", tie_word_embeddings=tied, attention_bias=True, **SIZES)
    logits, note, packed = answer(model, monkeypatch, weights=form)
    assert packed > 0 and bool(note) == (form != "f32")
    (file,) = cache.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600 and cache.stat().st_mode & 0o777 == 0o700
    assert answer(model, monkeypatch, weights=form) == (logits, note, 0)
    assert answer(model, monkeypatch, weights=form, keep_packed=False) == (logits, note, packed)


def flipped(at: int) -> Any:
    def flip(data: bytes) -> bytes:
        place = at % len(data)
        return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]

    return flip


DAMAGE: dict[str, Any] = {
    "nothing": lambda data: b"",
    "noise": lambda data: os.urandom(5000),
    "magic": flipped(3),
    "a weight": flipped(5000),
    "the description": flipped(-100),
    "its digest": flipped(-20),
    "its length": flipped(-4),
    "length beyond": lambda data: data[:-4] + b"\xff\xff\xff\xff",
    "cut": lambda data: data[:-1],
    "longer": lambda data: data[:8] + b"\0" + data[8:],
    "half": lambda data: data[: len(data) // 2],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_not_used_and_written_again(
    damage: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Doubt may cost time, never an answer (known failure 30)."""
    model = a_model(tmp_path)
    whole = answer(model, monkeypatch)
    (file,) = cache.iterdir()
    data = file.read_bytes()
    file.write_bytes(DAMAGE[damage](data))
    assert answer(model, monkeypatch) == whole
    assert list(cache.iterdir()) == [file] and file.read_bytes() == data
    assert answer(model, monkeypatch) == (*whole[:2], 0)


def test_another_model_form_or_kernel_is_another_key(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is read for a model from which it was not packed (known failure 28)."""
    model = a_model(tmp_path)
    first = answer(model, monkeypatch)
    others = [{"weights": "bf16"}, *({"kernels": name} for name in KERNELS[1:] if name != "reference")]
    for options in others:
        assert answer(model, monkeypatch, **options)[2] > 0
        assert answer(model, monkeypatch, **options)[2] == 0
    assert answer(model, monkeypatch) == (*first[:2], 0), "each has a file of its own"
    count = len(list(cache.iterdir()))
    write_model(model, **MODELS["llama with biases, tied"], seed=5)
    changed = answer(model, monkeypatch)
    assert changed[0] != first[0] and changed[2] > 0
    assert len(list(cache.iterdir())) == count + 1
    with monkeypatch.context() as patch:
        patch.setattr(packed_file, "VERSION", 99)
        assert answer(model, patch)[2] > 0
    stranger = write_model(tmp_path / "other", **MODELS["llama with biases, tied"], seed=6)
    expected = answer(stranger, monkeypatch, keep_packed=False)
    before = set(cache.iterdir())
    answer(stranger, monkeypatch)
    (theirs,) = set(cache.iterdir()) - before
    theirs.write_bytes(min(before).read_bytes())
    assert answer(stranger, monkeypatch) == expected


def test_a_model_that_was_moved_or_copied_is_not_packed_again(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = a_model(tmp_path)
    first = answer(model, monkeypatch)
    copy = tmp_path / "deep" / "copy"
    shutil.copytree(model, copy)
    assert answer(copy, monkeypatch) == (*first[:2], 0)
    model.rename(tmp_path / "moved")
    assert answer(tmp_path / "moved", monkeypatch) == (*first[:2], 0)
    assert len(list(cache.iterdir())) == 1


def test_beyond_the_budget_the_least_recently_used_goes(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [write_model(tmp_path / str(seed), **MODELS["llama with biases, tied"], seed=seed) for seed in range(3)]
    files = []
    for age, model in zip((30, 10, 20), models, strict=True):
        assert answer(model, monkeypatch)[2] > 0
        (file,) = set(cache.iterdir()) - set(files)
        files.append(file)
        os.utime(file, (time.time() - age, time.time() - age))
    size = max(file.stat().st_size for file in files)
    gb = 3.5 * size / 1e9
    usage = packed_file.usage(int(gb * 1e9))
    assert (usage.files, usage.bytes, usage.budget) == (3, sum(file.stat().st_size for file in files), int(gb * 1e9))
    another = write_model(tmp_path / "3", **MODELS["llama with biases, tied"], seed=3)
    assert answer(another, monkeypatch, keep_packed_gb=gb)[2] > 0
    assert [file.exists() for file in files] == [False, True, True] and packed_file.usage().files == 3
    answer(models[0], monkeypatch, keep_packed_gb=size / 2e9)
    assert packed_file.usage().files == 3, "what is larger than the budget costs the others nothing"


def test_the_budget_follows_the_disk() -> None:
    assert packed_file.default_budget(free=70, held=30) == 20
    assert packed_file.default_budget(free=10**15, held=0) == packed_file.LARGEST_BUDGET


def test_a_disk_that_takes_nothing_costs_only_the_packing(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = a_model(tmp_path)
    want = answer(model, monkeypatch, keep_packed=False)
    with monkeypatch.context() as patch:
        patch.setattr(packed_file.shutil, "disk_usage", lambda path: SimpleNamespace(free=packed_file.SPARE))
        assert answer(model, patch) == want and not list(cache.iterdir())
    with monkeypatch.context() as patch:
        real = packed_matrices.WritingKernels._write

        def refused(self: Any, data: Any) -> None:
            def write(view: Any) -> int:
                raise OSError(errno.ENOSPC, "no space left")

            if len(self._matrices) == 2:
                self._file = SimpleNamespace(write=write)
            real(self, data)

        patch.setattr(packed_matrices.WritingKernels, "_write", refused)
        assert answer(model, patch) == want and not list(cache.iterdir())
    cache.rmdir()
    cache.write_text("no folder")
    assert answer(model, monkeypatch) == want


def test_models_that_are_packed_at_once_leave_no_file(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    answer(a_model(tmp_path), monkeypatch)
    assert not cache.exists()


def test_packed_files_unused_for_a_month_are_removed(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other = a_model(tmp_path), write_model(tmp_path / "other")
    answer(model, monkeypatch)
    (used,) = cache.iterdir()
    answer(other, monkeypatch)
    (unused,) = set(cache.iterdir()) - {used}
    rest = cache / "x.part"
    rest.write_bytes(b"half")
    month = time.time() - 31 * 86400
    for file in (used, unused, rest):
        os.utime(file, (month, month))
    assert answer(model, monkeypatch)[2] == 0, "a start that reads a file uses it"
    size = unused.stat().st_size
    assert packed_file.prune() == (2, size + 4) and list(cache.iterdir()) == [used]
    assert packed_file.prune() == (0, 0)


def test_leftovers_of_a_killed_start_go_at_once_and_running_writes_stay(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise starts that are killed while loading would fill the disk, one after the other."""
    model = a_model(tmp_path)
    cache.mkdir(parents=True)
    left = cache / "left.part"
    left.write_bytes(b"half")
    seen = []
    real = packed_matrices.WritingKernels.finish

    def finish(self: Any, key: str) -> None:
        seen.extend([packed_file.prune(), [path.suffix for path in cache.iterdir()]])
        real(self, key)

    monkeypatch.setattr(packed_matrices.WritingKernels, "finish", finish)
    answer(model, monkeypatch)
    assert seen == [(0, 0), [".part"]] and not left.exists()
    assert [path.suffix for path in cache.iterdir()] == [".packed"]


def test_a_weight_without_a_number_keeps_no_start_from_reading_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JSON has no NaN: written as one, it would make the file unreadable at every start."""
    model = write_model(tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    unused = next(token for token in range(len(embedding)) if token not in prompt(20, len(embedding)))
    embedding[unused, 2:4] = [np.inf, np.nan]
    save_file(tensors, model / "model.safetensors")
    first = answer(model, monkeypatch, weights="bf16")
    assert first[2] > 0 and "nan" not in first[1] and "relative error" in first[1]
    assert answer(model, monkeypatch, weights="bf16") == (*first[:2], 0)


def test_a_model_that_is_replaced_while_it_is_packed_is_not_kept(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was read under a key of the file that was there before (known failure 28)."""
    model = a_model(tmp_path)
    real = packed_matrices.WritingKernels.finish

    def late(self: Any, key: str) -> None:
        real(self, key)
        write_model(model, **MODELS["llama with biases, tied"], seed=9)

    with monkeypatch.context() as patch:
        patch.setattr(packed_matrices.WritingKernels, "finish", late)
        answer(model, patch)
    assert not list(cache.iterdir())
