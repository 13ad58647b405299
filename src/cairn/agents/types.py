"""What the room of agents tells its callers: frozen values, no behaviour."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from cairn.agents.log.records import Savings
from cairn.types.stats import CacheReport

TurnState = Literal["running", "finished", "interrupted"]
"""`interrupted`: a crash, a shutdown or a cancel cut the answer, or it failed."""


class TurnInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of an agent: what it was told and what was answered."""

    number: int
    """Counts from 1 along a branch; a fork keeps the numbers of what it shares."""
    parent: int
    """The turn before it; 0 for the agent's beginning."""
    state: TurnState | Literal["damaged"]
    """`damaged`: the log lost the answer, or all that the turn held."""
    current: bool
    """Whether it lies on the path to the agent's head; others are abandoned branches."""
    messages: tuple[dict[str, Any], ...]
    """The messages that came in."""
    answer: dict[str, Any] | None
    """The assistant's message, of an interrupted turn as far as it is known; None where nothing was said."""
    finish_reason: str
    """Why a finished turn ended."""
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cache: CacheReport
    """Where the KV of the prompt came from; nothing of a turn that did not end well."""
    began: float
    """Seconds since 1970."""
    request: str
    """Id of the request that runs or ran for it."""


class AgentInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What callers are told of one agent."""

    id: str
    created: float
    """Seconds since 1970."""
    last_used: float
    head: int
    """Number of the turn that the next one follows; 0 at the beginning."""
    turns: int
    """How many turns lie on the path to the head."""
    tokens: int
    """How long the context is that the next turn extends, as the last turn left it; 0 before the first."""
    state: Literal["idle", "running", "interrupted"]
    pinned: bool
    ttl: float | None
    """Seconds without use after which it is deleted."""
    origin: str
    """The agent that it was forked from, or empty."""
    origin_turn: int
    metadata: dict[str, str]
    savings: Savings
    model: str = ""
    """The name of the model that answers it, on a server with several."""


class AgentPage(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a list, most recently created first."""

    agents: tuple[AgentInfo, ...]
    more: bool
    """Whether others follow the last of these."""
    next: str | None = None
    """Where they begin, also when the last of these is deleted meanwhile."""
