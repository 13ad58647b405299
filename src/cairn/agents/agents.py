"""Agents: named contexts with history, on one `Service` and one token log."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from cairn.agents.info import AgentInfo, AgentPage, Savings, TurnInfo
from cairn.config import Config
from cairn.seams import Clock, FileSystem, Rng
from cairn.service.requests import SamplingOptions
from cairn.service.service import Service
from cairn.types import Done, Event

ID = r"[A-Za-z0-9._-]{1,64}"


class Turn(Protocol):
    """A turn that runs: an async iterator of `Delta`s and a last `Done`, which comes once the turn is on disk.

    It runs on when nobody reads; `close` ends it as interrupted. Errors of the generation are raised by the iterator.
    """

    agent: str
    """The agent it belongs to: another than was asked for where the turn was forked off."""
    number: int
    request: int
    """Id of the request."""

    def __aiter__(self) -> AsyncIterator[Event]: ...

    async def close(self) -> None:
        """Cancel what still runs; the turn is then interrupted and can be resumed."""
        ...


class Agents(Protocol):
    """All agents of one server. Every method runs on the event loop of its service.

    Where an agent is named, NotFound for one that is not there or is another tenant's. What the disk refuses is
    Unavailable, and nothing has changed then.
    """

    @classmethod
    async def open(
        cls, service: Service, files: FileSystem, folder: Path, clock: Clock, rng: Rng, config: Config
    ) -> Agents:
        """Lock the folder, read the log, and fill the table of exact replay from it. ConfigError names the folder."""
        ...

    async def close(self) -> None:
        """Interrupt running turns, sync, and let go of the folder."""
        ...

    async def create(
        self,
        tenant: str,
        *,
        id: str | None = None,
        messages: Sequence[Mapping[str, Any]] = (),
        tools: Sequence[Mapping[str, Any]] | None = None,
        metadata: Mapping[str, str] | None = None,
        ttl: float | None = None,
        pinned: bool = False,
    ) -> AgentInfo:
        """A new agent whose context begins with `messages` (system prompt first). Conflict if the id is taken."""
        ...

    def get(self, tenant: str, id: str) -> AgentInfo:
        """One agent."""
        ...

    def list(self, tenant: str, *, limit: int = 20, after: str = "") -> AgentPage:
        """A tenant's agents."""
        ...

    def turns(self, tenant: str, id: str) -> tuple[TurnInfo, ...]:
        """Every turn, abandoned branches included, in the order in which they began."""
        ...

    async def delete(self, tenant: str, id: str) -> None:
        """Interrupt what runs and erase every byte of it that no fork shares; returns when it is gone from disk."""
        ...

    async def turn(
        self,
        tenant: str,
        id: str,
        messages: Sequence[Mapping[str, Any]],
        options: SamplingOptions = ...,
        *,
        salt: bytes = b"",
        request: int | None = None,
        timeout: float | None = None,
        fork_on_conflict: bool = False,
        template_args: Mapping[str, Any] | None = None,
    ) -> Turn:
        """Begin a turn with new messages only. Conflict while another runs, ContextTooLong with the figures."""
        ...

    async def resume(self, tenant: str, id: str, *, salt: bytes = b"", request: int | None = None) -> Turn:
        """Go on with the interrupted turn at the head. Conflict if there is none."""
        ...

    async def fork(self, tenant: str, id: str, *, turn: int | None = None, new_id: str | None = None) -> AgentInfo:
        """A new agent that shares this one's history up to a turn (default: the head)."""
        ...

    async def rollback(self, tenant: str, id: str, *, turn: int) -> AgentInfo:
        """Make an earlier turn the head; 0 is the beginning. What followed stays listed until it is collected."""
        ...

    def export(self, tenant: str, id: str) -> AsyncIterator[bytes]:
        """One portable file."""
        ...

    async def import_(
        self, tenant: str, data: AsyncIterator[bytes], *, id: str | None = None, limit: int = ...
    ) -> AgentInfo:
        """Make an agent of an exported file: InvalidRequest if it is damaged, TooLarge beyond `limit` bytes."""
        ...

    def account(self, tenant: str, id: str, done: Done) -> None:
        """Count a stateless request that named an agent (or a cache key) in its savings."""
        ...

    def savings(self, tenant: str | None = None) -> Savings:
        """The sum over everything, or over one tenant."""
        ...

    @property
    def trouble(self) -> str:
        """Why the log does not work now, as a sentence; empty when it does."""
        ...
