"""Agents and their turns in memory: a tree of turns a family, and an agent as a place in it.

A turn is never changed once it has ended, so a fork is another agent that points at it: nothing is copied. What it
holds is in the log then, and here only its place in the tree.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import Protocol

from cairn.agents.content import Content
from cairn.agents.log.records import AgentRecord, EndRecord, Savings, TokensRecord, TurnRecord
from cairn.agents.types import AgentInfo, TurnInfo, TurnState
from cairn.types.block_size import CHUNK_TOKENS
from cairn.types.request import Request
from cairn.types.stats import CacheReport

NOBODY = b"\0"
"""Salt of agents whose tenant is not configured any more: no tenant's, so no KV is stored under it."""


class Turn:
    """One turn, or with number 0 the beginning of an agent, which is told something and says nothing."""

    __slots__ = ("_size", "at", "content", "depth", "first", "identity", "key", "number", "parent", "state")

    def __init__(self, key: int, began: TurnRecord, parent: Turn | None) -> None:
        self.key, self.parent = key, parent
        self.number = began.number
        """Counts from 1 along a branch."""
        self.depth: int = (parent.depth if parent is not None else 0) + bool(began.number)
        """How many turns the branch has up to this one."""
        self.at = began.began
        """When it began, in seconds since 1970."""
        self.identity = began.identity
        """The identity of the model whose tokens it has."""
        self.state: TurnState = "interrupted" if began.number else "finished"
        self.content: Content | None = Content(began)
        """None once the log has it: ask the archive."""
        self.first = _first(began, parent)
        """Hash of the first chunk of the prompt; 0 where it is not known."""
        self._size = 0

    @property
    def before(self) -> int:
        """The number of the turn before it; 0 for none."""
        return self.parent.number if self.parent is not None else 0

    @property
    def under(self) -> int:
        """The key of the turn before it; 0 for none."""
        return self.parent.key if self.parent is not None else 0

    @property
    def held(self) -> Content:
        """The content of a turn that is not released."""
        assert self.content is not None
        return self.content

    @property
    def size(self) -> int:
        """How many tokens the context has after this turn."""
        return self._size if self.content is None else self.content.size

    def release(self) -> None:
        """What it holds is durable in the log. That of a turn that is not finished stays: it may go on."""
        if self.content is not None and self.state == "finished":
            self._size, self.content = self.content.size, None

    def piece(self, record: TokensRecord) -> None:
        """Some tokens of the answer. ValueError, and no change, where they do not follow those that are here."""
        self.held.piece(record)
        self.state = "interrupted"

    def end(self, record: EndRecord) -> None:
        """The answer is whole, or cut. ValueError, and no change, where it has no whole number of tokens."""
        self.held.end(record)
        self.state = record.state

    def path(self) -> Iterator[Turn]:
        """This turn and all before it, the beginning last."""
        turn: Turn | None = self
        while turn is not None:
            yield turn
            turn = turn.parent

    def info(self, content: Content | None, *, current: bool) -> TurnInfo:
        """What callers are told. `content`: as far as it can be read."""
        damaged = content is None or content.lost
        if content is None:
            content = Content(TurnRecord(agent=0, number=self.number, began=self.at))
        began, ended = content.began, content.ended
        cache = ended.cache if ended is not None else CacheReport()
        return TurnInfo(
            number=self.number,
            parent=self.before,
            state="damaged" if damaged else self.state,
            current=current,
            messages=began.messages,
            answer=content.answer,
            finish_reason=ended.reason if ended is not None and self.state == "finished" else "",
            prompt_tokens=began.prefix + len(began.ids) // 4,
            completion_tokens=len(content.tokens),
            cached_tokens=cache.cached,
            cache=cache,
            began=began.began,
            request=f"{began.request:016x}",
        )


def reach(ends: Iterable[Turn], seen: set[int]) -> set[int]:
    """Keys of these turns and of all before them, without those `seen`, which has them after that.

    A walk ends at the first turn that was seen, for all before it were too: each turn is looked at once, whatever the
    number of ends.
    """
    found: set[int] = set()
    for end in ends:
        for turn in end.path():
            if turn.key in seen:
                break
            seen.add(turn.key)
            found.add(turn.key)
    return found


