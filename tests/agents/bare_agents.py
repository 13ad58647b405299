"""An agent service with its log on a simulated disk, and no model behind it."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

from cairn.agents.agent_registry import AgentRegistry
from cairn.agents.agent_service import AgentService, create_agent
from cairn.agents.archive import Archive
from cairn.agents.kv import AgentKv
from cairn.agents.log.index import RecordKind
from cairn.agents.log.records import EndRecord, TurnRecord
from cairn.agents.log.token_log import TokenLog
from cairn.agents.log.writer_thread import Writer
from cairn.agents.maintenance import Maintenance
from cairn.agents.pending_writes import PendingWrites
from cairn.agents.replay_records import ReplayRecords
from cairn.agents.running_turn import RunningTurn
from cairn.agents.turn_tree import Agent, Turn
from cairn.agents.turns import Turns
from cairn.text.chat.prompt import Sampled
from cairn.text.chat.replay import AnswerIdentity
from cairn.types.request import Request, SamplingParams
from tests.files import CrashFiles, SeededRng

FOLDER = Path("/agents")


class Time:
    """A clock that moves only by `passed` seconds; `step` sets the wall clock alone."""

    def __init__(self) -> None:
        self.passed = 0.0
        self.step = 0.0

    def now(self) -> float:
        return 5000.0 + self.passed

    def time_ns(self) -> int:
        return int(self.wall * 1e9)

    @property
    def wall(self) -> float:
        return 1.7e9 + self.passed + self.step


class NoKv:
    """The KV of agents that store none."""

    def pin_later(self, agent: Agent) -> None: ...

    def moved(self, agent: Agent, before: Turn) -> None: ...

    def branch_resumed(self, agent: Agent) -> None: ...

    async def drop(self, agent: Agent) -> bool:
        return True

    async def collect(self, agent: Agent, turns: list[Turn]) -> None: ...


class BareAgents:
    """Agents without a model; `again` reopens their log after a clean shutdown or a power cut."""

    def __init__(self) -> None:
        self.clock, self.files = Time(), CrashFiles()
        self.open()

    def open(self) -> None:
        log = TokenLog.open(self.files, FOLDER, SeededRng())
        assert log is not None
        registry, self.replays, kv = AgentRegistry(), ReplayRecords(), cast("AgentKv", NoKv())
        orphans = registry.load(log.recovered)
        self.replays.load(log.recovered)
        self.writer = Writer(log)
        self.book = AgentService(
            registry,
            self.writer,
            PendingWrites(registry, self.writer, self.clock, self.replays),
            kv,
            SeededRng(),
            self.replays,
        )
        self.turns = Turns(cast("Any", None), self.book, Archive(log), self.clock)
        self.upkeep = Maintenance(self.book, self.replays, orphans)

    async def close(self) -> None:
        await self.upkeep.close()
        await self.writer.close()

    async def again(self, *, clean: bool = False) -> None:
        if clean:
            await self.book.pending.settle()
        after = self.files if clean else self.files.crash(random.Random(1))
        await self.close()
        self.files = after
        self.open()

    def agent(self, id: str) -> Agent:
        return self.book.find("me", id)

    @property
    def ids(self) -> list[str]:
        return sorted(agent.id for agent in self.book.registry)

    def numbers(self, id: str) -> list[int]:
        return [turn.number for turn in self.agent(id).turns()]

    def on_disk(self, text: bytes) -> bool:
        return any(text in data for data in self.files.files().values())

    async def make(self, id: str, ttl: float | None = None) -> Agent:
        return await create_agent(self.book, "me", id, (), (), (), {}, ttl, False)

    async def begin(self, id: str) -> RunningTurn:
        agent = self.agent(id)
        number, began = agent.next_number(), self.book.pending.now()
        record = TurnRecord(agent=agent.key, number=number, parent=agent.head.key, began=began)
        turn = await self.book.begin(agent, record)
        request = Request(id=number, prompt=(1, 2, 3), sampling=SamplingParams(max_tokens=9))
        return self.turns._run(cast("Any", None), agent, turn, request, None, ())

    async def say(self, id: str) -> None:
        """Run a turn from beginning to end."""
        running = await self.begin(id)
        end = EndRecord(state="finished", ids=b"", ended=self.book.pending.now())
        running.turn.end(end)
        running.agent.running = None
        await self.book.pending.sync(self.writer.record(RecordKind.END, end, running.turn.key))
        running.turn.release()

    async def keep(self) -> None:
        """Record an answer for exact replay."""
        sampled, now = Sampled(b"b" * 32, AnswerIdentity(b"v" * 32, "because"), [1, 2, 3], 1), self.book.pending.now()
        record = self.writer.record(RecordKind.REPLAY, self.replays.payload("me", sampled, b"model", now))
        self.replays.add(record, now)
        await self.writer.sync(record)


@contextlib.asynccontextmanager
async def bare_agents() -> AsyncIterator[BareAgents]:
    made = BareAgents()
    try:
        yield made
    finally:
        await made.close()
