"""Collections in one SQLite file: documents, chunks, an index of words, and vectors.

Whatever is erased is overwritten (`secure_delete`), and the index of words is written anew without it. Vectors are
compared exactly, all of a collection with the question's. Any thread may call.
"""

from __future__ import annotations

import re
import sqlite3
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from cairn.rag.chunking import Piece
from cairn.rag.database import Database
from cairn.rag.definition import (
    MAX_CHUNKS,
    MAX_COLLECTIONS,
    MAX_DOCUMENTS,
    Attribute,
    Collection,
    DocumentChunk,
    NewDocument,
    Search,
    SearchHit,
    StoredDocument,
)
from cairn.types.errors import Conflict, NotFound, Overloaded

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vector = NDArray[np.float32]

SHARE = 60
"""Of reciprocal rank fusion: how much the first places count before others."""
MAX_HELD = 512 << 20
"""Bytes of vectors that are held in memory, of the collections that were searched last; at least those of one."""
CANDIDATES = 100
"""Chunks that each of the two lists names."""
_WORDS = re.compile(r"\w+")
MAX_QUESTION = 10_000
"""Characters of a question in which words are looked for."""
MAX_WORDS = 64
"""Words of a question that are looked for."""
FORMS = (
    """
CREATE TABLE collections (key INTEGER PRIMARY KEY, tenant TEXT NOT NULL, id TEXT NOT NULL, created REAL NOT NULL,
  chunk INTEGER NOT NULL, overlap INTEGER NOT NULL, model TEXT NOT NULL DEFAULT '', identity BLOB NOT NULL DEFAULT x'',
  width INTEGER NOT NULL DEFAULT 0, metadata BLOB NOT NULL, UNIQUE (tenant, id));
CREATE TABLE documents (key INTEGER PRIMARY KEY, collection INTEGER NOT NULL, id TEXT NOT NULL, name TEXT NOT NULL,
  kind TEXT NOT NULL, created REAL NOT NULL, size INTEGER NOT NULL, metadata BLOB NOT NULL, UNIQUE (collection, id));
CREATE TABLE chunks (key INTEGER PRIMARY KEY, collection INTEGER NOT NULL, document INTEGER NOT NULL,
  number INTEGER NOT NULL, heading TEXT NOT NULL, text TEXT NOT NULL, vector BLOB NOT NULL);
CREATE INDEX chunks_of_collection ON chunks (collection);
CREATE INDEX chunks_of_document ON chunks (document);
CREATE VIRTUAL TABLE words USING fts5(heading, text);
""",
    """
ALTER TABLE collections ADD COLUMN name TEXT NOT NULL DEFAULT '';
CREATE TABLE attachments (collection INTEGER NOT NULL, file TEXT NOT NULL, batch TEXT NOT NULL, created REAL NOT NULL,
  state TEXT NOT NULL, code TEXT NOT NULL DEFAULT '', why TEXT NOT NULL DEFAULT '', attributes BLOB NOT NULL,
  chunk INTEGER NOT NULL DEFAULT 0, overlap INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (collection, file));
""",
    """
CREATE TABLE last (key INTEGER NOT NULL);
INSERT INTO last SELECT coalesce(max(key), 0) FROM collections;
""",
    """
ALTER TABLE documents ADD COLUMN kept INTEGER NOT NULL DEFAULT 0;
UPDATE documents SET kept = length(CAST(name AS BLOB)) + length(metadata) + coalesce((SELECT
  sum(2 * length(CAST(heading || text AS BLOB)) + length(vector)) FROM chunks WHERE document = documents.key), 0);
""",
)
"""The forms that the file has had, each made of the one before."""


