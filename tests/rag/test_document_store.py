"""Collections and uploaded files in their databases: search, ownership, and erasure."""

from __future__ import annotations

import io
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cairn.rag import document_store
from cairn.rag.attachments import Attachments, WantedFile
from cairn.rag.chunking import Piece
from cairn.rag.definition import Collection, NewDocument, Search
from cairn.rag.document_store import SLACK, DocumentStore, bytes_of
from cairn.rag.file_store import FileStore
from cairn.rag.filters import filter_of
from cairn.types.errors import Conflict, NotFound, Overloaded

MODEL = ("m", b"1", 3)


def vector(*numbers: float) -> Any:
    made = np.array(numbers, np.float32)
    return made / np.linalg.norm(made)


def new(id: str, **metadata: str) -> NewDocument:
    return NewDocument(id, f"{id}.txt", "txt", "", 9, metadata)


class Shelf:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.open()

    def open(self) -> None:
        self.store = DocumentStore(self.path, lambda: 1000.0)

    def add(self, collection: Collection, id: str, *texts: str, vectors: Any = None, **metadata: str) -> None:
        made = vectors or [vector(1, 0, 0)] * len(texts)
        pieces = [Piece("", text) for text in texts]
        self.store.add(collection, new(id, **metadata), pieces, made, MODEL)

    def found(self, collection: Collection, question: str, asked: Any, **wanted: Any) -> list[str]:
        return [one.chunk.text for one in self.store.search(collection, question, asked, Search(**wanted))]


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    made = Shelf(tmp_path / "c" / "collections.sqlite")
    yield made
    made.store.close()


def test_vectors_and_words_are_searched_together(shelf: Shelf) -> None:
    one = shelf.store.create("me", "c", 1000, 100, {})
    near = [vector(1, 0.1, 0), vector(1, 1, 0), vector(0, 0, 1)]
    shelf.add(one, "a", "of stones", "of bread", "a zebra", vectors=near)
    assert shelf.found(one, "nothing", vector(1, 0, 0)) == ["of stones", "of bread", "a zebra"]
    assert shelf.found(one, "the zebra", vector(1, 0, 0))[0] == "a zebra"  # third and first beat first alone
    assert shelf.found(one, "the zebra", vector(1, 0, 0), min_score=0.5) == ["of stones", "of bread"]
    assert shelf.found(one, 'what" OR *(', vector(1, 0, 0), top_k=1) == ["of stones"]


def test_filters_let_documents_through(shelf: Shelf) -> None:
    one = shelf.store.create("me", "c", 1000, 100, {})
    shelf.add(one, "a", "old stones", year="1")
    shelf.add(one, "b", "new stones", year="2")
    asked = vector(1, 0, 0)
    assert shelf.found(one, "stones", asked, documents=("b",)) == ["new stones"]
    assert shelf.found(one, "stones", asked, metadata={"year": "1"}) == ["old stones"]
    assert shelf.found(one, "stones", asked, metadata={"year": "1"}, documents=("b",)) == []


def test_words_of_documents_that_a_filter_leaves_out_take_no_places(shelf: Shelf) -> None:
    one = shelf.store.create("me", "c", 1000, 100, {})
    shelf.add(one, "mine", "about bread", "a long text with an invoice in it", vectors=[vector(1, 0, 0)] * 2)
    shelf.add(one, "other", *["invoice invoice"] * document_store.CANDIDATES)
    asked = vector(1, 0, 0)
    assert shelf.found(one, "invoice", asked, documents=("mine",))[0] == "a long text with an invoice in it"


