"""The choice of an engine and its device, and models and pools that are refused before they are loaded."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from cairn.config.config import Config
from cairn.engine.fake import FakeEngine
from cairn.engine.load_engine import load_engine
from cairn.engine.recorded import RecordedEngine
from cairn.types.errors import ModelError
from cairn.types.step import Row
from tests.gguf_files import write_gguf
from tests.tiny_models import GREEDY, prompt, write_model


def test_auto_and_cpu_load_the_cpu_engine(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    for name in ("auto", "cpu"):
        spec, engine = load_engine(Config(engine=name, kv_gb=0.01, threads=1), folder)  # type: ignore[arg-type]
        assert isinstance(engine, RecordedEngine) and spec.name == tmp_path.name
        engine.close()


def test_several_ranks_without_torch_name_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "torch" else find(name, *more))
    with pytest.raises(ModelError, match="ranks meet through torch: torch is not installed; install Cairn with"):
        load_engine(Config(tp=2, kv_gb=0.01, threads=1), write_model(tmp_path))


def test_fake_takes_the_same_spec_and_limits(tmp_path: Path) -> None:
    """Every option that the engines share is honoured by both (known failure 50)."""
    folder = write_model(tmp_path, use_sliding_window=True, sliding_window=20, max_window_layers=1)
    config = Config(engine="fake", kv_gb=0.01, threads=1, context=100, step_tokens=32, max_running=5)
    spec, fake = load_engine(config, folder)
    same, real = load_engine(
        Config(engine="cpu", kv_gb=0.01, threads=1, context=100, step_tokens=32, max_running=5), folder
    )
    assert isinstance(fake, FakeEngine) and spec == same
    for name in ("groups", "blocks", "context", "vocab", "max_rows", "max_tokens", "block_tokens"):
        assert getattr(fake.info, name) == getattr(real.info, name), name
    assert fake.info.identity != real.info.identity
    row = Row(prompt(9), 0, 9, ([0], [0]), 8, 9, GREEDY, 0)
    assert fake.prefill([row]).wait()[0].token is not None


@pytest.mark.parametrize("name", ["cpu", "fake"])
def test_a_pool_of_a_given_size_does_not_follow_the_memory_that_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A worker that replaces another gets the same pool, or reports that it has no room for it."""
    folder, config = write_model(tmp_path), Config(engine=name, threads=1, max_running=8)  # type: ignore[arg-type]
    for free in (10**9, 40_000_000):
        monkeypatch.setattr("cairn.engine.memory.memory_available", lambda free=free: free)
        _, engine = load_engine(config, folder, blocks=(77,))
        assert engine.info.blocks == (77,)
        engine.close()
    if name == "cpu":
        with pytest.raises(ModelError, match=r"KV pool, .* buffers\), 0\.04 GB are free"):
            load_engine(config, folder, blocks=(1 << 16,))


@pytest.mark.parametrize("kind", ["gguf", "folder"])
def test_a_model_that_is_too_large_is_refused_from_its_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Hashing the files would take minutes for a model that fits no memory."""
    folder = write_model(tmp_path / "model", "LlamaForCausalLM")
    place = folder if kind == "folder" else write_gguf(folder, tmp_path / "m.gguf")

    def read(path: Path) -> bytes:
        raise AssertionError(f"{path} was read")

    monkeypatch.setattr("cairn.models.spec.config.file_digest", read)
    monkeypatch.setattr("cairn.engine.memory.memory_available", lambda: 100_000)
    with pytest.raises(ModelError, match=r"needs 0\.\d+ GB of memory .*, 0\.00 GB are free"):
        load_engine(Config(threads=1), place)


def test_a_file_that_is_replaced_while_its_identity_is_taken_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The header that was read would belong to another model."""
    path = write_gguf(write_model(tmp_path / "model", "LlamaForCausalLM"), tmp_path / "m.gguf")

    def replaced(path: Path) -> bytes:
        fresh = path.with_suffix(".new")
        fresh.write_bytes(path.read_bytes())
        fresh.replace(path)
        return b"same"

    monkeypatch.setattr("cairn.models.spec.config.file_digest", replaced)
    with pytest.raises(ModelError, match="was changed while it was loaded; start again"):
        load_engine(Config(kv_gb=0.01, threads=1), path)


def test_a_model_that_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"expected a \.gguf file, or a folder"):
        load_engine(Config(), tmp_path / "nothing")


def test_a_context_beyond_the_models_is_refused_and_not_cut(tmp_path: Path) -> None:
    """Known failure 50."""
    with pytest.raises(ModelError, match=r"context is 4096, but .* was made for at most \d+ tokens"):
        load_engine(Config(context=4096), write_model(tmp_path))
