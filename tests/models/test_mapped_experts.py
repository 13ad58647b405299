"""Experts larger than memory are mapped from their packed copy, and answer the same."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cairn.config.config import Config
from cairn.engine import memory
from cairn.engine.memory import WeightMemory, beside_weights, check_memory, placed, pool_blocks, weight_memory
from cairn.engine.needs import needs
from cairn.kernels.native import NativeKernels
from cairn.models.packing import packed_file, packed_matrices
from cairn.models.packing.weight_format import HeldWeights
from cairn.models.safetensors.weights import open_weights
from cairn.models.spec.config import load_spec
from cairn.served_models.fit import fit
from cairn.types.errors import ModelError
from cairn.types.model_spec import ModelSpec
from tests.tiny_models import BFLOAT16, KERNELS, MODELS, Driver, load, prompt, write_model

if KERNELS == ["reference"]:
    pytest.skip("the native kernels were not compiled", allow_module_level=True)

FIELDS = MODELS["gpt-oss"] | {"hidden_size": 64, "intermediate_size": 64}
POOL = 0.001
OPTIONS: dict[str, Any] = {
    "kernels": KERNELS[0],
    "weights": "int4",
    "kv_gb": POOL,
    "step_tokens": 256,
    "max_running": 16,
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return packed_file.folder()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", **FIELDS)


def taken(model: Path, form: Any = "int4") -> tuple[ModelSpec, WeightMemory]:
    spec = load_spec(model)
    return spec, weight_memory(spec, HeldWeights(open_weights(model, spec), form), KERNELS[0])


def answer(model: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[bytes, str, int]:
    """Return a prompt's logits in chunks, what the engine says, and how many matrices it mapped."""
    mapped: list[Any] = []
    with monkeypatch.context() as patch:
        real = NativeKernels.mapped

        def count(self: NativeKernels, *arguments: Any) -> Any:
            mapped.append(real(self, *arguments))
            return mapped[-1]

        patch.setattr(NativeKernels, "mapped", count)
        engine = load(model, **OPTIONS | options)
        driver = Driver(engine, patch)
        logits = driver.logits(prompt(60, engine.info.vocab), [45, 1, 14], driver.tables(60))
        engine.close()
    assert np.isfinite(logits).all()
    return logits.tobytes(), engine.info.note, len(mapped)


