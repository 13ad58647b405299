"""Messages between rank 0 and the others: frames of MessagePack over a socket, never pickled objects."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, overload

import msgspec

from cairn.types.request import SamplingParams
from cairn.types.step import Row


class StartRank(msgspec.Struct, frozen=True, tag="start"):
    """The order to load a rank: its model, and the file through which it meets the other ranks."""

    folder: str
    config: dict[str, Any]
    rank: int
    ranks: int
    meeting: str
    blocks: tuple[int, ...]


class RowPart(msgspec.Struct, frozen=True, array_like=True):
    """The part of a row that its forward pass needs."""

    tokens: list[int]
    """Those from `start` to `end`."""
    start: int
    end: int
    tables: list[list[int]]


class Compute(msgspec.Struct, frozen=True, tag="compute"):
    """Compute a step."""

    number: int
    """How many steps were computed before: a rank that counts otherwise ends."""
    rows: list[RowPart]


class ReadPages(msgspec.Struct, frozen=True, tag="read"):
    """Send the pages of a group's blocks."""

    group: int
    ids: list[int]


class WritePages(msgspec.Struct, frozen=True, tag="write"):
    """Fill a group's blocks with pages."""

    group: int
    ids: list[int]
    pages: list[bytes]


class CopyBlocks(msgspec.Struct, frozen=True, tag="copy"):
    """Copy blocks within a group."""

    group: int
    pairs: list[tuple[int, int]]


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """The report of a rank that it is ready, or why it is not."""

    error: str = ""


class Pages(msgspec.Struct, frozen=True, tag="pages"):
    """The pages that were asked for."""

    pages: list[bytes]


ToRank = StartRank | Compute | ReadPages | WritePages | CopyBlocks
FromRank = Loaded | Pages
_TO_RANK: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
_FROM_RANK: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)


def send(connection: Connection, message: ToRank | FromRank) -> None:
    """Send a message. Raises `OSError` if the other end is gone."""
    connection.send_bytes(msgspec.msgpack.encode(message))


def receive_command(connection: Connection) -> ToRank:
    """Return the next command. Raises `EOFError` if rank 0 is gone."""
    return _TO_RANK.decode(connection.recv_bytes())


def receive_answer(connection: Connection) -> FromRank:
    """Return the next answer. Raises `EOFError` if the rank is gone."""
    return _FROM_RANK.decode(connection.recv_bytes())


def part_of(row: Row) -> RowPart:
    """Return what another rank needs of a row."""
    return RowPart(list(row.tokens[row.start : row.end]), row.start, row.end, [list(one) for one in row.tables])


class _Tail(Sequence[int]):
    """The tokens of a sequence of which a rank knows only the last."""

    def __init__(self, start: int, tokens: list[int]) -> None:
        self._start, self._tokens = start, tokens

    def __len__(self) -> int:
        return self._start + len(self._tokens)

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[int]: ...
    def __getitem__(self, place: int | slice) -> int | Sequence[int]:
        if isinstance(place, int):
            return self._tokens[place - self._start]
        start, stop, _ = place.indices(len(self))
        return self._tokens[start - self._start : stop - self._start]


def row_of(part: RowPart) -> Row:
    """Return a row without logits: rank 0 samples."""
    tokens = _Tail(part.start, part.tokens)
    return Row(tokens, part.start, part.end, tuple(part.tables), None, part.end, SamplingParams(max_tokens=1), 0)
