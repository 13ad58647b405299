"""The file format of one chunk. Pure: names and bytes, no disk.

The name says what an index needs, so that a start reads no file:

    <key>.<parent or ->.<model tag>.<depth>.<size of the file>[.<heads>]        all in hexadecimal

The heads tell which blocks it has besides its last, see `Chunk.heads`; a chunk of one block has none. The tag stands
for the engine's identity and the codec, so that chunks of many models share a folder and none reads another's. The
content is

    prefix   magic, format, length of the header, XXH3-128 of all three and the header
    header   msgpack of `ChunkHeader`: the whole identity, what the name says, size and XXH3-128 of each section
    tokens   4 bytes each
    pages    as the codec wrote them

Every byte is under a checksum, nothing may follow, and the header must agree with the name.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import msgspec
import xxhash

from cairn.kv.disk.codec import Codec
from cairn.kv.tiers.store import HEAD_BYTES, Chunk
from cairn.types.model_spec import CHUNK_BLOCKS, CHUNK_TOKENS

FORMAT = 1
_MAGIC = b"cairn kv"
_PREFIX = struct.Struct("<8sII")
_DIGEST = 16
_START = _PREFIX.size + _DIGEST
_LONGEST_HEADER = 4096
MOST_BEFORE_PAGES = _START + _LONGEST_HEADER + 4 * CHUNK_TOKENS
"""Most bytes of a file before its pages."""
HEADER_BYTES = 1024
"""Approximate bytes of a chunk's file beside its pages; model names of the usual length need no more."""
_KEY = 32


class DamagedChunk(ValueError):
    """The error for a file that fails a check. Never a reason to stop: the chunk is dropped and computed again."""


@dataclass(frozen=True, slots=True)
class Name:
    """The fields of a file's name."""

    key: bytes
    parent: bytes
    """Empty for the first chunk of a chain."""
    tag: bytes
    depth: int
    size: int
    """Bytes of the file."""
    heads: tuple[bytes, ...] = ()

    def __str__(self) -> str:
        heads = f".{b''.join(self.heads).hex()}" if self.heads else ""
        return f"{self.key.hex()}.{self.parent.hex() or '-'}.{self.tag.hex()}.{self.depth:x}.{self.size:x}{heads}"


class ChunkHeader(msgspec.Struct, frozen=True, array_like=True):
    """The header of a file."""

    model: str
    """Name of the model, for people."""
    identity: bytes
    group: int
    key: bytes
    parent: bytes
    depth: int
    codec: str
    tokens: int
    tokens_check: bytes
    pages_size: int
    pages_check: bytes
    heads: bytes = b""


def model_tag(identity: bytes, codec: str) -> bytes:
    """Return the eight bytes that stand for an engine's identity and a codec."""
    return hashlib.sha256(len(identity).to_bytes(8, "little") + identity + codec.encode()).digest()[:8]


def parse_name(text: str) -> Name | None:
    """Parse a file's name; return None if it is not a chunk's."""
    parts = text.split(".")
    if len(parts) not in (5, 6):
        return None
    try:
        key, tag = bytes.fromhex(parts[0]), bytes.fromhex(parts[2])
        parent = b"" if parts[1] == "-" else bytes.fromhex(parts[1])
        heads = _cut(bytes.fromhex(parts[5])) if len(parts) == 6 else ()
        name = Name(key, parent, tag, int(parts[3], 16), int(parts[4], 16), heads)
    except ValueError:
        return None
    if min(name.depth, name.size) < 0 or len(heads) >= CHUNK_BLOCKS:
        return None
    # Only the canonical spelling is valid: two names for one chunk would be counted twice.
    return name if len(key) == _KEY and len(parent) in (0, _KEY) and str(name) == text else None


def encode(chunk: Chunk, *, model: str, identity: bytes, codec: Codec) -> tuple[Name, list[bytes | memoryview]]:
    """Return a chunk's name and the parts to write, in order. Raise `ValueError` for pages that the codec refuses."""
    pages = codec.encode(chunk.group, chunk.pages)
    _check_size(len(pages), chunk.heads, codec.size(chunk.group))
    tokens = struct.pack(f"<{len(chunk.tokens)}I", *chunk.tokens)
    header = msgspec.msgpack.encode(
        ChunkHeader(
            model=model[:256],
            identity=identity,
            group=chunk.group,
            key=chunk.key,
            parent=chunk.parent,
            depth=chunk.depth,
            codec=codec.name,
            tokens=len(chunk.tokens),
            tokens_check=xxhash.xxh3_128_digest(tokens),
            pages_size=len(pages),
            pages_check=xxhash.xxh3_128_digest(pages),
            heads=b"".join(chunk.heads),
        )
    )
    prefix = _PREFIX.pack(_MAGIC, FORMAT, len(header))
    start = prefix + xxhash.xxh3_128_digest(prefix + header) + header + tokens
    tag = model_tag(identity, codec.name)
    name = Name(chunk.key, chunk.parent, tag, chunk.depth, len(start) + len(pages), chunk.heads)
    return name, [start, pages]