def test_a_model_that_is_larger_than_memory_answers_as_one_that_fits(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is detected because the machine has a byte too little. The next start neither packs nor checks."""
    want, _, none = answer(model, monkeypatch)
    assert none == 0
    spec, whole = taken(model)
    config = Config(**OPTIONS)
    beside = sum(beside_weights(spec, config, pool_blocks(spec, config, 0, whole)))
    seen: list[int] = []
    monkeypatch.setattr(memory, "memory_available", lambda: seen.append(1) or whole.held + beside - 1)
    with pytest.raises(ModelError, match=r"needs .* weights, .* KV pool"):
        answer(model, monkeypatch, experts="memory")
    got, note, mapped = answer(model, monkeypatch)
    assert seen and got == want and mapped == 2 * spec.layers * 6
    assert f"{whole.experts / 1e9:.2f} GB of experts are mapped from the disk" in note
    (file,) = cache.iterdir()
    with file.open("rb") as opened:  # unmapped pages leave memory, so the next start has none of them
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with monkeypatch.context() as patch:
        patch.setattr(packed_matrices.WritingKernels, "matrix", None)
        patch.setattr(packed_matrices.ReadingKernels, "_check", None)
        assert answer(model, patch) == (got, note, mapped)
    os.utime(file)
    checked: list[Any] = []
    real = packed_matrices.ReadingKernels._check
    with monkeypatch.context() as patch:
        patch.setattr(
            packed_matrices.ReadingKernels, "_check", lambda self, kept: checked.append(kept) or real(self, kept)
        )
        assert answer(model, patch) == (got, note, mapped)
    assert len(checked) == mapped, "whoever touched the file may have changed it"


RESIDENT = """
import re, sys
from pathlib import Path
from tests.tiny_models import GREEDY, load, prompt
from cairn.types.step import Row

def kilobytes(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

tokens, before = prompt(4, 160), [kilobytes("RssAnon"), kilobytes("RssFile")]
engine = load(Path(sys.argv[1]), weights="int8", experts=sys.argv[2], kv_gb=0.001, step_tokens=16, max_running=1)
engine.decode([Row(tokens[:1], 0, 1, tuple([0] for _ in engine.info.groups), 0, 1, GREEDY, 0)]).wait()
print(*(now - old for now, old in zip([kilobytes("RssAnon"), kilobytes("RssFile")], before)))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not say what is resident")
def test_only_experts_that_tokens_chose_come_into_memory(tmp_path: Path) -> None:
    """Of 27 MB: what the process itself holds, and the pages of files that it has read."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 64, "num_experts_per_tok": 2}
    model = write_model(tmp_path / "model", **MODELS["qwen 3 moe"] | sizes, dtype=BFLOAT16)
    experts, found = taken(model, "int8")[1].experts // 1024, {}
    assert experts > 25_000
    for where in ("memory", "mapped"):
        command = [sys.executable, "-c", RESIDENT, str(model), where]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
        found[where] = [int(word) for word in done.stdout.split()]
    assert found["memory"][0] > experts, "where they are held they are memory"
    assert found["mapped"][0] < experts / 2 and found["mapped"][1] < experts / 2


def test_only_held_weights_count_as_memory(model: Path) -> None:
    spec, whole = taken(model)
    config = Config(**OPTIONS, experts="mapped")
    part = placed(spec, config, whole)
    assert 0 < part.mapped == whole.experts < whole.held and part.held + part.mapped == whole.held
    assert part.per_token == round(whole.experts / 2) and part.passing == whole.largest < whole.held
    blocks = pool_blocks(spec, config, 0, part)
    least = part.held + max(sum(beside_weights(spec, config, blocks)), part.passing)
    check_memory(spec, config, blocks, least, part)
    with pytest.raises(ModelError, match=r"GB weights, \d\.\d\d GB of experts mapped"):
        check_memory(spec, config, blocks, least - 1, part)
    plan = needs(config, model, least)
    assert (plan.weights, plan.blocks, plan.mapped) == (part.held, blocks, part.mapped)
    assert fit(config, model, least).mapped and not fit(Config(**OPTIONS), model, 1 << 30).mapped
    assert fit(Config(**OPTIONS), model, least).mapped, "by itself, in what several models may take together"
    dense = write_model(model.parent / "dense")
    spec, weights = taken(dense)
    assert placed(spec, config, weights) == weights, "there are no experts"


@pytest.mark.parametrize("form", ["f32", "bf16", "int8", "stored"])
def test_experts_of_any_form_are_mapped(form: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    want = answer(model, monkeypatch, weights=form)
    got = answer(model, monkeypatch, weights=form, experts="mapped")
    assert got[0] == want[0] and got[2] > 0


@pytest.mark.parametrize("place", ["first", "last"])
def test_a_damaged_expert_is_packed_again(
    place: str, model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = answer(model, monkeypatch, experts="mapped")
    (file,) = cache.iterdir()
    data = bytearray(file.read_bytes())
    with file.open("rb", 0) as opened:
        described = packed_file._described(opened)
    ends = np.cumsum([packed_matrices.START, *(matrice.bytes for matrice in described.matrices)])
    experts = [
        number for number, matrix in enumerate(described.matrices) if matrix.bytes == described.matrices[4].bytes
    ]
    at = int(ends[experts[0]] if place == "first" else ends[experts[-1] + 1] - 1)
    data[at] ^= 1
    file.write_bytes(data)
    assert answer(model, monkeypatch, experts="mapped")[:2] == whole[:2]
    data[at] ^= 1
    (file,) = cache.iterdir()
    assert file.read_bytes() == data


def test_unmappable_experts_are_reported(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="experts cannot be mapped: without keep_packed there is no packed copy"):
        load(model, kernels=KERNELS[0], experts="mapped", keep_packed=False)
    with pytest.raises(ModelError, match="experts cannot be mapped: the reference kernels hold no packed copy"):
        load(model, kernels="reference", experts="mapped")
    with pytest.raises(ModelError, match=r"a packed copy of 0\.00 GB; there is no room for it in .*packed"):
        load(model, kernels=KERNELS[0], experts="mapped", keep_packed_gb=1e-6)
    with monkeypatch.context() as patch:
        patch.setattr(packed_file.shutil, "disk_usage", lambda path: SimpleNamespace(free=packed_file.SPARE))
        with pytest.raises(ModelError, match="there is no room"):
            load(model, kernels=KERNELS[0], experts="mapped")

    def full(self: Any, data: Any) -> int:
        raise OSError(errno.ENOSPC, "no space left")

    with monkeypatch.context() as patch:
        real = packed_matrices.WritingKernels._write

        def write(self: Any, data: Any) -> None:
            self._file = SimpleNamespace(write=lambda view: full(self, view))
            real(self, data)

        patch.setattr(packed_matrices.WritingKernels, "_write", write)
        with pytest.raises(ModelError, match="could not be written to"):
            load(model, kernels=KERNELS[0], experts="mapped")
    assert not list(cache.iterdir())


def test_a_mapped_matrix_uses_the_given_bytes_and_keeps_them_alive() -> None:
    kernels = NativeKernels(KERNELS[0])
    weights = np.random.default_rng(1).standard_normal((40, 64)).astype(np.float32)
    bias = np.arange(40, dtype=np.float32)
    held = kernels.matrix([weights], [bias])
    parts = [(40, 64, "float32")]
    room = np.zeros(held.nbytes + 128, np.uint8)
    at = -room.ctypes.data % 64
    room[at : at + held.nbytes] = held.memory()
    whole = room[at : at + held.nbytes]
    for wrong in (whole[:-64], room[at : at + held.nbytes + 64]):
        with pytest.raises(ValueError, match="as many bytes as the panels"):
            kernels.mapped(parts, [bias], wrong)
    with pytest.raises(ValueError, match="multiple of 64 bytes"):
        kernels.mapped(parts, [bias], room[at + 4 : at + 4 + held.nbytes])
    mapped, alive = kernels.mapped(parts, [bias], whole), weakref.ref(room)
    del room, whole, wrong
    gc.collect()
    x, got, want = (np.ones((3, 64), np.float32), *(np.zeros((3, 40), np.float32) for _ in range(2)))
    kernels.project(x, mapped, got)
    kernels.project(x, held, want)
    assert got.tobytes() == want.tobytes() and want.any() and alive() is not None
    with pytest.raises(ValueError, match="the panels of this matrix are mapped"):
        mapped.memory()
    del mapped
    gc.collect()
    assert alive() is None
