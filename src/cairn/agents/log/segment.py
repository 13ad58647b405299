"""The bytes of a token log's segment, format version 1. Nothing here touches the outside world.

    0       header       64 bytes: magic, version, number of the segment, seed, xxh3-128
    4096    the header again: one damaged sector costs what it holds, not the whole segment
    4160    records: mark (the seed), kind, size, lsn, key, xxh3-128, payload

The seed is drawn for each segment. It seeds every checksum and begins every record, so where bytes are damaged the
next record is found by looking for it, and no text that a client sends can pass for a record. A checksum also covers
the place of its record in the file: bytes of another place or another file are damage. `lsn` (log sequence number) is
unique in a log and gives the order of its records, whichever segments hold them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

import xxhash

VERSION = 1
"""Version of the format. Readers of every earlier version stay; a newer one is refused."""

_MAGIC = b"CAIRNLOG"
_HEADER = struct.Struct("<8sHxxxxxxQQ16x")  # then the checksum
_COPY = 4096
HEADER_BYTES = _COPY + 64
_RECORD = struct.Struct("<QBxxxIQQ")  # then the checksum
_SUM = 16
RECORD_BYTES = _RECORD.size + _SUM
"""Bytes of a record without its payload."""
MAX_PAYLOAD = 1 << 28


class SegmentHeader(NamedTuple):
    """Header of a segment."""

    number: int
    seed: int
    version: int = VERSION


class Record(NamedTuple):
    """A record of the log."""

    lsn: int
    kind: int
    key: int
    """What it is about: records with one key are erased together."""
    payload: bytes

    @property
    def size(self) -> int:
        """Bytes in a segment."""
        return RECORD_BYTES + len(self.payload)


SEAL = Record(0, 255, 0, b"")
"""Last record of a segment that is durable as a whole. It has no place in the order of records."""


class Scan(NamedTuple):
    """Contents of a segment."""

    records: list[Record]
    damaged: int
    """Bytes that are not records: a torn end, or damage."""


def encode_header(header: SegmentHeader) -> bytes:
    """Encode the bytes before the first record."""
    body = _HEADER.pack(_MAGIC, header.version, header.number, header.seed)
    copy = body + _sum(body)
    return copy + bytes(_COPY - len(copy)) + copy


def decode_header(data: bytes) -> SegmentHeader | None:
    """Decode the header, from either copy; return None if both are damaged.

    Headers of newer versions are decoded too: check the version first.
    """
    for start in (0, _COPY):
        body = data[start : start + _HEADER.size]
        if len(body) < _HEADER.size or data[start + len(body) : start + len(body) + _SUM] != _sum(body):
            continue
        magic, version, number, seed = _HEADER.unpack(body)
        if magic == _MAGIC:
            return SegmentHeader(number, seed, version)
    return None


def encode_record(header: SegmentHeader, offset: int, record: Record) -> bytes:
    """Encode a record that begins at `offset` of its segment."""
    if len(record.payload) > MAX_PAYLOAD:
        raise ValueError(f"a record holds at most {MAX_PAYLOAD} bytes")
    head = _RECORD.pack(header.seed, record.kind, len(record.payload), record.lsn, record.key)
    return head + _record_sum(header.seed, offset, head, record.payload) + record.payload


def scan(header: SegmentHeader, data: bytes) -> Scan:
    """Return every whole record of a segment's bytes, in order, whatever lies between them."""
    records = [record for _, record in walk(header, data)]
    return Scan(records, max(len(data) - HEADER_BYTES, 0) - sum(record.size for record in records))


def walk(header: SegmentHeader, data: bytes) -> Iterator[tuple[int, Record]]:
    """Yield the records of a segment, each with its offset."""
    mark = header.seed.to_bytes(8, "little")
    at = HEADER_BYTES
    while at < len(data):
        record = _decode(header, data, at, at)
        if record is not None:
            yield at, record
            at += record.size
            continue
        at = data.find(mark, at + 1)
        if at < 0:
            break


def decode_record(header: SegmentHeader, offset: int, data: bytes) -> Record | None:
    """Decode a record that lay at `offset` of its segment; return None if `data` is not exactly one."""
    record = _decode(header, data, 0, offset)
    return record if record is not None and record.size == len(data) else None


def _decode(header: SegmentHeader, data: bytes, at: int, offset: int) -> Record | None:
    """Decode the record at `at` of the data and `offset` of its segment; return None if there is none."""
    head = data[at : at + _RECORD.size]
    if len(head) < _RECORD.size:
        return None
    mark, kind, size, lsn, key = _RECORD.unpack(head)
    start = at + RECORD_BYTES
    if mark != header.seed or size > MAX_PAYLOAD or start + size > len(data):
        return None
    payload = data[start : start + size]
    if data[at + len(head) : start] != _record_sum(header.seed, offset, head, payload):
        return None
    return Record(lsn, kind, key, payload)


def _sum(body: bytes) -> bytes:
    return xxhash.xxh3_128_digest(body)


def _record_sum(seed: int, offset: int, head: bytes, payload: bytes) -> bytes:
    digest = xxhash.xxh3_128(head, seed=seed)
    digest.update(offset.to_bytes(8, "little"))
    digest.update(payload)
    return digest.digest()
