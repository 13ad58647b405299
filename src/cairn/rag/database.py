"""A SQLite file of one's own: opened, brought to its newest form, and used by one thread at a time.

Whatever is erased is overwritten (`secure_delete`). A change is durable when it is over, or did not happen.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from cairn.types.errors import Unavailable

TROUBLE_SECONDS = 60.0
"""How long it is told that the disk refused something, unless it takes something before."""
SLACK = 1 << 20
"""Bytes that a file keeps free for what comes next."""
STEP = 1024
"""Pages that are given back in one go: others may use the file between two."""


WAIT_SECONDS = 60.0
"""How long a change waits for a copy that is being made, and a copy for changes."""


def copy_database(source: Path, target: Path) -> None:
    """Copy a file that another process may be writing, as it is at one moment; changes wait meanwhile.

    Raises Unavailable.
    """
    try:
        address = f"{source.absolute().as_uri()}?mode=ro"
        with (
            closing(sqlite3.connect(address, uri=True, isolation_level=None, timeout=WAIT_SECONDS)) as there,
            closing(sqlite3.connect(target)) as copy,
        ):
            there.execute("BEGIN")
            there.execute("SELECT count(*) FROM sqlite_master").fetchone()  # from here on nothing changes
            there.backup(copy)
            there.execute("COMMIT")
    except sqlite3.Error as error:
        raise Unavailable(f"{source} cannot be copied to {target}: {error}") from error


class Database:
    """One file. Every use may raise Unavailable where the disk refuses it."""

    def __init__(self, path: Path, forms: Sequence[str], now: Callable[[], float]) -> None:
        """`forms`: SQL that makes the first form of the file, and of each form the next; how many of them were applied
        is the file's version. Unavailable where it cannot be opened, or a newer Cairn has written it."""
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
            if version > len(forms):
                raise Unavailable(f"{path}: written by a newer Cairn (format {version})")
            for number, form in enumerate(forms[version:], version + 1):
                self._db.executescript(f"BEGIN; {form} PRAGMA user_version={number}; COMMIT;")
        except (sqlite3.Error, OSError) as error:
            raise Unavailable(f"{path}: the collections cannot be opened: {error}") from error

    @property
    def trouble(self) -> str:
        """Why the file could not be used within the last minute, as a sentence; empty when it could."""
        return self._failure if self._now() - self._failed_at < TROUBLE_SECONDS else ""

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()

    @contextmanager
    def change(self) -> Iterator[sqlite3.Connection]:
        """A transaction: all of it is durable on return, or nothing of it is there."""
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
        """Give the disk back what was freed in the file, but for a little. What the disk refuses is left for later."""
        before = -1
        with suppress(Unavailable):
            while (free := self._give_back(before)) != before:
                before = free

    def _give_back(self, before: int) -> int:
        """Give back some free pages. Returns how many are left; `before` where nothing more can be done."""
        with self.read() as db:
            free, size, pages, mode = (
                db.execute(f"PRAGMA {name}").fetchone()[0]
                for name in ("freelist_count", "page_size", "page_count", "auto_vacuum")
            )
            if free * size <= SLACK:
                return before
            if mode:
                db.executescript(f"PRAGMA incremental_vacuum({STEP})")  # `execute` gives back a single page
            elif 2 * free < pages:  # of an earlier form: it is written anew once that is less than was freed
                return before
            else:
                db.execute("PRAGMA auto_vacuum=INCREMENTAL")
                db.execute("VACUUM")
            return int(db.execute("PRAGMA freelist_count").fetchone()[0])

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """The file, for this thread alone."""
        with self._lock:
            try:
                yield self._db
            except sqlite3.Error as error:
                self._failure, self._failed_at = f"the collections cannot be used: {error}", self._now()
                raise Unavailable(self._failure, retry_after=10.0) from error
