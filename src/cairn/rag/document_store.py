"""Collections in one SQLite file: documents, chunks, a full-text index, and vectors.

Erased data is overwritten (`secure_delete`) and the full-text index rebuilt without it. Each collection has an index of
its own: rebuilding one costs the others nothing, and their words change no ranks. A search compares the question with
every vector of the collection; there is no approximate index. Thread-safe.
"""

from __future__ import annotations

import re
import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from cairn.rag.chunking import Piece
from cairn.rag.copy_database import WAIT_SECONDS
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
from cairn.types.errors import Conflict, NotFound, Overloaded, Unavailable

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vector = NDArray[np.float32]


TROUBLE_SECONDS = 60.0
"""How long a disk error is reported, unless a write succeeds before."""
SLACK = 1 << 20
"""Free bytes that a file keeps for later writes."""
STEP = 1024
"""Pages freed in one transaction, so that others can use the file in between."""


class Database:
    """A SQLite file with migrations. Every method may raise Unavailable if the disk refuses it."""

    def __init__(self, path: Path, migrations: Sequence[str], now: Callable[[], float]) -> None:
        """Open the file and apply the SQL of `migrations` that it has not had; their number is its version.

        Raise Unavailable if it cannot be opened or a newer Cairn has written it.
        """
        self._lock = threading.Lock()
        self._now, self._failure, self._failed_at = now, "", 0.0
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=WAIT_SECONDS)
            path.chmod(0o600)
            self._db.executescript(
                "PRAGMA auto_vacuum=INCREMENTAL; PRAGMA journal_mode=TRUNCATE; PRAGMA synchronous=FULL; "
                "PRAGMA secure_delete=ON;"
            )
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            if version > len(migrations):
                raise Unavailable(f"{path}: written by a newer Cairn (format {version})")
            for number, migration in enumerate(migrations[version:], version + 1):
                self._db.executescript(f"BEGIN; {migration} PRAGMA user_version={number}; COMMIT;")
        except (sqlite3.Error, OSError) as error:
            raise Unavailable(f"{path}: the collections cannot be opened: {error}") from error

    @property
    def trouble(self) -> str:
        """The disk error of the last minute as a sentence; empty if there was none."""
        return self._failure if self._now() - self._failed_at < TROUBLE_SECONDS else ""

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()

    @contextmanager
    def change(self) -> Iterator[sqlite3.Connection]:
        """Run a transaction: on return all of it is durable, on an error none of it."""
        with self.read() as db:
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
                db.execute("COMMIT")
                self._failure = ""
            except BaseException:
                if db.in_transaction:  # a full disk has ended it already
                    db.execute("ROLLBACK")
                raise

    def shrink(self) -> None:
        """Return freed pages to the file system, but for SLACK bytes. Disk errors are ignored: a later call retries."""
        before = -1
        with suppress(Unavailable):
            while (free := self._give_back(before)) != before:
                before = free

    def _give_back(self, before: int) -> int:
        """Return some free pages to the file system; return how many are left, `before` if nothing more can be done."""
        with self.read() as db:
            free, size, pages, mode = (
                db.execute(f"PRAGMA {name}").fetchone()[0]
                for name in ("freelist_count", "page_size", "page_count", "auto_vacuum")
            )
            if free * size <= SLACK:
                return before
            if mode:
                db.executescript(f"PRAGMA incremental_vacuum({STEP})")  # `execute` would free a single page
            elif 2 * free < pages:  # written without auto_vacuum: rewrite it once less than half of it is in use
                return before
            else:
                db.execute("PRAGMA auto_vacuum=INCREMENTAL")
                db.execute("VACUUM")
            return int(db.execute("PRAGMA freelist_count").fetchone()[0])

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """Hold the connection for this thread alone."""
        with self._lock:
            try:
                yield self._db
            except sqlite3.Error as error:
                self._failure, self._failed_at = f"the collections cannot be used: {error}", self._now()
                raise Unavailable(self._failure, retry_after=10.0) from error


