"""An agent as one file: what the log holds of it, in the bytes of a log's segment.

    header       as of a segment with number 0
    1            AGENT
    2 ...        TURN of the beginning, then TURN and END of every turn, abandoned branches included
    last         SAVINGS

`lsn` counts the records from 1, so a file with a missing end or a gap is recognized. Sampling parameters are not part
of it: an interrupted turn stays interrupted, and cannot be resumed elsewhere. KV is not part of it either: `with_kv`
puts it in front (`kv/disk/portable_kv.py`). Missing KV is computed again from the tokens, or for another model from the
text.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from cairn.agents.agent_registry import AgentRegistry
from cairn.agents.archive import Archive, Unreadable, typed_read_errors
from cairn.agents.content import Content
from cairn.agents.kv import AgentKv
from cairn.agents.log.index import RecordKind
from cairn.agents.log.records import AgentRecord, EndRecord, SavingsRecord, TurnRecord, decode, pack, unpack
from cairn.agents.log.segment import (
    HEADER_BYTES,
    VERSION,
    Record,
    SegmentHeader,
    decode_header,
    encode_header,
    encode_record,
    scan,
)
from cairn.agents.turn_tree import Agent, Turn
from cairn.kv.disk import portable_kv
from cairn.system.interfaces import UPLOADED, Rng
from cairn.text.chat.messages import plain_message
from cairn.types.errors import InvalidRequest, Unavailable
from cairn.types.request import MAX_APPLIED, OutputFormat
from cairn.types.stats import ImportedKv

COPY_BYTES = 1 << 20


async def with_kv(
    pieces: AsyncGenerator[bytes, None], kv: AgentKv, agent: Agent, most: int
) -> AsyncGenerator[bytes, None]:
    """Yield the disk store's KV of the agent's context, then the pieces of its file.

    At most `most` bytes, from the beginning of the context on; none if the model is not loaded or stores nothing.
    Nothing is yielded before the first of `pieces` is there.
    """
    async with contextlib.aclosing(pieces):
        first = await anext(pieces)
        yield portable_kv.MAGIC
        left = most
        for path in await kv.paths(agent):
            data = await asyncio.to_thread(_read, path)
            if len(data) > left:
                break
            left -= len(data)
            if data:
                yield portable_kv.framed(len(data))
                yield data
        yield portable_kv.END
        yield first
        async for piece in pieces:
            yield piece


def _read(path: Path) -> bytes:
    """Return a chunk's file; empty if it was evicted meanwhile or cannot be read: its KV is computed again."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


class _Readable:
    """An uploaded file with the reading half of `interfaces.File`."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def read(self, offset: int, size: int) -> bytes:
        self._file.seek(offset)
        return self._file.read(size)

    def size(self) -> int:
        return self._file.seek(0, 2)


def kv_bytes(file: BinaryIO) -> int:
    """Return how many bytes of a file are KV, from its frames' lengths. Raise InvalidRequest if it is cut off."""
    end = 0
    try:
        for at, length in portable_kv.frames(_Readable(file)):
            end = at + length
    except portable_kv.Broken as error:
        raise InvalidRequest(f"the file is damaged or cut off: {error}") from None
    return end


@contextlib.contextmanager
def kv_file(file: BinaryIO, size: int, folder: Path) -> Iterator[Path]:
    """Yield the path of a temporary copy of an unnamed file's KV. Any thread.

    Raise Unavailable if the disk refuses.
    """
    try:
        with tempfile.NamedTemporaryFile(dir=folder if folder.is_dir() else None, prefix=UPLOADED) as copy:
            file.seek(0)
            while size > 0 and (data := file.read(min(size, COPY_BYTES))):
                copy.write(data)
                size -= len(data)
            copy.flush()
            yield Path(copy.name)
    except OSError as error:
        raise Unavailable(f"the KV cannot be kept in {folder}: {error.strerror or error}") from error


async def import_kv(kv: AgentKv, agent: Agent, file: BinaryIO, size: int, folder: Path) -> tuple[ImportedKv, str]:
    """Store the KV in a file for the agent that was just made from it.

    Return what was stored, and why not all of it.
    """
    if not kv.answers(agent):
        return ImportedKv(), "the KV is of a model that is not loaded here"
    entered = kv_file(file, size, folder)
    path = await asyncio.to_thread(entered.__enter__)
    try:
        taken = await kv.import_kv(agent, path)
    finally:
        await asyncio.to_thread(entered.__exit__, None, None, None)
    why = ""
    if taken.ignored:
        why = f"{taken.ignored} chunks were computed with other kernels or settings than this server's"
    elif taken.refused:
        why = f"{taken.refused} chunks are damaged, belong to another context, or have no room"
    elif not taken.chunks:
        why = "the file has no KV, or this server stores none"
    return taken, why


