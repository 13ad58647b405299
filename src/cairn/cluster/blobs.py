"""The interface of a shared store: named objects that are made once, and a few that are replaced.

Names are segments of letters, digits and hyphens, separated by slashes. Two stores fulfil it: a folder (`folder.py`)
and an object store (`objects.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from cairn.system.interfaces import FileSystem, Rng
from cairn.types.errors import ConfigError

LARGEST = 1 << 30
"""Most bytes of an object that are read."""


class Blobs(Protocol):
    """A shared store. Any thread may call. Every call raises OSError if the store fails, and may then have worked."""

    def create(self, name: str, data: bytes) -> bool:
        """Make an object; return False, and change nothing, if there is one of that name. Durable on return."""
        ...

    def replace(self, name: str, data: bytes) -> None:
        """Make an object, or replace it as a whole."""
        ...

    def read(self, name: str) -> bytes | None:
        """Return an object; None if there is none."""
        ...

    def list(self, folder: str, after: str = "") -> Sequence[str]:
        """Return the names of all objects below a folder in order, those beyond the name `after` if it is given."""
        ...

    def delete(self, names: Sequence[str]) -> None:
        """Remove objects. Those that do not exist are passed over."""
        ...


def open_blobs(address: str, files: FileSystem, rng: Rng) -> Blobs:
    """Open a shared store: a folder, `file:///folder`, or the URL of an object store (s3://, gs://, az://).

    Raise ConfigError for an address that cannot be used. The store itself is not asked yet.
    """
    from cairn.cluster.folder import FolderBlobs

    if "://" not in address:
        return FolderBlobs(files, Path(address).expanduser().absolute(), rng)
    if address.startswith("file://"):
        return FolderBlobs(files, Path(unquote(urlsplit(address).path)), rng)
    from cairn.cluster.objects import ObjectBlobs

    try:
        return ObjectBlobs(address)
    except ImportError as error:
        raise ConfigError(
            f"shared_store: {urlsplit(address).scheme}:// needs the extra cluster: "
            f"pip install 'cairn-llm[cluster]' ({error})",
            field="shared_store",
        ) from error
