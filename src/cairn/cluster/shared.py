"""Opening the shared store that the options name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from cairn.cluster.blobs import Blobs
from cairn.cluster.feed import Feed
from cairn.cluster.folder import FolderBlobs
from cairn.cluster.guard import Guarded
from cairn.cluster.keys import HINT, ClusterKeys, read_keys
from cairn.cluster.shared_kv import SharedChunks
from cairn.config.config import Config
from cairn.config.paths import expanded
from cairn.system.interfaces import Clock, FileSystem, Rng
from cairn.types.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SharedStore:
    """A shared store with the keys of its cluster."""

    blobs: Guarded
    keys: ClusterKeys


def open_shared(config: Config, clock: Clock, files: FileSystem, rng: Rng) -> SharedStore | None:
    """Open the shared store; None if there is none.

    Raise ConfigError for an address or a key file that cannot be used. A store that does not answer is no error here.
    """
    if config.shared_store is None:
        if config.role != "both":
            raise ConfigError(f"role {config.role} needs shared_store, through which KV goes", field="role")
        return None
    if config.cluster_key_file is None:
        raise ConfigError(f"shared_store needs cluster_key_file; {HINT}", field="cluster_key_file")
    keys = read_keys(files, expanded(config.cluster_key_file), rng)
    return SharedStore(Guarded(open_blobs(config.shared_store, files, rng), clock), keys)


def open_chunks(config: Config, identity: bytes, clock: Clock, files: FileSystem, rng: Rng) -> SharedChunks | None:
    """Open the shared store of KV, with its thread started; None if there is none.

    `identity`: of the engine; replicas with another one share no KV. Raise as `open_shared` does.
    """
    shared = open_shared(config, clock, files, rng)
    if shared is None:
        return None
    feed = Feed(shared.blobs, shared.keys, f"kv-{shared.keys.name(b'kv', identity)[:32]}", clock, rng)
    chunks = SharedChunks(shared.blobs, shared.keys, feed, clock)
    chunks.start()
    return chunks


def open_blobs(address: str, files: FileSystem, rng: Rng) -> Blobs:
    """Open a shared store: a folder, `file:///folder`, or the URL of an object store (s3://, gs://, az://).

    Raise ConfigError for an address that cannot be used. The store itself is not asked yet.
    """
    if "://" not in address:
        return FolderBlobs(files, expanded(address).absolute(), rng)
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
