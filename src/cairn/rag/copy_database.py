"""A copy of a SQLite file that another process may be writing meanwhile."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from cairn.types.errors import Unavailable

WAIT_SECONDS = 60.0
"""How long a write waits for a copy that is being made, and a copy for writes."""


def copy_database(source: Path, target: Path) -> None:
    """Copy a file as it is at one moment; writes wait meanwhile. Raise Unavailable if it cannot be read or written."""
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
