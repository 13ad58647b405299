"""Files that are put into collections: how far each is, and why one could not be."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from cairn.rag.definition import MAX_DOCUMENTS, Attribute, Collection
from cairn.rag.document_store import Database
from cairn.types.errors import Conflict, NotFound

State = Literal["in_progress", "completed", "failed", "cancelled"]


class WantedFile(NamedTuple):
    """A file that is to be put into a collection."""

    file: str
    attributes: Mapping[str, Attribute] = {}
    sizes: tuple[int, int] | None = None
    """Characters of its chunks, and what they repeat."""


class Attachment(msgspec.Struct, frozen=True, kw_only=True):
    """One file of one collection."""

    file: str
    batch: str
    """The files that were put in together, by the id of the first call that did so; empty for one alone."""
    created: float
    state: State
    code: str
    why: str
    attributes: dict[str, Attribute]
    chunk: int
    overlap: int
    """Characters of its chunks, and what they repeat; 0: as its collection has them."""


_COLUMNS = "file, batch, created, state, code, why, attributes, chunk, overlap"


class Attachments:
    """Those of all collections. Any thread may call."""

    def __init__(self, database: Database, now: Callable[[], float]) -> None:
        self._database, self._now = database, now
        with database.change() as db:
            db.execute(
                "UPDATE attachments SET state='failed', code='server_error', why='the server ended before it was read' "
                "WHERE state='in_progress'"
            )

    def begin(self, collection: Collection, wanted: Sequence[WantedFile], batch: str) -> list[Attachment]:
        """Note files that are to be read; those that are there already, or are being read, are passed over.

        What is new of them. Conflict where they are too many, NotFound where the collection is gone."""
        found = []
        with self._database.change() as db:
            if db.execute("SELECT 1 FROM collections WHERE key=?", (collection.key,)).fetchone() is None:
                raise NotFound(f"there is no collection {collection.id}", field="id")
            (count,) = db.execute("SELECT count(*) FROM attachments WHERE collection=?", (collection.key,)).fetchone()
            for one in wanted:
                known = self._find(db, collection, one.file)
                if known is not None and known.state in ("in_progress", "completed"):
                    continue
                count += known is None
                if count > MAX_DOCUMENTS:
                    raise Conflict(f"{collection.id} would have {count} files; the limit is {MAX_DOCUMENTS}")
                db.execute(
                    f"INSERT OR REPLACE INTO attachments (collection, {_COLUMNS}) VALUES (?,?,?,?,?,?,?,?,?,?)",
                    (
                        *(collection.key, one.file, batch, self._now(), "in_progress", "", ""),
                        msgspec.json.encode(one.attributes),
                        *(one.sizes or (0, 0)),
                    ),
                )
                made = self._find(db, collection, one.file)
                assert made is not None
                found.append(made)
        return found

    def end(self, collection: Collection, file: str, state: State, code: str = "", why: str = "") -> None:
        """A file that was being read has come to an end."""
        with self._database.change() as db:
            db.execute(
                "UPDATE attachments SET state=?, code=?, why=? WHERE collection=? AND file=? AND state='in_progress'",
                (state, code, why, collection.key, file),
            )

    def note(self, collection: Collection, file: str, attributes: Mapping[str, Attribute]) -> None:
        """Other attributes for a file."""
        with self._database.change() as db:
            data = msgspec.json.encode(attributes)
            db.execute(
                "UPDATE attachments SET attributes=? WHERE collection=? AND file=?", (data, collection.key, file)
            )

    def get(self, collection: Collection, file: str) -> Attachment:
        """One file. NotFound for one that is not there."""
        with self._database.read() as db:
            found = self._find(db, collection, file)
        if found is None:
            raise NotFound(f"{collection.id} has no file {file[:64]}", field="file_id")
        return found

    def all(self, collection: Collection, batch: str = "") -> list[Attachment]:
        """All of a collection, or of those put in together; the oldest first."""
        with self._database.read() as db:
            rows = db.execute(
                f"SELECT {_COLUMNS} FROM attachments WHERE collection=? AND (?='' OR batch=?) ORDER BY rowid",
                (collection.key, batch, batch),
            ).fetchall()
        return [_attachment(row) for row in rows]

    def counts(self, collection: Collection) -> dict[str, int]:
        """How many files are in each state."""
        with self._database.read() as db:
            return dict(
                db.execute(
                    "SELECT state, count(*) FROM attachments WHERE collection=? GROUP BY state", (collection.key,)
                )
            )

    def of_file(self, tenant: str, file: str) -> list[str]:
        """The ids of a tenant's collections that a file was put into."""
        with self._database.read() as db:
            rows = db.execute(
                "SELECT collections.id FROM attachments JOIN collections ON collections.key = attachments.collection "
                "WHERE collections.tenant=? AND attachments.file=?",
                (tenant, file),
            ).fetchall()
        return [id for (id,) in rows]

    def remove(self, collection: Collection, file: str) -> None:
        """Forget a file."""
        with self._database.change() as db:
            db.execute("DELETE FROM attachments WHERE collection=? AND file=?", (collection.key, file))

    def _find(self, db: sqlite3.Connection, collection: Collection, file: str) -> Attachment | None:
        row = db.execute(
            f"SELECT {_COLUMNS} FROM attachments WHERE collection=? AND file=?", (collection.key, file)
        ).fetchone()
        return None if row is None else _attachment(row)


def _attachment(row: Sequence[object]) -> Attachment:
    given = dict(zip(_COLUMNS.split(", "), row, strict=True))
    return msgspec.convert(given | {"attributes": msgspec.json.decode(row[6])}, type=Attachment)  # type: ignore[call-overload]