MEDIA_TYPE = "application/vnd.cairn.agent"
MAX_NUMBER = 2**31 - 1
"""Highest number of an imported turn, so that others can follow it."""
READ_TURNS = 64
"""Turns that are read from the log together and held until they are sent."""
MAX_TURNS = 100_000
"""Turns of an imported agent: each is checked by itself."""
MAX_FIGURE = 2.0**53
"""Limit on imported figures: sums must fit 64 bits."""
MAX_ORIGIN = 64
"""Characters of the id of the agent that it was forked from."""
MAX_DIGEST = 64
"""Bytes of a model's identity, and of a digest."""
RECORD_VALUES, MORE_VALUES = 64, 1 << 20
"""Limit on MessagePack values: so many for each record, and so many more for nested messages and tools."""


class Portable(NamedTuple):
    """Checked contents of a file."""

    agent: AgentRecord
    turns: list[tuple[int, TurnRecord, EndRecord | None]]
    """Turns as (key, beginning, end), parents first. The first is the agent's beginning and has no end."""
    savings: SavingsRecord


async def export(agent: Agent, registry: AgentRegistry, archive: Archive, rng: Rng) -> AsyncGenerator[bytes, None]:
    """Yield the file in pieces, as the agent is when the first one is requested.

    A damaged turn on an abandoned branch is left out, with what follows it. Raise Damaged, before the first piece, if
    the path to the head has one. Between two pieces raise NotFound if the agent was deleted, Unavailable if the disk
    refuses to read.
    """
    header = SegmentHeader(0, rng.bits64())
    at, lsn = HEADER_BYTES, 0
    with typed_read_errors(registry, agent):
        async for kind, key, payload in _records(agent, archive):
            if not lsn:
                yield encode_header(header)
            lsn += 1
            data = encode_record(header, at, Record(lsn, kind, key, msgspec.msgpack.encode(payload)))
            at += len(data)
            yield data


async def _whole(agent: Agent, archive: Archive) -> list[Turn]:
    """Return the beginning and the turns that can be read with all their ancestors, parents first."""
    turns, path = [agent.root, *agent.turns()], {turn.key for turn in agent.head.path()}
    whole: dict[int, Turn] = {}
    for start in range(0, len(turns), READ_TURNS):
        some = turns[start : start + READ_TURNS]
        for turn, content in zip(some, await archive.readable(some), strict=True):
            if turn.parent is not None and turn.parent.key not in whole:
                continue
            if content is not None and not content.lost:
                whole[turn.key] = turn
            elif turn.key in path:
                raise Unreadable(turn, content)
    return list(whole.values())


async def _records(agent: Agent, archive: Archive) -> AsyncIterator[tuple[RecordKind, int, msgspec.Struct]]:
    savings = agent.savings
    record = msgspec.structs.replace(agent.record, tenant="", head=agent.head.key, pinned=False)
    turns = await _whole(agent, archive)
    yield RecordKind.AGENT, agent.key, record
    for start in range(0, len(turns), READ_TURNS):
        some = turns[start : start + READ_TURNS]
        for turn, content in zip(some, await archive.contents(some), strict=True):
            began = msgspec.structs.replace(content.began, sampling=None, stop=(), grammar="", reasoning_budget=None)
            yield RecordKind.TURN, turn.key, began
            if turn.number:
                yield RecordKind.END, turn.key, content.ended or _cut(content)
    yield RecordKind.SAVINGS, agent.key, SavingsRecord(savings=savings)


def _cut(content: Content) -> EndRecord:
    ended = content.began.began
    return EndRecord(state="interrupted", ids=pack(content.tokens), message=content.answer, ended=ended)


