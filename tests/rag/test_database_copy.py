"""Copies of a SQLite file that is being written: each is the file at one moment."""

from __future__ import annotations

import sqlite3
import threading
import time
from pathlib import Path

import pytest

from cairn.rag.copy_database import copy_database
from cairn.rag.document_store import Database
from cairn.types.errors import Unavailable

FORM = "CREATE TABLE pairs (key INTEGER PRIMARY KEY, one INTEGER, other INTEGER, text BLOB);"


def test_a_file_that_is_written_meanwhile(tmp_path: Path) -> None:
    made = Database(tmp_path / "made.sqlite", [FORM], time.monotonic)
    with made.change() as db:
        db.executemany("INSERT INTO pairs VALUES (?, 0, 0, ?)", [(key, bytes(20_000)) for key in range(300)])
    stop, rounds, durable = threading.Event(), 0, 0

    def work() -> None:
        nonlocal rounds, durable
        while not stop.is_set():
            rounds += 1
            with made.change() as db:
                db.execute("UPDATE pairs SET one = ?", (rounds,))
                db.execute("UPDATE pairs SET other = ?", (rounds,))
            durable = rounds

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for number in range(6):
            before = durable
            copy_database(tmp_path / "made.sqlite", tmp_path / f"{number}.sqlite")
            with sqlite3.connect(tmp_path / f"{number}.sqlite") as db:
                result = set(db.execute("SELECT one, other FROM pairs"))
                assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            db.close()
            ((one, other),) = result
            assert one == other and before <= one <= rounds
    finally:
        stop.set()
        thread.join()
        made.close()


def test_a_file_that_is_not_a_database_is_reported(tmp_path: Path) -> None:
    (tmp_path / "made.sqlite").write_bytes(b"nothing of the kind" * 100)
    with pytest.raises(Unavailable, match=r"made\.sqlite cannot be copied"):
        copy_database(tmp_path / "made.sqlite", tmp_path / "copy.sqlite")