def test_collections_are_a_tenants_own_and_survive(shelf: Shelf) -> None:
    one = shelf.store.create("me", "c", 1000, 100, {"a": "b"})
    other = shelf.store.create("you", "c", 1000, 100, {})
    shelf.add(one, "a", "mine")
    assert shelf.found(other, "mine", vector(1, 0, 0)) == []
    with pytest.raises(NotFound):
        shelf.store.document(other, "a")
    with pytest.raises(Conflict, match="a collection c already"):
        shelf.store.create("me", "c", 1000, 100, {})
    shelf.store.close()
    shelf.open()
    again = shelf.store.collection("me", "c")
    assert (again.documents, again.chunks, again.model, again.metadata) == (1, 1, "m", {"a": "b"})
    assert shelf.found(again, "mine", vector(1, 0, 0)) == ["mine"]


def test_what_is_erased_is_gone_from_the_disk(shelf: Shelf) -> None:
    one = shelf.store.create("me", "c", 1000, 100, {})
    shelf.add(one, "a", "a secretword here")
    shelf.add(one, "b", "another hiddenword")
    assert b"secretword" in shelf.path.read_bytes()
    shelf.store.remove(one, "a")
    assert b"secret" not in shelf.path.read_bytes() and b"hiddenword" in shelf.path.read_bytes()
    assert shelf.found(one, "secretword", vector(1, 0, 0)) == ["another hiddenword"]
    shelf.store.delete("me", "c")
    assert b"hiddenword" not in shelf.path.read_bytes()
    assert not [path for path in shelf.path.parent.iterdir() if b"word" in path.read_bytes() and path != shelf.path]


def test_a_document_that_cannot_be_added_leaves_nothing(shelf: Shelf) -> None:
    one = shelf.store.create("me", "c", 1000, 100, {})
    shelf.add(one, "a", "first")
    with pytest.raises(Conflict, match="a document a already"):
        shelf.add(one, "a", "second")
    with pytest.raises(Conflict, match="of the model m, not of n"):
        pieces, made = [Piece("", "third")], [vector(1, 0, 0)]
        shelf.store.add(one, new("b"), pieces, made, ("n", b"2", 3))
    assert shelf.found(one, "second third", vector(1, 0, 0)) == ["first"]
    assert shelf.store.collection("me", "c").model == "m"


