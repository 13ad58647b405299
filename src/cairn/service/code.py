"""Which code is on the disk: a worker that is started later than the front must be made of the same."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

import xxhash

import cairn

CHANGED = "Cairn's own files were changed since this server started, so it cannot start another worker; restart it"


def digest() -> bytes:
    """A digest of the names and contents of the package's modules as they are now. Raises OSError where one cannot be
    read."""
    folder = Path(cairn.__file__).parent
    found = xxhash.xxh3_128()
    walk = os.walk(folder, onerror=_refuse)  # `rglob` leaves out what it cannot read
    for path in sorted(Path(place, name) for place, _, names in walk for name in names):
        if path.suffix in (".py", ".so"):
            found.update(str(path.relative_to(folder)).encode() + b"\0")
            found.update(path.read_bytes())
    return found.digest()


def _refuse(error: OSError) -> NoReturn:
    raise error