def _first(began: TurnRecord, parent: Turn | None) -> int:
    if began.prefix >= CHUNK_TOKENS and parent is not None:
        return parent.first
    known = not began.prefix and len(began.ids) >= 4 * CHUNK_TOKENS
    return hash(began.ids[: 4 * CHUNK_TOKENS]) if known else 0


class TurnInProgress(Protocol):
    """The running turn of an agent, for those who end it or name its request."""

    agent: Agent
    request: Request
    over: asyncio.Event
    """Set once the turn has ended."""
    discarded: bool
    """Whether the agent is being deleted, so that nothing more is written."""

    async def stop(self) -> None:
        """Cancel the turn and wait until it has ended, or for some seconds."""
        ...

    async def close(self) -> None:
        """End the turn without a reader."""
        ...


class Agent:
    """A named place in a tree of turns."""

    __slots__ = (
        "base",
        "head",
        "key",
        "new",
        "open_requests",
        "own",
        "record",
        "root",
        "running",
        "salt",
        "savings",
        "starting",
        "straight",
        "used",
    )

    def __init__(self, key: int, record: AgentRecord, root: Turn, base: Turn) -> None:
        self.key, self.record, self.root, self.base = key, record, root, base
        self.head = base
        self.own: list[Turn] = []
        """Turns that this agent made, abandoned branches included, in order."""
        self.used = record.used
        self.savings = Savings()
        self.running: TurnInProgress | None = None
        self.starting = False
        """A turn is about to run."""
        self.open_requests = 0
        """Ordinary requests in its name that are computed now."""
        self.straight = False
        """Every turn of its own is known to lie on the path to its head, so none is abandoned."""
        self.new = False
        """It is not durable yet, so nothing may share what it holds."""
        self.salt = b""
        """The tenant's or `NOBODY`, once the registry has the agent."""

    @property
    def id(self) -> str:
        """The name by which clients know the agent."""
        return self.record.id

    @property
    def busy(self) -> bool:
        """Whether a turn is about to run, or runs."""
        return self.starting or self.running is not None

    def over(self, now: float) -> bool:
        """Whether it was not used for longer than it is to be kept; it is in use while a turn of it or a request in its
        name runs."""
        idle = not self.open_requests and not self.busy
        return idle and self.record.ttl is not None and now - self.used > self.record.ttl

    @property
    def tenant(self) -> str:
        """The tenant that the agent belongs to."""
        return self.record.tenant

    def turns(self) -> list[Turn]:
        """Every turn that the agent has or shares, by number, without the beginning."""
        found = {turn.key: turn for turn in self.base.path()}
        found |= {turn.key: turn for turn in self.own}
        return sorted((turn for turn in found.values() if turn.number), key=lambda turn: turn.number)

    def turn(self, number: int) -> Turn | None:
        """The turn of that number; 0 is the beginning."""
        if number == 0:
            return self.root
        return next((turn for turn in self.turns() if turn.number == number), None)

    def next_number(self) -> int:
        """The number that the next turn gets."""
        return 1 + max((turn.number for turn in self.turns()), default=0)

    def leaves(self) -> list[Turn]:
        """Ends of the branches that this agent made."""
        parents = {turn.parent.key for turn in self.own if turn.parent is not None}
        return [turn for turn in self.own if turn.key not in parents]

    def keeps(self, seen: set[int] | None = None) -> set[int]:
        """Keys of the turns that it needs; without those `seen`, as `reach` says."""
        return reach((self.base, self.head, *self.own), set() if seen is None else seen)

    def info(self) -> AgentInfo:
        """What callers are told."""
        record = self.record
        return AgentInfo(
            id=record.id,
            created=record.created,
            last_used=self.used,
            head=self.head.number,
            turns=self.head.depth,
            tokens=self.head.size,
            state="running" if self.busy else "interrupted" if self.head.state == "interrupted" else "idle",
            pinned=record.pinned,
            ttl=record.ttl,
            origin=record.origin,
            origin_turn=self.base.number if record.origin else 0,
            metadata=record.metadata,
            savings=self.savings,
            model=record.model,
        )
