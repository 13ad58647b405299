"""Which code is on the disk: a worker that is started later than the front must be made of the same."""

from __future__ import annotations

from pathlib import Path

import xxhash

import cairn

CHANGED = "Cairn's own files were changed since this server started, so it cannot start another worker; restart it"


def digest() -> bytes:
    """Of the names and contents of the package's modules as they are now; empty where they cannot be read."""
    folder = Path(cairn.__file__).parent
    found = xxhash.xxh3_128()
    try:
        for path in sorted((*folder.rglob("*.py"), *folder.rglob("*.so"))):
            found.update(str(path.relative_to(folder)).encode() + b"\0")
            found.update(path.read_bytes())
    except OSError:
        return b""
    return found.digest()