def read(data: bytes, vocab: int, identity: bytes) -> Portable:
    """Parse and check a file.

    `vocab`, `identity`: of the model here. Token ids of other models are not checked. Raise InvalidRequest for what is
    not an exported agent, is damaged, or is inconsistent.
    """
    header = decode_header(data)
    if header is None or header.number:
        raise _wrong("is not an exported agent")
    if header.version > VERSION:
        raise _wrong(f"was written by a newer Cairn (format {header.version}; this one reads up to {VERSION})")
    if data[:HEADER_BYTES] != encode_header(header):
        raise _wrong("is damaged")
    records, damaged = scan(header, data)
    whole = bool(records) and records[-1].kind == RecordKind.SAVINGS and records[0].kind == RecordKind.AGENT
    if damaged or not whole or [record.lsn for record in records] != list(range(1, len(records) + 1)):
        raise _wrong("is damaged or cut off")
    _count(records)
    agent = decode(records[0].payload, AgentRecord)
    savings = decode(records[-1].payload, SavingsRecord)
    if agent is None or savings is None:
        raise _wrong("is damaged")
    turns: dict[int, tuple[TurnRecord, EndRecord | None]] = {}
    for record in records[1:-1]:
        _take(record, turns)
    figures = (agent.created, agent.used, agent.ttl or 0.0, *msgspec.structs.astuple(savings.savings))
    if not all(abs(figure) < MAX_FIGURE for figure in figures) or len(agent.origin) > MAX_ORIGIN:
        raise _wrong("holds an agent with figures or an origin beyond the limits")
    _check(agent, turns, vocab, identity)
    return Portable(agent, [(key, *one) for key, one in turns.items()], savings)


def _count(records: list[Record]) -> None:
    """Raise InvalidRequest if the file holds too many turns or values. Nothing has been decoded before."""
    turns = sum(record.kind == RecordKind.TURN for record in records) - 1  # without the beginning
    if turns > MAX_TURNS:
        raise InvalidRequest(f"the file holds {turns} turns; the limit is {MAX_TURNS}", field="turns")
    left = most = RECORD_VALUES * len(records) + MORE_VALUES
    for record in records:
        left -= count_values(record.payload, left)
        if left < 0:
            raise InvalidRequest(f"its {len(records)} records hold more than {most} values, the limit", field="values")


def plant(read: Portable, key: Callable[[], int], tenant: str, id: str, now: float) -> Agent:
    """Return an agent made from a file, with keys of this log."""
    own = key()
    keys = {old: key() for old, _, _ in read.turns}
    turns: dict[int, Turn] = {}
    for old, began, end in read.turns:
        parent = turns.get(keys.get(began.parent, 0)) if began.number else None
        above = parent.key if parent is not None else 0
        # Sampling parameters from a file are not checked, so they are dropped, and the turn cannot be resumed.
        moved = msgspec.structs.replace(
            began,
            agent=own if began.number else 0,
            parent=above,
            sampling=None,
            stop=(),
            grammar="",
            reasoning_budget=None,
            output=OutputFormat(),
            engine=b"",
        )
        turn = turns[keys[old]] = Turn(keys[old], moved, parent)
        if end is not None:
            turn.end(end)
    root, head = turns[keys[read.agent.root]], turns[keys[read.agent.head]]
    record = msgspec.structs.replace(
        read.agent,
        id=id,
        tenant=tenant,
        created=now,
        used=now,
        root=root.key,
        base=root.key,
        head=head.key,
        under=head.parent_key,
        pinned=False,
        left={},
        moved=now,
    )
    agent = Agent(own, record, root, root)
    agent.own = [turn for turn in turns.values() if turn.number]
    agent.head, agent.savings = head, read.savings.savings
    return agent


def _take(record: Record, turns: dict[int, tuple[TurnRecord, EndRecord | None]]) -> None:
    if record.kind == RecordKind.TURN and record.key not in turns:
        began = decode(record.payload, TurnRecord)
        if began is not None:
            turns[record.key] = began, None
            return
    elif record.kind == RecordKind.END and record.key in turns:
        end = decode(record.payload, EndRecord)
        if end is not None and turns[record.key][1] is None:
            turns[record.key] = turns[record.key][0], end
            return
    raise _wrong("is damaged")


def _check(
    agent: AgentRecord, turns: dict[int, tuple[TurnRecord, EndRecord | None]], vocab: int, identity: bytes
) -> None:
    """Raise InvalidRequest unless the turns form one tree with matching tokens and valid messages."""
    after: dict[int, _TurnContext] = {}
    for key, (began, end) in turns.items():
        before = after.get(began.parent)
        first = not after
        if first != (began.number == 0) or first != (end is None) or (not first and before is None):
            raise _wrong("holds turns that do not follow each other")
        if first or before is None:
            before = _TurnContext(0, 0, hashlib.sha256())
        elif not before.number < began.number <= MAX_NUMBER:
            raise _wrong("holds turns that do not follow each other")
        _check_turn(began, end)
        try:
            parts = [unpack(part) for part in (began.ids, *((end.ids, end.more) if end is not None else ()))]
        except ValueError:
            raise _wrong("holds ids that are not a whole number of tokens") from None
        follows = before.follow(began, end)
        if follows is None or (began.identity == identity and any(max(ids, default=0) >= vocab for ids in parts)):
            raise _wrong(
                f"holds token ids of turn {began.number} that do not match its digest or this model's vocabulary"
            )
        after[key] = follows
    if agent.ttl is not None and not 0 < agent.ttl < 1e12:
        raise _wrong("holds an invalid time to live")
    if agent.root not in after or after[agent.root].number or agent.head not in after:
        raise _wrong("refers to turns that it does not hold")


