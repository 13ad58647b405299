"""Agents and turns in memory: a tree of turns for each family, and an agent as a position in it.

An ended turn never changes, so a fork is another agent that points at it, and nothing is copied. The content of an
ended turn is in the log, and only its position in the tree is here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import Protocol

from cairn.agents.content import Content
from cairn.agents.log.records import AgentRecord, EndRecord, Savings, TokensRecord, TurnRecord
from cairn.agents.types import AgentInfo, TurnInfo, TurnState
from cairn.types.model_spec import CHUNK_TOKENS
from cairn.types.model_variant import recorded_variant
from cairn.types.outputs import Timing
from cairn.types.request import Request
from cairn.types.stats import CacheReport

NOBODY = b"\0"
"""Salt of agents whose tenant is not configured any more. It is no tenant's, so no KV is stored under it."""


class Turn:
    """A turn, or with number 0 the beginning of an agent, which has messages and no answer."""

    __slots__ = (
        "_size",
        "at",
        "began",
        "content",
        "depth",
        "first",
        "identity",
        "key",
        "number",
        "once",
        "parent",
        "state",
        "variant",
    )

    def __init__(self, key: int, began: TurnRecord, parent: Turn | None) -> None:
        self.key, self.parent = key, parent
        self.number = began.number
        """Position on its branch, from 1."""
        self.depth: int = (parent.depth if parent is not None else 0) + bool(began.number)
        """Number of turns on the branch up to this one."""
        self.began = began.began
        """When it began, in seconds since 1970, as its record says on every server."""
        self.at = began.began
        """The same, moved along whenever this server's clock is set; ages are computed from it."""
        self.variant = recorded_variant(began.identity, began.base, began.adapters)
        """The model and its adapters; None if an old record does not say. Held so that `known_variant` finds it."""
        self.identity = began.identity if self.variant is None else self.variant.identity
        """Identity of the model whose tokens it has, adapters included."""
        self.state: TurnState = "interrupted" if began.number else "finished"
        self.content: Content | None = Content(began)
        """Its content; None once it is only in the log (see `Archive`)."""
        self.first = _first(began, parent)
        """Hash of the first chunk of the prompt; 0 if unknown."""
        self.once = hash(began.once)
        """Hash of the client's Idempotency-Key; 0 for none."""
        self._size = 0

    @property
    def parent_number(self) -> int:
        """Number of the turn before it; 0 for none."""
        return self.parent.number if self.parent is not None else 0

    @property
    def parent_key(self) -> int:
        """Key of the turn before it; 0 for none."""
        return self.parent.key if self.parent is not None else 0

    @property
    def held(self) -> Content:
        """Content of a turn that is not released."""
        assert self.content is not None
        return self.content

    @property
    def size(self) -> int:
        """Tokens of the context after this turn."""
        return self._size if self.content is None else self.content.size

    def release(self) -> None:
        """Drop the content, which is durable in the log. An unfinished turn keeps it: it may be continued."""
        if self.content is not None and self.state == "finished":
            self._size, self.content = self.content.size, None

    def piece(self, record: TokensRecord) -> None:
        """Append a recorded piece of the answer.

        Raise ValueError, and change nothing, if it does not follow the tokens that are here.
        """
        self.held.piece(record)
        self.state = "interrupted"

    def end(self, record: EndRecord) -> None:
        """Set the end of the answer, complete or not.

        Raise ValueError, and change nothing, if its ids are not a whole number of tokens.
        """
        self.held.end(record)
        self.state = record.state

    def path(self) -> Iterator[Turn]:
        """Yield this turn and all turns before it, the beginning last."""
        turn: Turn | None = self
        while turn is not None:
            yield turn
            turn = turn.parent

    def info(self, content: Content | None, *, current: bool) -> TurnInfo:
        """Return the public description of the turn. `content`: as far as it can be read."""
        damaged = content is None or content.lost
        if content is None:
            content = Content(TurnRecord(agent=0, number=self.number, began=self.at))
        began, ended = content.began, content.ended
        cache = ended.cache if ended is not None else CacheReport()
        return TurnInfo(
            number=self.number,
            parent=self.parent_number,
            state="damaged" if damaged else self.state,
            current=current,
            messages=began.messages,
            answer=content.answer,
            finish_reason=ended.reason if ended is not None and self.state == "finished" else "",
            finish_detail=ended.detail if ended is not None and self.state == "finished" else "",
            timing=ended.timing if ended is not None else Timing(),
            prompt_tokens=began.prefix + len(began.ids) // 4,
            completion_tokens=len(content.tokens),
            cached_tokens=cache.cached,
            cache=cache,
            began=began.began,
            request=f"{began.request:016x}",
        )


def reach(ends: Iterable[Turn], seen: set[int]) -> set[int]:
    """Return the keys of these turns and all before them that are not in `seen`, and add them to `seen`.

    A walk stops at the first turn that was seen, because all before it were too. So each turn is visited once, however
    many ends there are.
    """
    reached: set[int] = set()
    for end in ends:
        for turn in end.path():
            if turn.key in seen:
                break
            seen.add(turn.key)
            reached.add(turn.key)
    return reached


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
    """A named position in a tree of turns."""

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
        """Turns that this agent made, in order, abandoned branches included."""
        self.used = record.used
        self.savings = Savings()
        self.running: TurnInProgress | None = None
        self.starting = False
        """Whether a turn is about to run."""
        self.open_requests = 0
        """Ordinary requests in its name that are being computed."""
        self.straight = False
        """Whether all its own turns are known to lie on the path to its head, so that none is abandoned."""
        self.new = False
        """Whether it is not durable yet, so that nothing may share its turns."""
        self.salt = b""
        """Salt of its tenant, or `NOBODY`, once it is in the registry."""

    @property
    def id(self) -> str:
        """Name by which clients know the agent."""
        return self.record.id

    @property
    def busy(self) -> bool:
        """Whether a turn runs or is about to run."""
        return self.starting or self.running is not None

    def expired(self, now: float) -> bool:
        """Return whether it has outlived its time to live. It is in use while a turn or a request in its name runs."""
        idle = not self.open_requests and not self.busy
        return idle and self.record.ttl is not None and now - self.used > self.record.ttl

    @property
    def tenant(self) -> str:
        """Tenant that the agent belongs to."""
        return self.record.tenant

    def turns(self) -> list[Turn]:
        """Return every turn that the agent has or shares, by number, without the beginning."""
        turns = {turn.key: turn for turn in self.base.path()}
        turns |= {turn.key: turn for turn in self.own}
        return sorted((turn for turn in turns.values() if turn.number), key=lambda turn: turn.number)

    def turn(self, number: int) -> Turn | None:
        """Return the turn of that number, or None; 0 is the beginning."""
        if number == 0:
            return self.root
        return next((turn for turn in self.turns() if turn.number == number), None)

    def next_number(self) -> int:
        """Return the number of the next turn."""
        return 1 + max((turn.number for turn in self.turns()), default=0)

    def leaves(self) -> list[Turn]:
        """Return the ends of the branches that this agent made."""
        parents = {turn.parent.key for turn in self.own if turn.parent is not None}
        return [turn for turn in self.own if turn.key not in parents]

    def keeps(self, seen: set[int] | None = None) -> set[int]:
        """Return the keys of the turns that it needs and that are not in `seen`, as `reach` does."""
        return reach((self.base, self.head, *self.own), set() if seen is None else seen)

    def info(self) -> AgentInfo:
        """Return the public description of the agent."""
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
