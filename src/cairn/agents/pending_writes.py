"""What is to be written of agents: at once, or as soon as the disk takes it; and what is to be erased."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

import msgspec

from cairn.agents.agent_registry import AgentRegistry
from cairn.agents.kv import BATCH
from cairn.agents.log.index import RecordKind
from cairn.agents.log.records import Savings, SavingsRecord
from cairn.agents.log.segment import Record
from cairn.agents.log.writer import Writer
from cairn.agents.replay_records import ReplayRecords
from cairn.agents.savings import BYTES_KEY, LINES, counted, day_key, total_key
from cairn.agents.turn_tree import Agent
from cairn.system.interfaces import Clock
from cairn.types.outputs import Done

STEP_SECONDS = 10.0
"""How far the wall clock may run away from the other one by itself: it was set, or the machine slept."""


class PendingWrites:
    """What a server's log is still to be told, and the clock that its records are dated by."""

    def __init__(self, registry: AgentRegistry, writer: Writer, clock: Clock, replays: ReplayRecords) -> None:
        self._registry, self._writer, self._clock, self._replays = registry, writer, clock, replays
        self._owed: dict[tuple[int, int], Record] = {}
        """Records by kind and key: of these kinds only the newest counts."""
        self._to_erase: list[int] = []
        self._bytes = registry.savings.bytes
        self._lost: set[int] = set()
        """Keys of what is to be written again."""
        # What was written while the wall clock was ahead is no younger than what is written now.
        self._epoch = clock.time_ns() / 1e9 - clock.now()
        now = self.now()
        replays.retime(lambda at: min(at, now))
        for agent in registry:
            _retime(agent, lambda at: min(at, now))

    def now(self) -> float:
        """Seconds since 1970. Goes on evenly: where the wall clock is set, nothing may grow old at once.

        Only `settle` follows that clock, with all times that ages are told by.
        """
        return self._epoch + self._clock.now()

    def _set_clock(self) -> None:
        """If the wall clock was set, follow it with all times: agents' ages stay, also at the next start."""
        step = self._clock.time_ns() / 1e9 - self.now()
        if abs(step) < STEP_SECONDS:
            return
        self._epoch += step
        self._replays.retime(lambda at: at + step)
        for agent in self._registry:
            _retime(agent, lambda at: at + step)
            if agent.record.ttl is not None or agent.record.left or agent.record.moved:
                self._lost.add(agent.key)

    def note(self, agent: Agent) -> Record:
        """The agent as it is now, to be written."""
        head = agent.head
        agent.record = msgspec.structs.replace(agent.record, used=agent.used, head=head.key, under=head.under)
        return self._writer.record(RecordKind.AGENT, agent.record, agent.key)

    def count(self, agent: Agent, done: Done) -> Sequence[Record]:
        """Add an answer to the agent's line and its tenant's; what is to be written of it."""
        speed = self._registry.savings.count(agent.tenant, done, self.now())
        agent.savings = counted(agent.savings, done, speed)
        return [self._line(agent), *self._totals()]

    def _line(self, agent: Agent) -> Record:
        return self._writer.record(RecordKind.SAVINGS, SavingsRecord(savings=agent.savings), agent.key)

    def _totals(self) -> list[Record]:
        """The tenants' totals and days that are not written yet, and the bytes."""
        savings = self._registry.savings
        lines = [(name, SavingsRecord(savings=savings.totals[name], tenant=name)) for name in sorted(savings.dirty)]
        savings.dirty.clear()
        records = [self._writer.record(RecordKind.SAVINGS, line, total_key(name)) for name, line in lines]
        for name, day in sorted(savings.dirty_days):
            of_day = SavingsRecord(savings=savings.days[name][day], day_of=name, day=day)
            records.append(self._writer.record(RecordKind.SAVINGS, of_day, day_key(name, day)))
        savings.dirty_days.clear()
        if savings.bytes != self._bytes:
            self._bytes = read, written = savings.bytes
            line = SavingsRecord(savings=Savings(), read=read, written=written)
            records.append(self._writer.record(RecordKind.SAVINGS, line, BYTES_KEY))
        return records

    def keep(self, record: Record) -> None:
        """Write this as soon as the disk takes it, whatever becomes of its agent."""
        self._owed[record.kind, record.key] = record

    def write_later(self, *records: Record) -> None:
        """Write these as soon as the disk takes them, unless they are about what is being erased."""
        for record in records:
            if record.key >= LINES or self._registry.needs(record.key):
                self.keep(record)

    async def sync(self, *records: Record) -> None:
        """Return when these are durable, and before them all that is owed: they may follow from it.

        Unavailable where the disk refuses it; what is owed stays so.
        """
        owed = dict(self._owed)
        await self._writer.sync(*owed.values(), *records)
        for name, record in owed.items():
            if self._owed.get(name) is record:
                del self._owed[name]
                if record.kind == RecordKind.END:
                    self._registry.release(record.key)

    async def settle(self) -> None:
        """Write what is owed, and what the disk refused although nobody waited for it.

        Unavailable where the disk refuses it, and once the log is closed.
        """
        self._set_clock()
        self._lost |= self._writer.lost()
        looked = 0
        while self._lost:
            key = self._lost.pop()
            agent = self._registry.keyed(key)
            if key >= LINES:
                self._registry.savings.mark_dirty()
            elif agent is not None and not agent.new:
                self.write_later(self.note(agent), self._line(agent))
            looked += 1
            if looked % BATCH == 0:
                await asyncio.sleep(0)
        self.erase_later(self._registry.savings.forget_days(self.now()))
        self.write_later(*self._totals())
        if self._owed or self._writer.trouble:  # nobody may write for hours, and trouble that is over is to be known
            await self.sync()

    def erase_later(self, keys: Iterable[int]) -> None:
        """Nobody finds what has these keys any more: erase it with the next that is erased."""
        self._to_erase += keys

    def to_erase(self) -> list[int]:
        """Keys of records that are on the disk, or may be, and must not be; once."""
        keys, self._to_erase = self._to_erase, []
        return keys

    async def erase(self, keys: Sequence[int]) -> None:
        """Erase the records with these keys. What the disk refuses now is in `to_erase` after that."""
        gone = set(keys)
        self._owed = {name: record for name, record in self._owed.items() if record.key not in gone}
        # Once an agent is erased nobody can name its pins, so those that are left are written down before.
        pins = [record for record in self._owed.values() if record.kind == RecordKind.UNPIN]
        try:
            await self._writer.erase(keys, *pins)
        except BaseException:
            self._to_erase += keys
            raise
        for record in pins:
            self._owed.pop((record.kind, record.key), None)


def _retime(agent: Agent, change: Callable[[float], float]) -> None:
    """Change the times that ages are told by; when it was made stays."""
    agent.used = change(agent.used)
    for turn in agent.own:
        turn.at = change(turn.at)
    record = agent.record
    left, moved = {key: change(at) for key, at in record.left.items()}, record.moved and change(record.moved)
    agent.record = msgspec.structs.replace(record, left=left, moved=moved)
