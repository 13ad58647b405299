"""Bodies of the records in an agent's chain. They name turns by number, since keys belong to one server's log."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from cairn.agents.content import Content
from cairn.agents.log.index import RecordKind
from cairn.agents.log.records import AgentRecord, EndRecord, TurnRecord
from cairn.agents.log.segment import Record
from cairn.agents.turn_tree import Agent, Turn
from cairn.types.errors import Damaged


class SharedTurn(msgspec.Struct, frozen=True):
    """A turn. `began.parent` is the parent's number, `began.agent` 0."""

    began: TurnRecord
    ended: EndRecord | None = None
    own: bool = True
    """Whether the agent itself made it, not an agent that it was forked from."""


class SharedAgent(msgspec.Struct, frozen=True):
    """The body of `made` and `changed`: the agent's record with numbers of turns, and in `made` all its turns."""

    record: AgentRecord
    turns: tuple[SharedTurn, ...] = ()
    pruned: tuple[int, ...] = ()
    """In `changed`: numbers of turns of abandoned branches that are removed."""


class SharedEnd(msgspec.Struct, frozen=True):
    """The body of `ended`."""

    number: int
    ended: EndRecord


def numbered(agent: Agent) -> AgentRecord:
    """Return the agent's current record with turns' numbers in place of their keys."""
    numbers = {turn.key: turn.number for turn in agent.turns()}
    left = {numbers[key]: when for key, when in agent.record.left.items() if key in numbers}
    return msgspec.structs.replace(
        agent.record,
        used=agent.used,
        root=0,
        base=agent.base.number,
        head=agent.head.number,
        under=agent.head.parent_number,
        left=left,
    )


def shared_turn(turn: Turn, began: TurnRecord, ended: EndRecord | None, *, own: bool) -> SharedTurn:
    """Return a turn in the form that is shared."""
    return SharedTurn(msgspec.structs.replace(began, agent=0, parent=turn.parent_number), ended, own)


def shared_agent(agent: Agent, turns: Sequence[Turn], contents: Sequence[Content]) -> SharedAgent:
    """Return an agent with `turns`, the beginning first, in the form that is shared."""
    own = {turn.key for turn in agent.own}
    found = tuple(
        shared_turn(turn, content.began, content.ended, own=turn.key in own)
        for turn, content in zip(turns, contents, strict=True)
    )
    return SharedAgent(numbered(agent), found)


class Replayed:
    """The agent that the records of a chain describe, applied one after another."""

    def __init__(self) -> None:
        self.record: AgentRecord | None = None
        """The agent's record; None before `made` and after `gone`."""
        self.turns: dict[int, SharedTurn] = {}
        self._pruned: dict[int, SharedTurn] = {}
        """Removed turns of abandoned branches: a server of an older version may go on with one."""
        self._erased: set[tuple[int, float]] = set()
        """Numbers and beginnings of all turns that were removed."""
        self.used = 0.0
        """When it was last used, by the clocks of those who used it."""

    def made(self, body: SharedAgent) -> None:
        """Start over with a new agent. Raise Damaged if it lacks a turn."""
        self.record, self._pruned, self._erased = body.record, {}, set()
        self.used = body.record.used
        self.turns = {one.began.number: one for one in body.turns}
        for number in (0, body.record.base, body.record.head, *(one.began.parent for one in body.turns)):
            self._need(number)

    def gone(self) -> None:
        """Remove the agent: it was deleted."""
        self.record, self.turns = None, {}

    def changed(self, body: SharedAgent) -> None:
        """Replace the agent's record, and remove turns. Raise Damaged if there is no turn at its head."""
        self.record, self.used = body.record, max(self.used, body.record.used)
        for number in body.pruned:
            if (turn := self.turns.pop(number, None)) is not None:
                self._pruned[number] = turn
                self._erased.add((number, turn.began.began))
        self._need(body.record.head)

    def _need(self, number: int) -> None:
        """Bring a turn back that was removed, with those before it. Raise Damaged if there never was one."""
        while number not in self.turns:
            if (turn := self._pruned.pop(number, None)) is None:
                raise Damaged(f"an agent in the shared store goes on at turn {number}, which it does not have")
            self.turns[number] = turn
            number = turn.began.parent

    def began(self, turn: SharedTurn) -> None:
        """Add a turn and make it the head. Raise Damaged if there is none before it."""
        self._need(turn.began.parent)
        self._pruned.pop(turn.began.number, None)
        self.turns[turn.began.number] = turn
        self.used = max(self.used, turn.began.began)
        if self.record is not None:
            self.record = msgspec.structs.replace(self.record, head=turn.began.number, under=turn.began.parent)

    def ended(self, body: SharedEnd) -> None:
        """End a turn."""
        self.used = max(self.used, body.ended.ended)
        if (turn := self.turns.get(body.number)) is not None:
            self.turns[body.number] = msgspec.structs.replace(turn, ended=body.ended)

    def same(self, agent: Agent) -> bool:
        """Return whether a server's own copy has the same turns, head and settings."""
        record = self.record
        if record is None or record.created != agent.record.created or record.head != agent.head.number:
            return False
        here = {turn.number: (turn.parent_number, turn.state == "finished", turn.began) for turn in agent.turns()}
        there = {
            number: (turn.began.parent, turn.ended is not None and turn.ended.state == "finished", turn.began.began)
            for number, turn in self.turns.items()
            if number
        }
        settings = (record.pinned, record.ttl, record.metadata)
        return here == there and settings == (agent.record.pinned, agent.record.ttl, agent.record.metadata)

    def lost(self, agent: Agent) -> int:
        """Return the number of a finished turn of the server's own copy that the chain lacks; 0 if there is none.

        Such a turn was acknowledged to a client, so the store has lost it.
        """
        if self.record is None or self.record.created != agent.record.created:
            return 0
        known = self._erased | {(number, turn.began.began) for number, turn in self.turns.items()}
        missing = (
            turn.number for turn in agent.own if turn.state == "finished" and (turn.number, turn.began) not in known
        )
        return next(missing, 0)


