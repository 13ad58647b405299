"""An agent as one file: what the log holds of it, in the bytes of a log's segment.

    header       as of a segment with number 0
    1            AGENT
    2 ...        TURN of the beginning, then TURN and END of every turn, abandoned branches included
    last         SAVINGS

`lsn` counts the records from 1, so a file that lost its end, or anything else, is seen as such. Sampling parameters
are not part of it: a turn that was interrupted stays so, and cannot be resumed elsewhere. KV is not part of it either;
it is computed again from the tokens, or under another model from the text.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import NamedTuple

import msgspec

from cairn.agents.archive import Archive
from cairn.agents.content import Content, digest
from cairn.agents.damage import Unreadable, told
from cairn.agents.index import Kind
from cairn.agents.records import AgentRecord, EndRecord, SavingsRecord, TurnRecord, decode, pack, unpack
from cairn.agents.roster import Roster
from cairn.agents.segment import (
    HEADER_BYTES,
    VERSION,
    Header,
    Record,
    decode_header,
    encode_header,
    encode_record,
    scan,
)
from cairn.agents.tree import Agent, Turn
from cairn.errors import InvalidRequest
from cairn.seams import Rng
from cairn.text.messages import plain_message

MEDIA_TYPE = "application/vnd.cairn.agent"
MAX_NUMBER = 2**31 - 1
"""Of a turn that is taken in: others are to follow it."""
READ_TURNS = 64
"""Turns that are read from the log together, and held until they are sent."""
MAX_ORIGIN = 64
"""Characters of the id that the agent was forked off."""


class Portable(NamedTuple):
    """What a file holds, checked."""

    agent: AgentRecord
    turns: list[tuple[int, TurnRecord, EndRecord | None]]
    """By key, parents first; the first is the beginning and has no end."""
    savings: SavingsRecord


async def export(agent: Agent, roster: Roster, archive: Archive, rng: Rng) -> AsyncGenerator[bytes, None]:
    """The pieces of the file, as the agent is when the first is asked for.

    A turn on an abandoned branch that is damaged is left out, with what follows it. Damaged, before the first piece,
    where the path to the head has one. Also between two: NotFound where the agent is deleted meanwhile, Unavailable
    where the disk gives out nothing.
    """
    header = Header(0, rng.bits64())
    at, lsn = HEADER_BYTES, 0
    with told(roster, agent):
        async for kind, key, payload in _records(agent, archive):
            if not lsn:
                yield encode_header(header)
            lsn += 1
            data = encode_record(header, at, Record(lsn, kind, key, msgspec.msgpack.encode(payload)))
            at += len(data)
            yield data


async def _whole(agent: Agent, archive: Archive) -> list[Turn]:
    """The beginning and the turns that can be read with all before them, parents first."""
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


async def _records(agent: Agent, archive: Archive) -> AsyncIterator[tuple[Kind, int, msgspec.Struct]]:
    savings = agent.savings
    record = msgspec.structs.replace(agent.record, tenant="", head=agent.head.key, pinned=False)
    turns = await _whole(agent, archive)
    yield Kind.AGENT, agent.key, record
    for start in range(0, len(turns), READ_TURNS):
        some = turns[start : start + READ_TURNS]
        for turn, content in zip(some, await archive.contents(some), strict=True):
            yield Kind.TURN, turn.key, msgspec.structs.replace(content.began, sampling=None, stop=())
            if turn.number:
                yield Kind.END, turn.key, content.ended or _cut(content)
    yield Kind.SAVINGS, agent.key, SavingsRecord(savings=savings)


def _cut(content: Content) -> EndRecord:
    ended = content.began.began
    return EndRecord(state="interrupted", ids=pack(content.tokens), message=content.answer, ended=ended)


def read(data: bytes, vocab: int, identity: bytes) -> Portable:
    """What a file holds. `vocab`, `identity`: of the model here; tokens of another are not looked at.

    Raises InvalidRequest for what is no such file, is damaged, or does not fit together.
    """
    header = decode_header(data)
    if header is None or header.number:
        raise _wrong("is no exported agent")
    if header.version > VERSION:
        raise _wrong(f"was written by a newer Cairn (format {header.version}; this one reads up to {VERSION})")
    if data[:HEADER_BYTES] != encode_header(header):
        raise _wrong("is damaged")
    records, damaged = scan(header, data)
    whole = bool(records) and records[-1].kind == Kind.SAVINGS and records[0].kind == Kind.AGENT
    if damaged or not whole or [record.lsn for record in records] != list(range(1, len(records) + 1)):
        raise _wrong("is damaged or cut off")
    agent = decode(records[0].payload, AgentRecord)
    savings = decode(records[-1].payload, SavingsRecord)
    if agent is None or savings is None:
        raise _wrong("is damaged")
    turns: dict[int, tuple[TurnRecord, EndRecord | None]] = {}
    for record in records[1:-1]:
        _take(record, turns)
    figures = (agent.created, agent.used, agent.ttl or 0.0, *msgspec.structs.astuple(savings.savings))
    if not all(map(math.isfinite, figures)) or len(agent.origin) > MAX_ORIGIN:
        raise _wrong("holds an agent that cannot be")
    _check(agent, turns, vocab, identity)
    return Portable(agent, [(key, *one) for key, one in turns.items()], savings)


def plant(read: Portable, key: Callable[[], int], tenant: str, id: str, now: float) -> Agent:
    """An agent of what a file holds, with keys of this log."""
    own = key()
    keys = {old: key() for old, _, _ in read.turns}
    turns: dict[int, Turn] = {}
    for old, began, end in read.turns:
        parent = turns.get(keys.get(began.parent, 0)) if began.number else None
        above = parent.key if parent is not None else 0
        moved = msgspec.structs.replace(began, agent=own if began.number else 0, parent=above)
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
        left={},
        moved=now,
    )
    agent = Agent(own, record, root, root)
    agent.own = [turn for turn in turns.values() if turn.number]
    agent.head, agent.savings = head, read.savings.savings
    return agent


def _take(record: Record, turns: dict[int, tuple[TurnRecord, EndRecord | None]]) -> None:
    if record.kind == Kind.TURN and record.key not in turns:
        began = decode(record.payload, TurnRecord)
        if began is not None:
            turns[record.key] = began, None
            return
    elif record.kind == Kind.END and record.key in turns:
        end = decode(record.payload, EndRecord)
        if end is not None and turns[record.key][1] is None:
            turns[record.key] = turns[record.key][0], end
            return
    raise _wrong("is damaged")


def _check(
    agent: AgentRecord, turns: dict[int, tuple[TurnRecord, EndRecord | None]], vocab: int, identity: bytes
) -> None:
    """Whether it is one tree, whose tokens are what they say and whose messages a template can have."""
    made: dict[int, Turn] = {}
    for key, (began, end) in turns.items():
        parent = made.get(began.parent)
        first = not made
        if first != (began.number == 0) or (not first and (parent is None or end is None)):
            raise _wrong("holds turns that do not follow each other")
        if parent is not None and not parent.number < began.number <= MAX_NUMBER:
            raise _wrong("holds turns that do not follow each other")
        if began.prefix < 0 or not math.isfinite(began.began) or (end is not None and not math.isfinite(end.ended)):
            raise _wrong(f"holds a turn {began.number} that cannot be")
        turn = made[key] = Turn(key, began, parent)
        try:
            if end is not None:
                turn.end(end)
            ids = [*unpack(began.ids), *turn.held.tokens, *unpack(end.more if end is not None else b"")]
            sound = not turn.number or digest(turn.branch().prompt()) == began.digest
        except ValueError:
            raise _wrong("holds half a token") from None
        if not sound or (began.identity == identity and ids and max(ids) >= vocab):
            raise _wrong(f"holds tokens of turn {turn.number} that are not those of its prompt")
        for index, message in enumerate(began.messages):
            plain_message(message, index, thinks=False)
        answer = turn.held.answer
        if answer is not None and plain_message(answer, 0, thinks=False)["role"] != "assistant":
            raise _wrong(f"holds an answer of turn {turn.number} that is none")
    if agent.ttl is not None and not 0 < agent.ttl < 1e12:
        raise _wrong("holds a time to live that is none")
    if agent.root not in made or made[agent.root].number or agent.head not in made:
        raise _wrong("names turns that it does not hold")


def _wrong(what: str) -> InvalidRequest:
    return InvalidRequest(f"the file {what}")