def bytes_of(new: NewDocument, pieces: Sequence[Piece], width: int) -> int:
    """Return about how many bytes a document takes: its name and metadata, a vector of `width` numbers for each chunk,
    and headings and texts, which the index of words has once more."""
    texts = sum(len((piece.heading + piece.text).encode("utf-8", "replace")) for piece in pieces)
    return (
        len(new.name.encode("utf-8", "replace"))
        + len(msgspec.json.encode(new.metadata))
        + 2 * texts
        + (4 * width * len(pieces))
    )


class DocumentStore:
    """One file. Every method may raise Unavailable where the disk refuses it."""

    def __init__(self, path: Path, now: Callable[[], float]) -> None:
        self._now = now
        self.database = Database(path, FORMS, now)
        self._change, self._read = self.database.change, self.database.read
        self._matrices: OrderedDict[int, tuple[NDArray[np.int64], NDArray[np.float32]]] = OrderedDict()
        """Keys and vectors of the chunks of a collection, by its key; that which was asked for last is the last."""

    def close(self) -> None:
        """Close the file."""
        self.database.close()

    # -------------------------------------------------------------------------------------------------- collections

    def create(
        self, tenant: str, id: str, chunk: int, overlap: int, metadata: Mapping[str, str], name: str = ""
    ) -> Collection:
        """A new collection. Conflict if its id is taken, Overloaded if there are too many."""
        with self._change() as db:
            (count,) = db.execute("SELECT count(*) FROM collections WHERE tenant=?", (tenant,)).fetchone()
            if count >= MAX_COLLECTIONS:
                raise Overloaded(f"there are {MAX_COLLECTIONS} collections, the limit; delete some", retry_after=60.0)
            # never one that a collection has had: callers hold keys while they embed, and would go on with another's
            (key,) = db.execute("UPDATE last SET key = key + 1 RETURNING key").fetchone()
            try:
                db.execute(
                    "INSERT INTO collections (key, tenant, id, created, chunk, overlap, metadata, name) "
                    "VALUES (?,?,?,?,?,?,?,?)",
                    (key, tenant, id, self._now(), chunk, overlap, msgspec.json.encode(metadata), name),
                )
            except sqlite3.IntegrityError:
                raise Conflict(f"there is a collection {id} already", field="id") from None
            return self._collection(db, tenant, id)

    def bytes_of(self, tenant: str) -> int:
        """Return about how many bytes a tenant's collections take, with their documents and files."""
        theirs = "(SELECT key FROM collections WHERE tenant=?)"
        with self._read() as db:
            (found,) = db.execute(
                "SELECT (SELECT coalesce(sum(length(CAST(name AS BLOB)) + length(metadata)), 0) FROM collections "
                f"WHERE tenant=?) + (SELECT coalesce(sum(kept), 0) FROM documents WHERE collection IN {theirs}) + "
                f"(SELECT coalesce(sum(length(attributes)), 0) FROM attachments WHERE collection IN {theirs})",
                (tenant,) * 3,
            ).fetchone()
        return int(found)

    def collection(self, tenant: str, id: str) -> Collection:
        """One collection. NotFound for one that is not there or is another tenant's."""
        with self._read() as db:
            return self._collection(db, tenant, id)

    def collections(self, tenant: str) -> list[Collection]:
        """A tenant's, most recently created first."""
        with self._read() as db:
            ids = db.execute(
                "SELECT id FROM collections WHERE tenant=? ORDER BY created DESC, id", (tenant,)
            ).fetchall()
            return [self._collection(db, tenant, id) for (id,) in ids]

    def _collection(self, db: sqlite3.Connection, tenant: str, id: str) -> Collection:
        row = db.execute(
            "SELECT key, id, created, chunk, overlap, model, identity, width, name, metadata FROM collections "
            "WHERE tenant=? AND id=?",
            (tenant, id),
        ).fetchone()
        if row is None:
            raise NotFound(f"there is no collection {id[:64]}", field="id")
        documents, size = db.execute(
            "SELECT count(*), coalesce(sum(size), 0) FROM documents WHERE collection=?", row[:1]
        ).fetchone()
        (chunks,) = db.execute("SELECT count(*) FROM chunks WHERE collection=?", row[:1]).fetchone()
        names = ("key", "id", "created", "chunk", "overlap", "model", "identity", "width", "name")
        given = dict(zip(names, row, strict=False))
        metadata = msgspec.json.decode(row[9], type=dict[str, str])
        return Collection(**given, metadata=metadata, documents=documents, size=size, chunks=chunks)

    def change(self, tenant: str, id: str, name: str | None, metadata: Mapping[str, str] | None) -> Collection:
        """Give a collection another name or other metadata; None: as it is."""
        with self._change() as db:
            found = self._collection(db, tenant, id)
            name = found.name if name is None else name
            data = msgspec.json.encode(found.metadata if metadata is None else metadata)
            db.execute("UPDATE collections SET name=?, metadata=? WHERE key=?", (name, data, found.key))
            return self._collection(db, tenant, id)

    def delete(self, tenant: str, id: str) -> None:
        """Erase a collection with all that it holds."""
        with self._change() as db:
            found = self._collection(db, tenant, id)
            self._erase_chunks(db, "collection", found.key)
            db.execute("DELETE FROM documents WHERE collection=?", (found.key,))
            db.execute("DELETE FROM attachments WHERE collection=?", (found.key,))
            db.execute("DELETE FROM collections WHERE key=?", (found.key,))
            self._matrices.pop(found.key, None)
        self.database.shrink()

    # ---------------------------------------------------------------------------------------------------- documents

    def add(
        self,
        collection: Collection,
        new: NewDocument,
        pieces: Sequence[Piece],
        made: Sequence[Vector],
        model: tuple[str, bytes, int],
    ) -> StoredDocument:
        """A document with its chunks and their vectors, which `model` (name, identity, width) has made.

        Conflict if its id is taken, or if other documents of the collection have vectors of another model.
        """
        with self._change() as db:
            self._check_room(db, collection, len(pieces), model)
            db.execute("UPDATE collections SET model=?, identity=?, width=? WHERE key=?", (*model, collection.key))
            try:
                key = db.execute(
                    "INSERT INTO documents (collection, id, name, kind, created, size, metadata, kept) "
                    "VALUES (?,?,?,?,?,?,?,?)",
                    (
                        *(collection.key, new.id, new.name, new.kind, self._now(), new.size),
                        *(msgspec.json.encode(new.metadata), bytes_of(new, pieces, model[2])),
                    ),
                ).lastrowid
            except sqlite3.IntegrityError:
                raise Conflict(f"there is a document {new.id} already", field="id") from None
            for number, (piece, vector) in enumerate(zip(pieces, made, strict=True)):
                row = db.execute(
                    "INSERT INTO chunks (collection, document, number, heading, text, vector) VALUES (?,?,?,?,?,?)",
                    (collection.key, key, number, piece.heading, piece.text, vector.astype("<f4").tobytes()),
                ).lastrowid
                db.execute("INSERT INTO words (rowid, heading, text) VALUES (?,?,?)", (row, piece.heading, piece.text))
            self._matrices.pop(collection.key, None)
            return self._document(db, collection, new.id)

    def _check_room(
        self, db: sqlite3.Connection, collection: Collection, more: int, model: tuple[str, bytes, int]
    ) -> None:
        row = db.execute("SELECT model, identity FROM collections WHERE key=?", (collection.key,)).fetchone()
        if row is None:
            raise NotFound(f"there is no collection {collection.id}", field="id")
        (documents,) = db.execute("SELECT count(*) FROM documents WHERE collection=?", (collection.key,)).fetchone()
        (chunks,) = db.execute("SELECT count(*) FROM chunks WHERE collection=?", (collection.key,)).fetchone()
        if documents >= MAX_DOCUMENTS:
            raise Conflict(f"collection {collection.id} has {MAX_DOCUMENTS} documents, the limit", field="id")
        if chunks + more > MAX_CHUNKS:
            raise Conflict(
                f"collection {collection.id} would have {chunks + more} chunks; the limit is {MAX_CHUNKS}", field="text"
            )
        if chunks and row[1] != model[1]:
            raise Conflict(f"the vectors of collection {collection.id} are of the model {row[0]}, not of {model[0]}")

    def document(self, collection: Collection, id: str) -> StoredDocument:
        """One document. NotFound for one that is not there."""
        with self._read() as db:
            return self._document(db, collection, id)

    def documents(self, collection: Collection) -> list[StoredDocument]:
        """All documents, in the order in which they were added."""
        with self._read() as db:
            rows = db.execute(f"{_DOCUMENTS} ORDER BY key", (collection.key,)).fetchall()
            return [_read_document(row) for row in rows]

    def _document(self, db: sqlite3.Connection, collection: Collection, id: str) -> StoredDocument:
        row = db.execute(f"{_DOCUMENTS} AND id=?", (collection.key, id)).fetchone()
        if row is None:
            raise NotFound(f"collection {collection.id} has no document {id[:64]}", field="id")
        return _read_document(row)

    def note(self, collection: Collection, id: str, metadata: Mapping[str, Attribute]) -> None:
        """Give a document other metadata."""
        with self._change() as db:
            found = self._document(db, collection, id)
            data = msgspec.json.encode(metadata)
            db.execute(
                "UPDATE documents SET metadata=?, kept = kept - length(metadata) + ? WHERE key=?",
                (data, len(data), found.key),
            )

    def texts(self, collection: Collection, id: str) -> list[str]:
        """The chunks of a document, in order."""
        with self._read() as db:
            found = self._document(db, collection, id)
            rows = db.execute("SELECT text FROM chunks WHERE document=? ORDER BY number", (found.key,)).fetchall()
            return [text for (text,) in rows]

    def remove(self, collection: Collection, id: str) -> None:
        """Erase a document with its chunks."""
        with self._change() as db:
            found = self._document(db, collection, id)
            self._erase_chunks(db, "document", found.key)
            db.execute("DELETE FROM documents WHERE key=?", (found.key,))
            db.execute("DELETE FROM attachments WHERE collection=? AND file=?", (collection.key, id))
            self._matrices.pop(collection.key, None)
        self.database.shrink()

    def _erase_chunks(self, db: sqlite3.Connection, of: str, key: int) -> None:
        db.execute(f"DELETE FROM words WHERE rowid IN (SELECT key FROM chunks WHERE {of}=?)", (key,))
        db.execute(f"DELETE FROM chunks WHERE {of}=?", (key,))
        db.execute("INSERT INTO words (words) VALUES ('optimize')")  # what was erased is in the index until then

    # ------------------------------------------------------------------------------------------------------- search

    def search(self, collection: Collection, question: str, vector: Vector, wanted: Search) -> list[SearchHit]:
        """The chunks that fit best; none of a collection that is gone."""
        with self._read() as db:
            if db.execute("SELECT 1 FROM collections WHERE key=?", (collection.key,)).fetchone() is None:
                return []
            allowed = self._allowed(db, collection, wanted)
            keys, scores = self._scores(db, collection, vector)
            score_of = dict(zip(keys.tolist(), scores.tolist(), strict=True))
            by_vector = sorted(score_of, key=lambda key: (-score_of[key], key))
            by_words = self._by_words(db, collection, question)
            if allowed is not None:
                by_vector = [key for key in by_vector if key in allowed]
                by_words = [key for key in by_words if key in allowed]
            ranks: dict[int, float] = {}
            for listed, weight in zip((by_vector, by_words), wanted.weights, strict=True):
                for place, key in enumerate(listed[:CANDIDATES], 1):
                    ranks[key] = ranks.get(key, 0.0) + weight / (SHARE + place)
            good = [key for key in ranks if score_of[key] >= wanted.min_score]
            best = sorted(good, key=lambda key: (-ranks[key], key))[: wanted.top_k]
            return [SearchHit(chunk=self._chunk(db, key), score=score_of[key], rank=ranks[key]) for key in best]

    def _allowed(self, db: sqlite3.Connection, collection: Collection, wanted: Search) -> set[int] | None:
        """The chunks that the filters let through; None for all."""
        if not wanted.documents and not wanted.metadata and wanted.fits is None:
            return None
        found: set[int] = set()
        named = frozenset(wanted.documents)
        for key, id, metadata in db.execute(
            "SELECT key, id, metadata FROM documents WHERE collection=?", (collection.key,)
        ).fetchall():
            given = _attributes(metadata)
            fits = all(given.get(name) == value for name, value in wanted.metadata.items())
            fits = fits and (wanted.fits is None or wanted.fits(given))
            if fits and (not named or id in named):
                found |= {one for (one,) in db.execute("SELECT key FROM chunks WHERE document=?", (key,))}
        return found

    def _scores(
        self, db: sqlite3.Connection, collection: Collection, vector: Vector
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The cosine of every chunk with the question."""
        import numpy as np

        if collection.key not in self._matrices:
            rows = db.execute("SELECT key, vector FROM chunks WHERE collection=?", (collection.key,)).fetchall()
            keys = np.array([key for key, _ in rows], np.int64)
            flat = np.frombuffer(b"".join(one for _, one in rows), "<f4")
            self._matrices[collection.key] = keys, flat.reshape(len(rows), -1) if rows else flat.reshape(0, len(vector))
        self._matrices.move_to_end(collection.key)
        while len(self._matrices) > 1 and sum(matrix.nbytes for _, matrix in self._matrices.values()) > MAX_HELD:
            self._matrices.popitem(last=False)
        keys, matrix = self._matrices[collection.key]
        if not len(keys):
            return keys, np.zeros(0, np.float32)
        if matrix.shape[1] != len(vector):  # while the question was embedded, its documents were made anew
            raise Conflict(f"the vectors of collection {collection.id} are of another model meanwhile; ask again")
        return keys, matrix @ vector

    def _by_words(self, db: sqlite3.Connection, collection: Collection, question: str) -> list[int]:
        words = list(dict.fromkeys(_WORDS.findall(question[:MAX_QUESTION].lower())))[:MAX_WORDS]
        if not words:
            return []
        query = " OR ".join(f'"{word}"' for word in words)
        rows = db.execute(
            "SELECT words.rowid FROM words JOIN chunks ON chunks.key = words.rowid "
            "WHERE words MATCH ? AND chunks.collection = ? ORDER BY bm25(words), words.rowid LIMIT ?",
            (query, collection.key, CANDIDATES),
        )
        return [key for (key,) in rows.fetchall()]

    def _chunk(self, db: sqlite3.Connection, key: int) -> DocumentChunk:
        row = db.execute(
            "SELECT chunks.key, documents.id, documents.name, chunks.number, chunks.heading, chunks.text, "
            "documents.metadata FROM chunks "
            "JOIN documents ON documents.key = chunks.document WHERE chunks.key=?",
            (key,),
        ).fetchone()
        given = dict(zip(("key", "document", "name", "number", "heading", "text"), row, strict=False))
        return DocumentChunk(**given, metadata=_attributes(row[6]))


_DOCUMENTS = (
    "SELECT key, id, name, kind, created, size, metadata, "
    "(SELECT count(*) FROM chunks WHERE document=documents.key) FROM documents WHERE collection=?"
)


def _read_document(row: Sequence[Any]) -> StoredDocument:
    given = dict(zip(("key", "id", "name", "kind", "created", "size"), row, strict=False))
    return StoredDocument(**given, metadata=_attributes(row[6]), chunks=row[7])


def _attributes(data: bytes) -> dict[str, Attribute]:
    return msgspec.json.decode(data, type=dict[str, Attribute])