Recorder = Callable[[RecordKind, msgspec.Struct, int], Record]
"""Makes a record of the server's log from a kind, a value and a key."""


def plant(
    replayed: Replayed, key: Callable[[], int], record_of: Recorder, tenant: str, id: str
) -> tuple[Agent, list[Record]]:
    """Return a chain's agent with new keys of this server's log, and the records to write there."""
    shared = replayed.record
    assert shared is not None
    own, other = key(), key()
    turns: dict[int, Turn] = {}
    records = []
    for number in sorted(replayed.turns):
        one = replayed.turns[number]
        parent = turns[one.began.parent] if number else None
        turn, more = plant_turn(one, key(), own if one.own else other, parent, record_of)
        turns[number] = turn
        records += more
    keys = {number: turn.key for number, turn in turns.items()}
    root, head = turns[0], turns[shared.head]
    record = msgspec.structs.replace(
        shared,
        id=id,
        tenant=tenant,
        root=root.key,
        base=turns[shared.base].key,
        head=head.key,
        under=head.parent_key,
        left=_keyed(shared.left, keys),
    )
    agent = Agent(own, record, root, turns[shared.base])
    agent.own = [turn for number, turn in turns.items() if number and replayed.turns[number].own]
    agent.head = head
    return agent, records


def plant_turn(
    shared: SharedTurn, key: int, agent: int, parent: Turn | None, record_of: Recorder
) -> tuple[Turn, list[Record]]:
    """Return a shared turn with the key `key` of this server's log, and the records to write there."""
    above = parent.key if parent is not None else 0
    began = msgspec.structs.replace(shared.began, agent=agent if shared.began.number else 0, parent=above)
    turn = Turn(key, began, parent)
    records = [record_of(RecordKind.TURN, began, key)]
    if shared.ended is not None:
        turn.end(shared.ended)
        records.append(record_of(RecordKind.END, shared.ended, key))
    return turn, records


def keyed(shared: AgentRecord, agent: Agent) -> AgentRecord:
    """Return a shared record with the keys of this server's log. The head stays as it is in `agent`."""
    keys = {turn.number: turn.key for turn in agent.turns()}
    old = agent.record
    return msgspec.structs.replace(
        shared,
        id=old.id,
        tenant=old.tenant,
        root=old.root,
        base=old.base,
        head=old.head,
        under=old.under,
        left=_keyed(shared.left, keys),
    )


def _keyed(left: Mapping[int, float], keys: Mapping[int, int]) -> dict[int, float]:
    return {keys[number]: when for number, when in left.items() if number in keys}
