"""The interface of a shared store: named objects that are made once, and a few that are replaced.

Names are segments of letters, digits and hyphens, separated by slashes. Two stores fulfil it: a folder (`folder.py`)
and an object store (`objects.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

LARGEST = 1 << 30
"""Most bytes of an object that are read."""


class Blobs(Protocol):
    """A shared store. Any thread may call. Every call raises OSError if the store fails, and may then have worked."""

    def create(self, name: str, data: bytes) -> bool:
        """Make an object; return False, and change nothing, if there is one of that name. Durable on return."""
        ...

    def replace(self, name: str, data: bytes) -> None:
        """Make an object, or replace it as a whole. Not durable in a folder: for what is written again soon."""
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
