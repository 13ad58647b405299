"""A chunk as a file: its name holds what the index needs, and no byte of it can change unnoticed."""

from __future__ import annotations

import random

import pytest

from cairn.kv.disk import chunk_file
from cairn.kv.disk.chunk_file import DamagedChunk, Name, parse_name
from cairn.kv.disk.codec import Raw
from cairn.kv.tiers.store import Chunk
from tests.kv.stored import SIZE, chain

CODEC = Raw([SIZE // 4])


def written(chunk: Chunk, identity: bytes = b"model") -> tuple[Name, bytes]:
    name, parts = chunk_file.encode(chunk, model="m", identity=identity, codec=CODEC)
    return name, b"".join(parts)


def test_a_chunk_comes_back_from_its_file() -> None:
    for chunk in chain(3):
        name, data = written(chunk)
        assert name.size == len(data)
        assert parse_name(str(name)) == name
        assert chunk_file.decode(data, name, identity=b"model", codec=CODEC) == chunk


def test_every_bit_is_under_a_checksum() -> None:
    """A corrupt or truncated file must never be trusted (known failure 30)."""
    name, data = written(chain(2)[1])
    for at in range(len(data)):
        for bit in (1, 1 << (at % 8)):
            with pytest.raises(DamagedChunk):
                chunk_file.verify(data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :], name)
    for end in range(0, len(data), 7):
        with pytest.raises(DamagedChunk):
            chunk_file.verify(data[:end], name)
    with pytest.raises(DamagedChunk):
        chunk_file.verify(data + b"\0", name)


def test_another_chunks_or_models_file_is_not_believed() -> None:
    """The whole identity is in the file, not only the eight bytes of a digest in its name (known failure 28)."""
    first, second = chain(2)
    name, data = written(first)
    other, _ = written(second)
    with pytest.raises(DamagedChunk, match="another chunk's"):
        chunk_file.verify(data, Name(other.key, name.parent, name.tag, name.depth, name.size))
    with pytest.raises(DamagedChunk, match="another model's"):
        chunk_file.decode(data, name, identity=b"other", codec=CODEC)
    _, foreign = written(first, b"other")
    with pytest.raises(DamagedChunk):
        chunk_file.decode(foreign, name, identity=b"model", codec=CODEC)


def test_a_name_has_one_spelling() -> None:
    name, _ = written(chain(2)[1])
    text = str(name)
    parts = text.split(".")
    for wrong in (
        text.upper(),
        text + ".",
        text + ".0",
        ".".join(parts[:4]),
        ".".join([*parts[:3], "0" + parts[3], parts[4]]),
        ".".join([*parts[:4], "+" + parts[4]]),
        ".".join([*parts[:4], "-" + parts[4]]),
        ".".join([*parts[:3], "-" + parts[3], parts[4]]),
        ".".join([parts[0][:-2], *parts[1:]]),
        ".".join([parts[0], "", *parts[2:]]),
        "tmp-1",
        "",
    ):
        assert parse_name(wrong) is None, wrong
    rng = random.Random(1)
    for _ in range(2_000):
        bent = list(text)
        bent[rng.randrange(len(bent))] = rng.choice("0123456789abcdef.-xyz ")
        parsed = parse_name("".join(bent))
        assert parsed is None or str(parsed) == "".join(bent)