class _TurnContext(NamedTuple):
    """The context after a turn, as the next turn must extend it.

    So each turn is hashed once, however long the context before it.
    """

    number: int
    """Number of the turn."""
    size: int
    """Tokens of the context."""
    sum: hashlib._Hash
    """Running digest of its ids; copy it before extending it."""

    def follow(self, began: TurnRecord, end: EndRecord | None) -> _TurnContext | None:
        """Return the context after a following turn, as `Branch` assembles it; None if its digest is wrong.

        A turn that the server writes extends the whole context, or begins anew.
        """
        if began.prefix not in (0, self.size):
            return None
        sum = self.sum.copy() if began.prefix else hashlib.sha256()
        sum.update(began.ids)
        if began.number and sum.digest() != began.digest:
            return None
        size = began.prefix + len(began.ids) // 4
        if end is not None and end.keep >= 0:
            for part in (end.ids[: 4 * end.keep], end.more):
                sum.update(part)
                size += len(part) // 4
        return _TurnContext(began.number, size, sum)


def _check_turn(began: TurnRecord, end: EndRecord | None) -> None:
    """Raise InvalidRequest unless the turn is valid by itself, can be shown as JSON, and fits a chat template."""
    times = (began.began, end.ended if end is not None else 0.0)
    kept = 4 * end.keep <= len(end.ids) if end is not None else True
    adapters = began.adapters or ()
    digests = (began.identity, began.base, began.digest, *(one for one, _ in adapters))
    named = max(map(len, digests)) <= MAX_DIGEST and len(adapters) <= MAX_APPLIED
    if began.prefix < 0 or not all(map(math.isfinite, times)) or not kept or not named:
        raise _wrong(f"holds a turn {began.number} with invalid values")
    answer = end.message if end is not None else None
    if not set(began.strict) <= {_name(tool) for tool in began.tools}:
        raise _wrong("holds strict names that are not among its tools")
    if not _is_json([*began.messages], [*began.tools], answer):
        raise _wrong(f"holds a turn {began.number} with values that JSON cannot hold")
    for index, message in enumerate(began.messages):
        plain_message(message, index, thinks=False)
    if answer is not None and plain_message(answer, 0, thinks=False)["role"] != "assistant":
        raise _wrong(f"holds an answer of turn {began.number} that is not an assistant message")


def _name(tool: dict[str, Any]) -> str:
    function = tool.get("function")
    return str(function.get("name")) if isinstance(function, dict) else ""


def _is_json(*values: Any) -> bool:
    """Return whether JSON can hold these values unchanged: MessagePack also has bytes, times and numeric keys."""
    try:
        return bool(msgspec.json.decode(msgspec.json.encode(values)) == [*values])
    except (TypeError, ValueError, RecursionError):
        return False


def _wrong(what: str) -> InvalidRequest:
    return InvalidRequest(f"the file {what}")


_BEHIND = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_BEHIND |= {0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17, 0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}
"""Bytes that follow a value's first byte: of numbers and small extensions the value, of arrays and maps the length."""
_COUNTED = {0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0), 0xC7: (1, 1), 0xC8: (2, 1), 0xC9: (4, 1)}
_COUNTED |= {0xD9: (1, 0), 0xDA: (2, 0), 0xDB: (4, 0)}
"""First byte of bytes, extensions and strings -> (bytes of the length, further bytes that it does not count)."""


def count_values(data: bytes, most: int) -> int:
    """Count the values in MessagePack `data`, with those inside arrays and maps; stop beyond `most`.

    Nothing is decoded: a value of one byte would take eighty in memory. For data that is not MessagePack the result is
    arbitrary. The format: https://github.com/msgpack/msgpack/blob/master/spec.md
    """
    at = count = 0
    while at < len(data) and count <= most:
        head, count = data[at], count + 1
        at += 1
        if 0xA0 <= head < 0xC0:
            at += head & 31
        elif head in _COUNTED:
            length, more = _COUNTED[head]
            at += length + more + int.from_bytes(data[at : at + length], "big")
        else:
            at += _BEHIND.get(head, 0)
    return count