def _check_size(size: int, heads: tuple[bytes, ...], whole: int) -> None:
    """Raise `ValueError` if the size of the pages does not fit the number of blocks that the heads tell of.

    Without heads it is a whole chunk of an earlier version, a state, or a tail of one block. `whole`: bytes of a whole
    chunk.
    """
    if CHUNK_BLOCKS * size != whole * (len(heads) + 1) and (heads or size != whole):
        raise ValueError(
            f"{size} bytes of pages do not fit {len(heads) + 1} blocks: {CHUNK_BLOCKS} blocks have {whole} bytes"
        )


def name_of(data: bytes | memoryview) -> Name:
    """Return the name that a file's header calls for, unchecked. Raise `DamagedChunk` if there is no header."""
    view = memoryview(data)
    if len(view) < _START:
        raise DamagedChunk("too short")
    length = _PREFIX.unpack(view[: _PREFIX.size])[2]
    try:
        header = msgspec.msgpack.decode(view[_START : _START + min(length, _LONGEST_HEADER)], type=ChunkHeader)
    except msgspec.MsgspecError as error:
        raise DamagedChunk("the header is not one") from error
    return _header_name(header, len(view))


def _header_name(header: ChunkHeader, size: int) -> Name:
    """Return the name of a file of so many bytes with this header. Raise `DamagedChunk` if its heads are cut."""
    tag = model_tag(header.identity, header.codec)
    try:
        heads = _cut(header.heads)
    except ValueError as error:
        raise DamagedChunk("the header is not one") from error
    return Name(header.key, header.parent, tag, header.depth, size, heads)


def _cut(heads: bytes) -> tuple[bytes, ...]:
    """Split concatenated heads. Raise `ValueError` if the last one is cut."""
    if len(heads) % HEAD_BYTES:
        raise ValueError(f"{len(heads)} bytes are no whole number of {HEAD_BYTES}")
    return tuple(heads[at : at + HEAD_BYTES] for at in range(0, len(heads), HEAD_BYTES))


def verify(data: bytes | memoryview, name: Name) -> tuple[ChunkHeader, tuple[int, ...], memoryview]:
    """Return the header, tokens and encoded pages after every check. Raise `DamagedChunk` if one fails."""
    view = memoryview(data)
    if len(view) != name.size:
        raise DamagedChunk(f"the file has {len(view)} bytes, its name says {name.size}")
    header, pages_at = _verify_start(view, name)
    if header.pages_size < 0 or pages_at + header.pages_size != len(view):
        raise DamagedChunk("the sections do not fill the file")
    if xxhash.xxh3_128_digest(view[pages_at:]) != header.pages_check:
        raise DamagedChunk("the checksum of the pages is wrong")
    return header, _tokens(view, header, pages_at), view[pages_at:]


def tokens_of(data: bytes | memoryview, name: Name) -> tuple[int, ...]:
    """Return a file's tokens from its first `MOST_BEFORE_PAGES` bytes. Raise `DamagedChunk` if a check fails."""
    view = memoryview(data)
    header, pages_at = _verify_start(view, name)
    return _tokens(view, header, pages_at)


def _tokens(view: memoryview, header: ChunkHeader, end: int) -> tuple[int, ...]:
    return struct.unpack(f"<{header.tokens}I", view[end - 4 * header.tokens : end])


def _verify_start(view: memoryview, name: Name) -> tuple[ChunkHeader, int]:
    """Return the header and where the pages begin after every check of the bytes before."""
    if len(view) < _START:
        raise DamagedChunk("too short")
    magic, version, length = _PREFIX.unpack(view[: _PREFIX.size])
    if magic != _MAGIC or version != FORMAT or length > _LONGEST_HEADER or _START + length > len(view):
        raise DamagedChunk("not the start of a chunk")
    body = view[_START : _START + length]
    if xxhash.xxh3_128_digest(bytes(view[: _PREFIX.size]) + bytes(body)) != view[_PREFIX.size : _START]:
        raise DamagedChunk("the header's checksum is wrong")
    try:
        header = msgspec.msgpack.decode(body, type=ChunkHeader)
    except msgspec.MsgspecError as error:
        raise DamagedChunk("the header is not one") from error
    if _header_name(header, name.size) != name:
        raise DamagedChunk("the header is another chunk's")
    tokens_at = _START + length
    pages_at = tokens_at + 4 * header.tokens
    if header.tokens < 1 or pages_at > len(view):
        raise DamagedChunk("the tokens do not fit the file")
    if xxhash.xxh3_128_digest(view[tokens_at:pages_at]) != header.tokens_check:
        raise DamagedChunk("the checksum of the tokens is wrong")
    return header, pages_at


def decode(data: bytes | memoryview, name: Name, *, identity: bytes, codec: Codec) -> Chunk:
    """Return the verified chunk; its pages are a view of `data` unless the codec copies. Raise `DamagedChunk`."""
    header, tokens, pages = verify(data, name)
    if header.identity != identity or header.codec != codec.name:
        raise DamagedChunk("the chunk is another model's")
    try:
        _check_size(len(pages), name.heads, codec.size(header.group))
        whole = codec.decode(header.group, pages)
    except ValueError as error:
        raise DamagedChunk("the pages do not fit the model") from error
    return Chunk(header.key, header.parent, tokens, header.depth, whole, header.group, name.heads)
