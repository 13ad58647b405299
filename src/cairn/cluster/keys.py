"""The cluster's keys: what is put into a shared store is sealed, and its name tells nothing.

Token ids and KV are the conversation, and a store may be read and written by others. So every object is encrypted and
authenticated with AES-256-GCM, together with its name: one that was changed, cut or moved to another name is refused.

    object:   CRNS, version (1 byte), key id (8), nonce (12), ciphertext with tag
    key file: one line `names HEX`, then lines `key HEX` of 64 digits each; the first `key` seals, all of them open

Each object has a key of its own, derived from the file's key and its name, so nonces need not be unique over all
objects. Names are HMACs under the `names` key: who reads the store can neither see nor guess what was said. That key
stays when keys are rotated.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from pathlib import Path
from typing import TYPE_CHECKING

from cairn.system.interfaces import FileSystem, Rng
from cairn.types.errors import ConfigError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

MAGIC = b"CRNS\x01"
ID_BYTES = 8
NONCE_BYTES = 12
HEADER_BYTES = len(MAGIC) + ID_BYTES + NONCE_BYTES
TAG_BYTES = 16
SEALED_BYTES = HEADER_BYTES + TAG_BYTES
"""Bytes that sealing adds."""
KEY_BYTES = 32
LARGEST_FILE = 1 << 16
HINT = "make one with 'cairn cluster key FILE' and copy it to every replica"


class ClusterKeys:
    """The keys of one cluster."""

    def __init__(self, names: bytes, keys: tuple[bytes, ...], rng: Rng) -> None:
        """Take the key of names and those of objects: the first seals, all of them open."""
        try:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError as error:
            raise ConfigError(
                f"shared_store needs the package cryptography, which cannot be imported: {error}; "
                "install it with: pip install cryptography",
                field="shared_store",
            ) from error
        self._cipher = AESGCM
        self._names, self._rng = names, rng
        self._keys = {_id(key): key for key in keys}
        self._first = _id(keys[0])

    def name(self, *parts: bytes) -> str:
        """Return the keyed digest of these parts, as 64 hexadecimal digits."""
        return _digest(self._names, *parts).hex()

    def seal(self, name: str, content: bytes | bytearray | memoryview) -> bytes:
        """Return the sealed content of the object of this name."""
        nonce = struct.pack("<QI", self._rng.bits64(), self._rng.bits64() & 0xFFFFFFFF)
        header = MAGIC + self._first + nonce
        return header + self._of(self._first, name).encrypt(nonce, content, header + name.encode())

    def open(self, name: str, data: bytes) -> bytes | None:
        """Return the content that was sealed for this name; None for anything else.

        That includes objects that are changed, cut short, sealed under an unknown key or for another name.
        """
        from cryptography.exceptions import InvalidTag

        header = data[:HEADER_BYTES]
        id = header[len(MAGIC) : len(MAGIC) + ID_BYTES]
        if len(data) < SEALED_BYTES or not header.startswith(MAGIC) or id not in self._keys:
            return None
        try:
            nonce = header[-NONCE_BYTES:]
            return self._of(id, name).decrypt(nonce, memoryview(data)[HEADER_BYTES:], header + name.encode())
        except InvalidTag:
            return None

    def _of(self, id: bytes, name: str) -> AESGCM:
        return self._cipher(_digest(self._keys[id], b"object", name.encode()))


def _id(key: bytes) -> bytes:
    return hashlib.sha256(b"cairn cluster key id 1\0" + key).digest()[:ID_BYTES]


def _digest(key: bytes, *parts: bytes) -> bytes:
    """Return the HMAC of these parts, each preceded by its length, so that two lists of parts never collide."""
    found = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        found.update(struct.pack("<q", len(part)))
        found.update(part)
    return found.digest()


def new_key_file(rng: Rng, old: str = "") -> str:
    """Return the text of a new key file; with the text of an old one, that with a new first key."""
    fresh = _draw(rng).hex()
    if not old:
        comment = "# Keys of a Cairn cluster. Keep this file secret, and the same on every replica."
        return f"{comment}\nnames {_draw(rng).hex()}\nkey {fresh}\n"
    lines = old.splitlines()
    at = next(number for number, line in enumerate(lines) if line.split()[:1] == ["key"])
    return "\n".join([*lines[:at], f"key {fresh}", *lines[at:]]) + "\n"


def _draw(rng: Rng) -> bytes:
    bits = b"".join(struct.pack("<Q", rng.bits64()) for _ in range(8))
    return hashlib.sha256(b"cairn cluster key 1\0" + bits).digest()


def read_keys(files: FileSystem, path: Path, rng: Rng) -> ClusterKeys:
    """Read a key file. Raise ConfigError if it cannot be read, others may read it, or a line is no key."""
    try:
        if files.mode(path) & 0o077:
            raise ConfigError(
                f"cluster_key_file: others than its owner may use {path}; run: chmod 600 {path}",
                field="cluster_key_file",
            )
        file = files.open(path, "read")
        try:
            text = file.read(0, LARGEST_FILE + 1)
        finally:
            file.close()
    except OSError as error:
        raise ConfigError(
            f"cluster_key_file: {path} cannot be read: {error.strerror or error}; {HINT}", field="cluster_key_file"
        ) from error
    names, keys = parse_keys(text.decode("utf-8", "replace"), str(path))
    return ClusterKeys(names, keys, rng)


def parse_keys(text: str, where: str) -> tuple[bytes, tuple[bytes, ...]]:
    """Return the key of names and the keys of objects. Raise ConfigError for a line that is neither."""
    found: dict[str, list[bytes]] = {"names": [], "key": []}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            key = bytes.fromhex(words[1])
            if len(words) != 2 or len(key) != KEY_BYTES:
                raise ValueError
            found[words[0]].append(key)
        except (IndexError, KeyError, ValueError):
            raise ConfigError(
                f"cluster_key_file: line {number} of {where} is not 'names' or 'key' and 64 hexadecimal digits",
                field="cluster_key_file",
            ) from None
    if len(found["names"]) != 1 or not found["key"]:
        raise ConfigError(
            f"cluster_key_file: {where} needs one line 'names' and at least one line 'key'; {HINT}",
            field="cluster_key_file",
        )
    return found["names"][0], tuple(found["key"])
