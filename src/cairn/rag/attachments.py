"""The state of files being added to collections: in progress, completed, failed (and why) or cancelled."""

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
    """A file to add to a collection."""

    file: str
    attributes: Mapping[str, Attribute] = {}
    sizes: tuple[int, int] | None = None
    """Chunk size and overlap in characters; None for the collection's."""


class Attachment(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a collection and its state."""

    file: str
    batch: str
    """Id of the batch it was added in; empty if it was added alone."""
    created: float
    state: State
    code: str
    why: str
    attributes: dict[str, Attribute]
    chunk: int
    overlap: int
    """Chunk size and overlap in characters; 0 for the collection's."""


_COLUMNS = "file, batch, created, state, code, why, attributes, chunk, overlap"


class Attachments:
    """The attachments of all collections. Thread-safe."""

    def __init__(self, database: Database, now: Callable[[], float]) -> None:
        self._database, self._now = database, now
        with database.change() as db:
            db.execute(
                "UPDATE attachments SET state='failed', code='server_error', why='the server ended before it was read' "
                "WHERE state='in_progress'"
            )

    def begin(self, collection: Collection, wanted: Sequence[WantedFile], batch: str) -> list[Attachment]:
        """Record files as in progress and return the new ones; those that are in progress or completed are skipped.

        Raise Conflict above MAX_DOCUMENTS files, NotFound if the collection was deleted.
        """
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
        """Record how reading a file ended, unless it ended already."""
        with self._database.change() as db:
            db.execute(
                "UPDATE attachments SET state=?, code=?, why=? WHERE collection=? AND file=? AND state='in_progress'",
                (state, code, why, collection.key, file),
            )

    def note(self, collection: Collection, file: str, attributes: Mapping[str, Attribute]) -> None:
        """Replace a file's attributes."""
        with self._database.change() as db:
            data = msgspec.json.encode(attributes)
            db.execute(
                "UPDATE attachments SET attributes=? WHERE collection=? AND file=?", (data, collection.key, file)
            )

    def get(self, collection: Collection, file: str) -> Attachment:
        """Return one file. Raise NotFound if the collection does not have it."""
        with self._database.read() as db:
            found = self._find(db, collection, file)
        if found is None:
            raise NotFound(f"{collection.id} has no file {file[:64]}", field="file_id")
        return found

    def all(self, collection: Collection, batch: str = "") -> list[Attachment]:
        """Return a collection's files, or those of one batch, the oldest first."""
        with self._database.read() as db:
            rows = db.execute(
                f"SELECT {_COLUMNS} FROM attachments WHERE collection=? AND (?='' OR batch=?) ORDER BY rowid",
                (collection.key, batch, batch),
            ).fetchall()
        return [_attachment(row) for row in rows]

    def counts(self, collection: Collection) -> dict[str, int]:
        """Return the number of files in each state."""
        with self._database.read() as db:
            return dict(
                db.execute(
                    "SELECT state, count(*) FROM attachments WHERE collection=? GROUP BY state", (collection.key,)
                )
            )

    def of_file(self, tenant: str, file: str) -> list[str]:
        """Return the ids of a tenant's collections that hold the file."""
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
