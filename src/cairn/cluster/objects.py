"""An object store as a shared store, through obstore: S3 and what speaks it, Google's and Azure's.

Addresses and keys come from the usual variables of the environment (AWS_ENDPOINT, AWS_ACCESS_KEY_ID, ...).
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from datetime import timedelta

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError, PreconditionError
from obstore.store import from_url

from cairn.cluster.blobs import LARGEST
from cairn.types.errors import ConfigError

PIECE = 8 << 20
"""Bytes of a large object that are read at once; pieces are read in parallel."""
SECONDS = 10.0
"""Most seconds of one request to the store, and of all its retries."""


class ObjectBlobs:
    """`Blobs` in an object store."""

    def __init__(self, address: str) -> None:
        """Open `address`, such as s3://bucket/prefix. Raise ConfigError if it names no store."""
        limit = timedelta(seconds=SECONDS)
        try:
            self._store = from_url(
                address,
                client_options={"allow_http": True, "timeout": limit, "connect_timeout": timedelta(seconds=2)},
                retry_config={"max_retries": 2, "retry_timeout": limit},
            )
        except (BaseError, ValueError) as error:
            raise ConfigError(
                f"shared_store: {address} is not an object store that can be used: {error}", field="shared_store"
            ) from error

    def create(self, name: str, data: bytes) -> bool:
        """See `Blobs`. A retry inside the client may find its own first try: then it is the same object."""
        try:
            obstore.put(self._store, name, data, mode="create", use_multipart=False)
        except (AlreadyExistsError, PreconditionError):
            return False
        except BaseError as error:
            raise _failed(error) from error
        return True

    def replace(self, name: str, data: bytes) -> None:
        """See `Blobs`."""
        try:
            obstore.put(self._store, name, data, use_multipart=False)
        except BaseError as error:
            raise _failed(error) from error

    def read(self, name: str) -> bytes | None:
        """See `Blobs`. A large object is read in ranges, several at once."""
        try:
            found = obstore.get(self._store, name)
            size = min(found.meta["size"], LARGEST)
            if size <= PIECE:
                return bytes(found.bytes())
            starts = range(0, size, PIECE)
            lengths = [min(PIECE, size - at) for at in starts]
            return b"".join(
                map(bytes, obstore.get_ranges(self._store, name, starts=list(starts), lengths=lengths, coalesce=0))
            )
        except (NotFoundError, FileNotFoundError):
            return None
        except BaseError as error:
            raise _failed(error) from error

    def list(self, folder: str, after: str = "") -> Sequence[str]:
        """See `Blobs`."""
        try:
            pages = obstore.list(self._store, prefix=folder, offset=after or None, chunk_size=1000)
            return sorted(str(one["path"]) for page in pages for one in page)
        except BaseError as error:
            raise _failed(error) from error

    def delete(self, names: Sequence[str]) -> None:
        """See `Blobs`."""
        try:
            obstore.delete(self._store, list(names))
        except (NotFoundError, FileNotFoundError):
            return
        except BaseError as error:
            raise _failed(error) from error


def _failed(error: Exception) -> OSError:
    """Return the error of a store, without the pages of detail that follow its first line."""
    return OSError(errno.EIO, str(error).partition("\n")[0])
