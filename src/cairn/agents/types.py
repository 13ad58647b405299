"""Immutable descriptions of agents and turns, returned by the public API."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from cairn.agents.log.records import Savings
from cairn.types.outputs import Timing
from cairn.types.stats import CacheReport

TurnState = Literal["running", "finished", "interrupted"]
"""State of a turn. `interrupted`: the answer failed, or was cut by a crash, a shutdown or a cancel."""


class TurnInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A turn of an agent: its messages and its answer."""

    number: int
    """Position on its branch, from 1; a fork keeps the numbers of shared turns."""
    parent: int
    """Number of the turn before it; 0 for the agent's beginning."""
    state: TurnState | Literal["damaged"]
    """`damaged`: the log lost the answer, or the whole turn."""
    current: bool
    """Whether it lies on the path to the agent's head; other turns are on abandoned branches."""
    messages: tuple[dict[str, Any], ...]
    """Messages that came in."""
    answer: dict[str, Any] | None
    """The assistant's message, incomplete for an interrupted turn; None if there is none."""
    finish_reason: str
    """Why a finished turn ended."""
    finish_detail: str
    """More on that; "repetition" where the answer only repeated itself."""
    timing: Timing
    """Seconds in each phase; all zero for a turn that did not end well, and in old records."""
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cache: CacheReport
    """Source of the prompt's KV; all zero for a turn that did not end well."""
    began: float
    """Seconds since 1970."""
    request: str
    """Id of its request."""


class AgentInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Public description of an agent."""

    id: str
    created: float
    """Seconds since 1970."""
    last_used: float
    head: int
    """Number of the turn that the next one follows; 0 at the beginning."""
    turns: int
    """Number of turns on the path to the head."""
    tokens: int
    """Tokens of the context that the next turn extends; 0 before the first turn."""
    state: Literal["idle", "running", "interrupted"]
    pinned: bool
    ttl: float | None
    """Seconds without use after which it is deleted."""
    origin: str
    """Id of the agent that it was forked from; empty for none."""
    origin_turn: int
    metadata: dict[str, str]
    savings: Savings
    model: str = ""
    """Name of its model, on a server with several."""


class AgentPage(msgspec.Struct, frozen=True, kw_only=True):
    """A page of a list of agents, most recently created first."""

    agents: tuple[AgentInfo, ...]
    more: bool
    """Whether more agents follow."""
    next: str | None = None
    """Position of the next page; valid even if the last agent of this one is deleted."""