def test_documents_and_chunks_of_a_collection_are_bounded(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (document_store.MAX_DOCUMENTS, document_store.MAX_CHUNKS) == (10_000, 50_000)
    monkeypatch.setattr(document_store, "MAX_DOCUMENTS", 2)
    monkeypatch.setattr(document_store, "MAX_CHUNKS", 3)
    one = shelf.store.create("me", "c", 1000, 100, {})
    shelf.add(one, "a", "first", "second")
    with pytest.raises(Conflict, match="4 chunks; the limit is 3"):
        shelf.add(one, "b", "third", "fourth")
    shelf.add(one, "b", "third")
    with pytest.raises(Conflict, match="has 2 documents, the limit"):
        shelf.add(one, "c", "fourth")
    monkeypatch.setattr(document_store, "MAX_COLLECTIONS", 1)
    with pytest.raises(Overloaded, match="1 collections, the limit"):
        shelf.store.create("me", "d", 1000, 100, {})


def test_vectors_are_held_of_those_that_were_searched_last(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [shelf.store.create("me", f"c{number}", 1000, 100, {}) for number in range(3)]
    for one in made:
        shelf.add(one, "a", f"of {one.id}")
    monkeypatch.setattr(document_store, "MAX_HELD", 24)  # two of 12 bytes
    for number in (0, 1, 0, 2, 1):
        assert shelf.found(made[number], "x", vector(1, 0, 0)) == [f"of c{number}"]
    assert list(shelf.store._matrices) == [made[2].key, made[1].key]


def test_a_deleted_collections_id_is_not_reused(shelf: Shelf) -> None:
    gone = shelf.store.create("me", "c", 1000, 100, {})
    shelf.add(gone, "a", "mine")
    shelf.store.delete("me", "c")
    shelf.store.close()
    shelf.open()  # also after a restart
    other = shelf.store.create("you", "c", 1000, 100, {})
    shelf.add(other, "a", "a secret")
    assert shelf.found(gone, "secret", vector(1, 0, 0)) == []
    with pytest.raises(NotFound, match="no collection c"):
        shelf.add(gone, "b", "put in")
    with pytest.raises(NotFound, match="no collection c"):
        Attachments(shelf.store.database, lambda: 1000.0).begin(gone, [WantedFile("file")], "")
    assert shelf.found(other, "secret", vector(1, 0, 0)) == ["a secret"]


def test_a_file_of_the_form_before_keeps_its_collections(tmp_path: Path) -> None:
    path = tmp_path / "collections.sqlite"
    with sqlite3.connect(path) as db:
        db.executescript("".join(document_store.MIGRATIONS[:2]) + "PRAGMA user_version=2;")
        db.execute("INSERT INTO collections VALUES (7,'me','c',1,1000,100,'',x'',0,'{}','')")
    db.close()
    store = DocumentStore(path, lambda: 1000.0)
    assert [store.collection("me", "c").key, store.create("me", "d", 1000, 100, {}).key] == [7, 8]
    store.close()


def test_bytes_of_a_tenant_are_of_headings_texts_vectors_and_metadata(shelf: Shelf) -> None:
    one = shelf.store.create("me", "c", 1000, 100, {})
    empty = shelf.store.bytes_of("me")
    pieces, document = [Piece("h" * 100, "ö" * 10)], new("a", year="1")
    shelf.store.add(one, document, pieces, [vector(1, 0, 0)], MODEL)
    size = 2 * 120 + 12 + len('{"year":"1"}') + len("a.txt")
    assert bytes_of(document, pieces, 3) == size
    assert (shelf.store.bytes_of("me"), shelf.store.bytes_of("you")) == (empty + size, 0)
    shelf.store.note(one, "a", {"year": "2026"})
    assert shelf.store.bytes_of("me") == empty + size + 3
    Attachments(shelf.store.database, lambda: 1000.0).begin(one, [WantedFile("file", {"a": "b" * 90})], "")
    assert shelf.store.bytes_of("me") == empty + size + 3 + 98
    shelf.store.remove(one, "a")
    shelf.store.delete("me", "c")
    assert shelf.store.bytes_of("me") == 0


def test_a_file_of_the_form_before_knows_what_its_documents_take(tmp_path: Path) -> None:
    path = tmp_path / "collections.sqlite"
    with sqlite3.connect(path) as db:
        db.executescript("".join(document_store.MIGRATIONS[:3]) + "PRAGMA user_version=3;")
        db.execute("INSERT INTO collections VALUES (1,'me','c',1,1000,100,'m',x'',3,'{}','')")
        db.execute("INSERT INTO documents VALUES (1,1,'a','a.txt','txt',1,9,'{}')")
        db.execute("INSERT INTO chunks VALUES (1,1,1,0,'h','öl',zeroblob(12))")
    db.close()
    store = DocumentStore(path, lambda: 1000.0)
    assert store.bytes_of("me") == len("{}") + len("a.txt") + len("{}") + 2 * 4 + 12
    store.close()


def test_a_file_with_one_index_for_all_gets_one_for_each_collection(tmp_path: Path) -> None:
    path = tmp_path / "collections.sqlite"
    with sqlite3.connect(path) as db:
        db.executescript("".join(document_store.MIGRATIONS[:4]) + "PRAGMA user_version=4;")
        for key, word in ((1, "granite"), (2, "basalt")):
            db.execute(f"INSERT INTO collections VALUES ({key},'me','c{key}',1,1000,100,'m',x'',3,'{{}}','')")
            db.execute(f"INSERT INTO documents VALUES ({key},{key},'a','a.txt','txt',1,9,'{{}}',0)")
            db.execute(f"INSERT INTO chunks VALUES ({key},{key},{key},0,'','{word}',zeroblob(12))")
            db.execute(f"INSERT INTO words (rowid, heading, text) VALUES ({key},'','{word}')")
    db.close()
    store = DocumentStore(path, lambda: 1000.0)
    one, two = store.collection("me", "c1"), store.collection("me", "c2")
    with store.database.read() as db:
        assert store._by_words(db, one, "granite basalt") == [1] and store._by_words(db, two, "granite") == []
    store.remove(one, "a")
    store.delete("me", "c2")
    store.close()
    assert b"granite" not in path.read_bytes() and b"basalt" not in path.read_bytes()


def test_ranks_do_not_depend_on_words_of_other_collections(shelf: Shelf) -> None:
    """Of two words the one that fewer of the collection's chunks have counts more, whatever others have."""
    one, other = shelf.store.create("me", "c", 1000, 100, {}), shelf.store.create("you", "c", 1000, 100, {})
    for id, text in (("a", "rare"), ("b", "usual"), ("c", "usual")):
        shelf.add(one, id, text)
    for number in range(50):
        shelf.add(other, f"d{number}", "rare")
    with shelf.store.database.read() as db:
        assert len(found := shelf.store._by_words(db, one, "usual rare")) == 3
        assert shelf.store._chunk(db, found[0]).text == "rare"


@pytest.mark.parametrize("early", [False, True])
def test_what_is_erased_is_given_back_to_the_disk(tmp_path: Path, early: bool) -> None:
    """A file of an older format cannot free single pages, so it is rewritten once half of it is free."""
    path = tmp_path / "collections.sqlite"
    if early:
        with sqlite3.connect(path) as db:
            db.executescript(
                "".join(document_store.MIGRATIONS) + f"PRAGMA user_version={len(document_store.MIGRATIONS)};"
            )
        db.close()
    store = DocumentStore(path, lambda: 1000.0)
    one = store.create("me", "c", 1000, 100, {})
    for id in "abc":
        pieces = [Piece("", f"{id} {number} " + "words " * 100) for number in range(2_000)]
        store.add(one, new(id), pieces, [vector(1, 0, 0)] * len(pieces), MODEL)
    full = path.stat().st_size
    store.remove(one, "b")
    assert (path.stat().st_size < 0.75 * full) is not early
    store.remove(one, "a")
    assert path.stat().st_size < 0.5 * full
    assert [chunk.chunk.document for chunk in store.search(one, "words", vector(1, 0, 0), Search())] == ["c"] * 5
    store.delete("me", "c")
    assert path.stat().st_size < SLACK < full // 4
    store.close()


def test_a_question_of_another_width_is_a_conflict(shelf: Shelf) -> None:
    one = shelf.store.create("me", "c", 1000, 100, {})
    assert [shelf.found(one, "x", vector(*numbers)) for numbers in ((1, 0, 0), (1, 0))] == [[], []]
    shelf.add(one, "a", "first")
    with pytest.raises(Conflict, match="embedded anew by another model"):
        shelf.found(one, "x", vector(1, 0))


def test_long_filters_are_looked_up(shelf: Shelf) -> None:
    one = shelf.store.create("me", "c", 1000, 100, {})
    for at in range(200):
        shelf.add(one, f"d{at}", f"text {at}", year=str(at))
    listed = {"type": "in", "key": "year", "value": [f"{at}" for at in range(1_000, 1_256)]}
    fits = filter_of({"type": "or", "filters": [listed] * 63 + [{"type": "eq", "key": "year", "value": "7"}]})
    began = time.process_time()
    assert shelf.found(one, "text", vector(1, 0, 0), fits=fits) == ["text 7"]
    names = (*(f"none{at}" for at in range(200_000)), "d9")
    assert shelf.found(one, "text", vector(1, 0, 0), documents=names) == ["text 9"]
    assert len(shelf.found(one, "word " * 3_000_000, vector(1, 0, 0))) == 5
    assert time.process_time() - began < 2.0


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
