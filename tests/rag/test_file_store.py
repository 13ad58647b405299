"""Stored files that are deleted while they are read."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from cairn.rag.file_store import FileStore
from cairn.types.errors import NotFound


def test_a_file_that_is_deleted_while_it_is_read_does_not_become_anothers(tmp_path: Path) -> None:
    store, size = FileStore(tmp_path / "files.sqlite", lambda: 1000.0), 3 << 20
    file = store.add("me", "file-a", "a", "assistants", io.BytesIO(b"a" * size), size)
    pieces = store.pieces(file)
    assert next(pieces)[:2] == b"aa"
    store.delete("me", "file-a")
    store.add("you", "file-b", "b", "assistants", io.BytesIO(b"b" * size), size)
    with pytest.raises(NotFound, match="no file file-a"):
        next(pieces)
    store.close()
