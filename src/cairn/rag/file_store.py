"""Uploaded files in one SQLite file: kept byte for byte until deleted, then overwritten."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from cairn.rag.document_store import Database
from cairn.types.errors import NotFound, Overloaded

MAX_FILES = 10_000
"""Files of one tenant."""
MAX_KEPT = 10 << 30
"""Bytes of all files of one tenant."""
_PIECE = 1 << 20
_MIGRATIONS = (
    """
CREATE TABLE files (key INTEGER PRIMARY KEY, tenant TEXT NOT NULL, id TEXT NOT NULL, name TEXT NOT NULL,
  purpose TEXT NOT NULL, created REAL NOT NULL, size INTEGER NOT NULL, UNIQUE (tenant, id));
CREATE TABLE pieces (file INTEGER NOT NULL, number INTEGER NOT NULL, data BLOB NOT NULL, PRIMARY KEY (file, number));
""",
    """
CREATE TABLE last (key INTEGER NOT NULL);
INSERT INTO last SELECT coalesce(max(key), 0) FROM files;
""",
)
"""The schema's history, as `Database` applies it."""


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """An uploaded file, without its content."""

    key: int
    id: str
    name: str
    purpose: str
    created: float
    size: int


class FileStore:
    """The files of all tenants. Thread-safe; every method may raise Unavailable if the disk refuses it."""

    def __init__(self, path: Path, now: Callable[[], float]) -> None:
        self._now, self.database = now, Database(path, _MIGRATIONS, now)
        self.folder = path.parent

    def close(self) -> None:
        """Close the file."""
        self.database.close()

    def add(self, tenant: str, id: str, name: str, purpose: str, file: BinaryIO, size: int) -> StoredFile:
        """Keep a file, which is read to its end. Overloaded where the tenant has too many, or too many bytes."""
        with self.database.change() as db:
            count, kept = db.execute(
                "SELECT count(*), coalesce(sum(size), 0) FROM files WHERE tenant=?", (tenant,)
            ).fetchone()
            if count >= MAX_FILES:
                raise Overloaded(f"there are {MAX_FILES} files, the limit; delete some", retry_after=60.0)
            if kept + size > MAX_KEPT:
                raise Overloaded(f"the files would have {kept + size} bytes; the limit is {MAX_KEPT}", retry_after=60.0)
            # never one that a file has had: who reads a file that is deleted meanwhile would go on with another's
            (key,) = db.execute("UPDATE last SET key = key + 1 RETURNING key").fetchone()
            db.execute(
                "INSERT INTO files (key, tenant, id, name, purpose, created, size) VALUES (?,?,?,?,?,?,?)",
                (key, tenant, id, name, purpose, self._now(), size),
            )
            number = 0
            while data := file.read(_PIECE):
                db.execute("INSERT INTO pieces VALUES (?,?,?)", (key, number, data))
                number += 1
            return self._file(db, tenant, id)

    def get(self, tenant: str, id: str) -> StoredFile:
        """Return one file. Raise NotFound if there is none or it is another tenant's."""
        with self.database.read() as db:
            return self._file(db, tenant, id)

    def list(self, tenant: str) -> list[StoredFile]:
        """Return a tenant's files, the oldest first."""
        with self.database.read() as db:
            ids = db.execute("SELECT id FROM files WHERE tenant=? ORDER BY created, id DESC", (tenant,)).fetchall()
            return [self._file(db, tenant, id) for (id,) in ids]

    def bytes_of(self, tenant: str) -> int:
        """Return the size of all files of a tenant, in bytes."""
        with self.database.read() as db:
            return int(db.execute("SELECT coalesce(sum(size), 0) FROM files WHERE tenant=?", (tenant,)).fetchone()[0])

    def pieces(self, file: StoredFile) -> Iterator[bytes]:
        """Yield the content in pieces. Raise NotFound if the file is deleted meanwhile."""
        left, number = file.size, 0
        while left:
            with self.database.read() as db:
                row = db.execute("SELECT data FROM pieces WHERE file=? AND number=?", (file.key, number)).fetchone()
            if row is None:
                raise NotFound(f"there is no file {file.id}", field="file_id")
            yield row[0]
            left, number = left - len(row[0]), number + 1

    def copy(self, file: StoredFile, target: BinaryIO) -> None:
        """Write the content to `target`."""
        for piece in self.pieces(file):
            target.write(piece)

    def delete(self, tenant: str, id: str) -> None:
        """Erase a file."""
        with self.database.change() as db:
            found = self._file(db, tenant, id)
            db.execute("DELETE FROM pieces WHERE file=?", (found.key,))
            db.execute("DELETE FROM files WHERE key=?", (found.key,))
        self.database.shrink()

    def _file(self, db: sqlite3.Connection, tenant: str, id: str) -> StoredFile:
        row = db.execute(
            "SELECT key, id, name, purpose, created, size FROM files WHERE tenant=? AND id=?", (tenant, id)
        ).fetchone()
        if row is None:
            raise NotFound(f"there is no file {id[:64]}", field="file_id")
        return StoredFile(**dict(zip(("key", "id", "name", "purpose", "created", "size"), row, strict=True)))