RANK_OFFSET = 60
"""The constant k of reciprocal rank fusion: the smaller, the more the first places count."""
MAX_HELD = 512 << 20
"""Bytes of vectors held in memory, those of the last searched collections; at least those of one."""
CANDIDATES = 100
"""Chunks taken from each of the two rankings."""
_WORDS = re.compile(r"\w+")
MAX_QUESTION = 10_000
"""Characters of a question that are searched for words."""
MAX_WORDS = 64
"""Words of a question used in the full-text search."""
MIGRATIONS = (
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
    """
DROP TABLE words;
""",
)
"""The schema's history, as `Database` applies it."""


def bytes_of(new: NewDocument, pieces: Sequence[Piece], width: int) -> int:
    """Return about how many bytes a document takes on disk.

    That is its name and metadata, a float32 vector of `width` numbers a chunk, and headings and texts twice: the
    full-text index has a copy.
    """
    texts = sum(len((piece.heading + piece.text).encode("utf-8", "replace")) for piece in pieces)
    return (
        len(new.name.encode("utf-8", "replace"))
        + len(msgspec.json.encode(new.metadata))
        + 2 * texts
        + (4 * width * len(pieces))
    )


class DocumentStore:
    """All tenants' collections in one file. Every method may raise Unavailable if the disk refuses it."""

    def __init__(self, path: Path, now: Callable[[], float]) -> None:
        self._now = now
        self.database = Database(path, MIGRATIONS, now)
        self._change, self._read = self.database.change, self.database.read
        self._matrices: OrderedDict[int, tuple[NDArray[np.int64], NDArray[np.float32]]] = OrderedDict()
        """Keys and vectors of a collection's chunks, by its key; the most recently used last."""
        with self._read() as db:
            keys = [key for (key,) in db.execute("SELECT key FROM collections").fetchall()]
            tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type='table'").fetchall()}
        for key in keys:
            if _words(key) not in tables:  # written before each collection had an index of its own
                with self._change() as db:
                    _index_words(db, key)

    def close(self) -> None:
        """Close the file."""
        self.database.close()

    # -------------------------------------------------------------------------------------------------- collections

    def create(
        self, tenant: str, id: str, chunk: int, overlap: int, metadata: Mapping[str, str], name: str = ""
    ) -> Collection:
        """Create a collection. Raise Conflict if its id is taken, Overloaded above MAX_COLLECTIONS."""
        with self._change() as db:
            (count,) = db.execute("SELECT count(*) FROM collections WHERE tenant=?", (tenant,)).fetchone()
            if count >= MAX_COLLECTIONS:
                raise Overloaded(f"there are {MAX_COLLECTIONS} collections, the limit; delete some", retry_after=60.0)
            # Keys are never reused: a caller that embeds while a collection is deleted must not write into another.
            (key,) = db.execute("UPDATE last SET key = key + 1 RETURNING key").fetchone()
            try:
                db.execute(
                    "INSERT INTO collections (key, tenant, id, created, chunk, overlap, metadata, name) "
                    "VALUES (?,?,?,?,?,?,?,?)",
                    (key, tenant, id, self._now(), chunk, overlap, msgspec.json.encode(metadata), name),
                )
            except sqlite3.IntegrityError:
                raise Conflict(f"there is a collection {id} already", field="id") from None
            _index_words(db, key)
            return self._collection(db, tenant, id)

    def bytes_of(self, tenant: str) -> int:
        """Return about how many bytes a tenant's collections take, documents and files included."""
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
        """Return one collection. Raise NotFound if there is none or it is another tenant's."""
        with self._read() as db:
            return self._collection(db, tenant, id)

    def collections(self, tenant: str) -> list[Collection]:
        """Return a tenant's collections, the newest first."""
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
        """Replace a collection's name or metadata; None leaves it."""
        with self._change() as db:
            found = self._collection(db, tenant, id)
            name = found.name if name is None else name
            data = msgspec.json.encode(found.metadata if metadata is None else metadata)
            db.execute("UPDATE collections SET name=?, metadata=? WHERE key=?", (name, data, found.key))
            return self._collection(db, tenant, id)

    def delete(self, tenant: str, id: str) -> None:
        """Erase a collection with its documents and vectors."""
        with self._change() as db:
            found = self._collection(db, tenant, id)
            db.execute(f"DROP TABLE {_words(found.key)}")
            db.execute("DELETE FROM chunks WHERE collection=?", (found.key,))
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
        """Store a document with its chunks and their vectors, made by `model` (name, identity, width).

        Raise Conflict if its id is taken, a limit is reached, the collection has vectors of another model, or an
        attached file was cancelled or removed meanwhile: document and state are stored together or not at all.
        """
        with self._change() as db:
            self._check_room(db, collection, len(pieces), model)
            if new.attached and not db.execute(_COMPLETE, (collection.key, new.id)).rowcount:
                raise Conflict(f"file {new.id} was cancelled or removed meanwhile", field=new.field)
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
            words = _words(collection.key)
            for number, (piece, vector) in enumerate(zip(pieces, made, strict=True)):
                row = db.execute(
                    "INSERT INTO chunks (collection, document, number, heading, text, vector) VALUES (?,?,?,?,?,?)",
                    (collection.key, key, number, piece.heading, piece.text, vector.astype("<f4").tobytes()),
                ).lastrowid
                db.execute(
                    f"INSERT INTO {words} (rowid, heading, text) VALUES (?,?,?)", (row, piece.heading, piece.text)
                )
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
        """Return one document. Raise NotFound if the collection does not have it."""
        with self._read() as db:
            return self._document(db, collection, id)

    def documents(self, collection: Collection) -> list[StoredDocument]:
        """Return all documents in the order in which they were added."""
        with self._read() as db:
            rows = db.execute(f"{_DOCUMENTS} ORDER BY key", (collection.key,)).fetchall()
            return [_read_document(row) for row in rows]

    def _document(self, db: sqlite3.Connection, collection: Collection, id: str) -> StoredDocument:
        row = db.execute(f"{_DOCUMENTS} AND id=?", (collection.key, id)).fetchone()
        if row is None:
            raise NotFound(f"collection {collection.id} has no document {id[:64]}", field="id")
        return _read_document(row)

    def note(self, collection: Collection, id: str, metadata: Mapping[str, Attribute]) -> None:
        """Replace a document's metadata."""
        with self._change() as db:
            found = self._document(db, collection, id)
            data = msgspec.json.encode(metadata)
            db.execute(
                "UPDATE documents SET metadata=?, kept = kept - length(metadata) + ? WHERE key=?",
                (data, len(data), found.key),
            )

    def texts(self, collection: Collection, id: str) -> list[str]:
        """Return the texts of a document's chunks, in order."""
        with self._read() as db:
            found = self._document(db, collection, id)
            rows = db.execute("SELECT text FROM chunks WHERE document=? ORDER BY number", (found.key,)).fetchall()
            return [text for (text,) in rows]

    def remove(self, collection: Collection, id: str) -> None:
        """Erase a document with its chunks."""
        with self._change() as db:
            found = self._document(db, collection, id)
            words = _words(collection.key)
            db.execute(f"DELETE FROM {words} WHERE rowid IN (SELECT key FROM chunks WHERE document=?)", (found.key,))
            db.execute(f"INSERT INTO {words} ({words}) VALUES ('optimize')")  # the erased words stay in it until then
            db.execute("DELETE FROM chunks WHERE document=?", (found.key,))
            db.execute("DELETE FROM documents WHERE key=?", (found.key,))
            db.execute("DELETE FROM attachments WHERE collection=? AND file=?", (collection.key, id))
            self._matrices.pop(collection.key, None)
        self.database.shrink()

    # ------------------------------------------------------------------------------------------------------- search

    def search(self, collection: Collection, question: str, vector: Vector, wanted: Search) -> list[SearchHit]:
        """Return the best hits, best first; none if the collection was deleted."""
        with self._read() as db:
            if db.execute("SELECT 1 FROM collections WHERE key=?", (collection.key,)).fetchone() is None:
                return []
            allowed = self._allowed(db, collection, wanted)
            keys, scores = self._scores(db, collection, vector)
            score_of = dict(zip(keys.tolist(), scores.tolist(), strict=True))
            by_vector = sorted(score_of, key=lambda key: (-score_of[key], key))
            if allowed is not None:
                by_vector = [key for key in by_vector if key in allowed]
            by_words = self._by_words(db, collection, question, allowed)
            ranks: dict[int, float] = {}
            for listed, weight in zip((by_vector, by_words), wanted.weights, strict=True):
                for place, key in enumerate(listed[:CANDIDATES], 1):
                    ranks[key] = ranks.get(key, 0.0) + weight / (RANK_OFFSET + place)
            good = [key for key in ranks if score_of[key] >= wanted.min_score]
            best = sorted(good, key=lambda key: (-ranks[key], key))[: wanted.top_k]
            return [SearchHit(chunk=self._chunk(db, key), score=score_of[key], rank=ranks[key]) for key in best]

    def _allowed(self, db: sqlite3.Connection, collection: Collection, wanted: Search) -> set[int] | None:
        """Return the keys of chunks that pass the filters; None without filters."""
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
        """Return all chunk keys of a collection and their cosine similarities with the question, both [chunks]."""
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
        if matrix.shape[1] != len(vector):  # re-embedded by another model while the question was embedded
            raise Conflict(f"collection {collection.id} was just embedded anew by another model; ask again")
        return keys, matrix @ vector

    def _by_words(
        self, db: sqlite3.Connection, collection: Collection, question: str, allowed: set[int] | None = None
    ) -> list[int]:
        """Return the keys of the `allowed` chunks that have most of a question's words, the best first."""
        words = list(dict.fromkeys(_WORDS.findall(question[:MAX_QUESTION].lower())))[:MAX_WORDS]
        if not words:
            return []
        query = " OR ".join(f'"{word}"' for word in words)
        table = _words(collection.key)
        rows = db.execute(
            f"SELECT rowid FROM {table} WHERE {table} MATCH ? ORDER BY bm25({table}), rowid LIMIT ?",
            (query, CANDIDATES if allowed is None else -1),  # those that are not allowed would take the places
        ).fetchall()
        return [key for (key,) in rows if allowed is None or key in allowed][:CANDIDATES]

    def _chunk(self, db: sqlite3.Connection, key: int) -> DocumentChunk:
        row = db.execute(
            "SELECT chunks.key, documents.id, documents.name, chunks.number, chunks.heading, chunks.text, "
            "documents.metadata FROM chunks "
            "JOIN documents ON documents.key = chunks.document WHERE chunks.key=?",
            (key,),
        ).fetchone()
        given = dict(zip(("key", "document", "name", "number", "heading", "text"), row, strict=False))
        return DocumentChunk(**given, metadata=_attributes(row[6]))


def _words(key: int) -> str:
    """Return the name of a collection's full-text index."""
    return f"words_{key}"


def _index_words(db: sqlite3.Connection, key: int) -> None:
    """Make a collection's full-text index of the chunks that it has."""
    db.execute(f"CREATE VIRTUAL TABLE {_words(key)} USING fts5(heading, text)")
    db.execute(
        f"INSERT INTO {_words(key)} (rowid, heading, text) SELECT key, heading, text FROM chunks WHERE collection=?",
        (key,),
    )


_COMPLETE = "UPDATE attachments SET state='completed' WHERE collection=? AND file=? AND state='in_progress'"
_DOCUMENTS = (
    "SELECT key, id, name, kind, created, size, metadata, "
    "(SELECT count(*) FROM chunks WHERE document=documents.key) FROM documents WHERE collection=?"
)


def _read_document(row: Sequence[Any]) -> StoredDocument:
    given = dict(zip(("key", "id", "name", "kind", "created", "size"), row, strict=False))
    return StoredDocument(**given, metadata=_attributes(row[6]), chunks=row[7])


def _attributes(data: bytes) -> dict[str, Attribute]:
    return msgspec.json.decode(data, type=dict[str, Attribute])
