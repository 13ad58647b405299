"""Remembered digests of model files: hashed once, and again when a file changes."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from cairn.config.config import Config
from cairn.engine.load_engine import load_engine
from cairn.models.hub import digests
from cairn.models.hub.digests import file_digest, memory_path
from cairn.models.packing.packed_file import prune
from cairn.types.errors import ModelFileError
from tests.tiny_models import write_model


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a file that is large enough to be remembered, and set a cache folder of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(digests, "REMEMBER_FROM", 4)
    path = tmp_path / "weights"
    path.write_bytes(b"first")
    return path


def test_a_known_file_is_not_read_again(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    want = hashlib.sha256(b"first").digest()
    assert file_digest(file) == want
    monkeypatch.setattr(digests.hashlib, "file_digest", lambda *arguments: pytest.fail("read again"))
    assert file_digest(file) == want


def test_a_changed_file_is_read_again(file: Path) -> None:
    """Other weights in the same place are another model, and the old ones are forgotten (known failures 11, 28)."""
    file_digest(file)
    stat = file.stat()
    file.write_bytes(b"other")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert file_digest(file) == hashlib.sha256(b"other").digest()
    replaced = file.with_name("new")
    replaced.write_bytes(b"third")
    os.utime(replaced, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    os.replace(replaced, file)
    assert file_digest(file) == hashlib.sha256(b"third").digest()
    stat = file.stat()
    file.write_bytes(b"4th..")  # in place, of the same length, with the old time
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert file_digest(file) == hashlib.sha256(b"4th..").digest()
    assert len(json.loads(memory_path().read_bytes())) == 1


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b'{"a": 1}', b'{"a": "zz"}', b'{"a": "00"}', b"[" * 99999])
def test_a_broken_memory_is_forgotten(text: bytes, file: Path) -> None:
    """A corrupt cache costs time and nothing else (known failure 30)."""
    memory_path().parent.mkdir(parents=True)
    memory_path().write_bytes(text)
    assert file_digest(file) == hashlib.sha256(b"first").digest()
    assert memory_path().read_bytes() != text


def test_a_home_that_cannot_be_written(file: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    assert file_digest(file) == hashlib.sha256(b"first").digest()


def test_small_files_are_not_remembered(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "REMEMBER_FROM", 1 << 20)
    file_digest(file)
    assert not memory_path().exists()


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="nothing: the file is missing"):
        file_digest(tmp_path / "nothing")


def test_a_user_without_a_home_hashes_each_time(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", nobody)
    assert file_digest(file) == hashlib.sha256(b"first").digest()
    assert prune() == (0, 0)


def test_a_full_disk_keeps_no_partial_cache(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(digests.json, "dump", full)
    assert file_digest(file) == hashlib.sha256(b"first").digest()
    assert not list(memory_path().parent.iterdir())


def test_where_nothing_can_be_remembered_a_start_hashes_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start asks both before it loads and after."""
    (tmp_path / "cache").write_text("a file where a folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(digests, "REMEMBER_FROM", 1)
    folder = write_model(tmp_path / "m")
    real, read = digests._hashed_whole, []

    def count(file: Any, size: int) -> bytes:
        read.append(Path(os.readlink(f"/proc/self/fd/{file.fileno()}")).name)
        return real(file, size)

    monkeypatch.setattr(digests, "_hashed_whole", count)
    _, engine = load_engine(Config(kv_gb=0.01, threads=1), folder)
    engine.close()
    assert read and len(read) == len(set(read))
    (folder / "model.safetensors").touch()
    read.clear()
    file_digest(folder / "model.safetensors")
    assert read == ["model.safetensors"]
