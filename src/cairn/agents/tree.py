"""Agents and their turns in memory: a tree of turns a family, and an agent as a place in it.

A turn is never changed once it has ended, so a fork is another agent that points at it: nothing is copied. The tokens
of a context are put together when they are asked for, from what each turn added.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from cairn.agents.info import AgentInfo, Savings, TurnInfo, TurnState
from cairn.agents.records import AgentRecord, EndRecord, TokensRecord, TurnRecord, pack, unpack
from cairn.types import CacheReport

if TYPE_CHECKING:
    from cairn.agents.running import RunningTurn


class Turn:
    """One turn, or with number 0 the beginning of an agent, which is told something and says nothing."""

    __slots__ = ("_growing", "answer", "began", "ended", "key", "parent", "state")

    def __init__(self, key: int, began: TurnRecord, parent: Turn | None) -> None:
        self.key, self.began, self.parent = key, began, parent
        self.state: TurnState = "interrupted" if began.number else "finished"
        self._growing: array[int] | None = array("I")
        """Tokens of an answer without an end, or one that goes on; else its end has them."""
        self.answer: dict[str, Any] | None = None
        self.ended: EndRecord | None = None

    @property
    def number(self) -> int:
        """Counts from 1 along a branch."""
        return self.began.number

    @property
    def before(self) -> int:
        """The number of the turn before it; 0 for none."""
        return self.parent.number if self.parent is not None else 0

    @property
    def last(self) -> float:
        """When it was last used, in seconds since 1970."""
        return self.began.began if self.ended is None else self.ended.ended

    @property
    def tokens(self) -> array[int]:
        """Of the answer; to be read only."""
        if self._growing is not None:
            return self._growing
        return unpack(self.ended.ids) if self.ended is not None else array("I")

    def extend(self, tokens: Iterable[int]) -> None:
        """The answer goes on."""
        if self._growing is None:
            self._growing = self.tokens
        self._growing.extend(tokens)

    def piece(self, record: TokensRecord) -> None:
        """Some tokens of the answer."""
        self.extend(unpack(record.ids))
        said = self.answer or {}
        self.answer = _message(
            (said.get("content") or "") + record.text, (said.get("reasoning_content") or "") + record.reasoning
        )
        self.state, self.ended = "interrupted", None

    def end(self, record: EndRecord) -> None:
        """The answer is whole, or cut. ValueError, and no change, where it has no whole number of tokens."""
        unpack(record.ids)
        self.state, self.answer, self.ended, self._growing = record.state, record.message, record, None
        if record.state == "finished":  # only an interrupted one is begun again
            self.began = msgspec.structs.replace(self.began, sampling=None, stop=())

    def path(self) -> Iterator[Turn]:
        """This turn and all before it, the beginning last."""
        turn: Turn | None = self
        while turn is not None:
            yield turn
            turn = turn.parent

    def prompt(self) -> list[int]:
        """The ids that were answered."""
        chain = []
        for turn in self.path():
            chain.append(turn)
            if not turn.began.prefix:
                break
        ids: list[int] = []
        for turn in reversed(chain):
            ids = ids[: turn.began.prefix] + list(unpack(turn.began.ids))
            if turn is not self:
                ids = turn._after(ids)
        return ids

    def context(self) -> list[int] | None:
        """The ids that the next turn begins with; None where the answer cannot be put behind its prompt exactly."""
        if self.ended is None or self.ended.keep < 0:
            return None
        prompt = self.prompt()
        if digest(prompt) != self.began.digest:
            return None  # damage cost a turn before this one
        return self._after(prompt)

    def _after(self, prompt: list[int]) -> list[int]:
        end = self.ended
        if end is None or end.keep < 0:
            return prompt
        return prompt + list(self.tokens[: end.keep]) + list(unpack(end.more))

    def size(self) -> int:
        """How many tokens the context has after this turn."""
        if not self.number:
            return 0
        end = self.ended
        added = len(self.tokens) if end is None or end.keep < 0 else end.keep + len(end.more) // 4
        return self.began.prefix + len(self.began.ids) // 4 + added

    def info(self, *, current: bool) -> TurnInfo:
        """What callers are told."""
        cache = self.ended.cache if self.ended is not None else CacheReport()
        return TurnInfo(
            number=self.number,
            parent=self.before,
            state=self.state,
            current=current,
            messages=self.began.messages,
            answer=self.answer,
            finish_reason=self.ended.reason if self.ended is not None and self.state == "finished" else "",
            prompt_tokens=self.began.prefix + len(self.began.ids) // 4,
            completion_tokens=len(self.tokens),
            cached_tokens=cache.cached,
            began=self.began.began,
            request=f"{self.began.request:016x}",
        )


class Agent:
    """A named place in a tree of turns."""

    __slots__ = ("base", "head", "key", "own", "record", "root", "running", "salt", "savings", "starting", "used")

    def __init__(self, key: int, record: AgentRecord, root: Turn, base: Turn) -> None:
        self.key, self.record, self.root, self.base = key, record, root, base
        self.head = base
        self.own: list[Turn] = []
        """Turns that this agent made, abandoned branches included, in order."""
        self.used = record.used
        self.savings = Savings()
        self.running: RunningTurn | None = None
        self.starting = False
        """A turn is about to run."""
        self.salt = b""
        """The tenant's, of the last call that named the agent."""

    @property
    def id(self) -> str:
        """As clients know it."""
        return self.record.id

    @property
    def busy(self) -> bool:
        """Whether a turn is about to run, or runs."""
        return self.starting or self.running is not None

    @property
    def tenant(self) -> str:
        """Whose it is."""
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
        """Of the next turn."""
        return 1 + max((turn.number for turn in self.turns()), default=0)

    def history(self) -> list[dict[str, Any]]:
        """The conversation up to the head."""
        messages: list[dict[str, Any]] = []
        for turn in reversed(list(self.head.path())):
            messages += turn.began.messages
            if turn.number:
                messages.append(turn.answer or {"role": "assistant", "content": ""})
        return messages

    def leaves(self) -> list[Turn]:
        """Ends of the branches that this agent made."""
        parents = {turn.parent.key for turn in self.own if turn.parent is not None}
        return [turn for turn in self.own if turn.key not in parents]

    def keeps(self) -> set[int]:
        """Keys of the turns that it needs."""
        ends = (self.base, self.head, *self.own)
        return {turn.key for end in ends for turn in end.path()}

    def info(self) -> AgentInfo:
        """What callers are told."""
        record = self.record
        return AgentInfo(
            id=record.id,
            created=record.created,
            last_used=self.used,
            head=self.head.number,
            turns=sum(1 for turn in self.head.path() if turn.number),
            tokens=self.head.size(),
            state="running" if self.busy else "interrupted" if self.head.state == "interrupted" else "idle",
            pinned=record.pinned,
            ttl=record.ttl,
            origin=record.origin,
            origin_turn=self.base.number if record.origin else 0,
            metadata=record.metadata,
            savings=self.savings,
        )


def digest(ids: Sequence[int]) -> bytes:
    """SHA-256 of token ids."""
    return hashlib.sha256(pack(ids)).digest()


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading ids two contexts have in common."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _message(content: str, reasoning: str) -> dict[str, Any] | None:
    if not (content or reasoning):
        return None
    return {"role": "assistant", "content": content} | ({"reasoning_content": reasoning} if reasoning else {})
