"""Pending writes and erasures of agents' records, and the clock that dates them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

import msgspec

from cairn.agents.agent_registry import AgentRegistry
from cairn.agents.kv import BATCH
from cairn.agents.log.index import RecordKind
from cairn.agents.log.records import Savings, SavingsRecord
from cairn.agents.log.segment import Record
from cairn.agents.log.writer_thread import Writer
from cairn.agents.replay_records import ReplayRecords
from cairn.agents.savings import BYTES_KEY, LINES, counted, day_key, total_key
from cairn.agents.turn_tree import Agent
from cairn.system.interfaces import Clock
from cairn.types.outputs import Done

STEP_SECONDS = 10.0
"""Largest drift of the wall clock from the monotonic one. Beyond it, the clock was set or the machine slept."""


class PendingWrites:
    """Records that the log still has to take, and the clock that dates them."""

    def __init__(self, registry: AgentRegistry, writer: Writer, clock: Clock, replays: ReplayRecords) -> None:
        self._registry, self._writer, self._clock, self._replays = registry, writer, clock, replays
        self._owed: dict[tuple[int, int], Record] = {}
        """Pending records by kind and key: only the newest of each counts."""
        self._to_erase: list[int] = []
        self._bytes = registry.savings.bytes
        self._lost: set[int] = set()
        """Keys whose records must be written again."""
        # A record from a time when the wall clock was ahead must not count as younger than now.
        self._epoch = clock.time_ns() / 1e9 - clock.now()
        now = self.now()
        replays.retime(lambda at: min(at, now))
        for agent in registry:
            _retime(agent, lambda at: min(at, now))

    def now(self) -> float:
        """Return the seconds since 1970, by a clock that never jumps: nothing grows old when the wall clock is set.

        Only `settle` follows the wall clock, together with all times from which ages are computed.
        """
        return self._epoch + self._clock.now()

    def _set_clock(self) -> None:
        """Follow a wall clock that was set, with all recorded times: ages stay the same, also after a restart."""
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
        """Return the record of the agent as it is now."""
        head = agent.head
        agent.record = msgspec.structs.replace(agent.record, used=agent.used, head=head.key, under=head.parent_key)
        return self._writer.record(RecordKind.AGENT, agent.record, agent.key)

    def count(self, agent: Agent, done: Done) -> Sequence[Record]:
        """Add an answer to the savings of the agent and its tenant; return the records of them."""
        speed = self._registry.savings.count(agent.tenant, done, self.now())
        agent.savings = counted(agent.savings, done, speed)
        return [self._line(agent), *self._totals()]

    def _line(self, agent: Agent) -> Record:
        return self._writer.record(RecordKind.SAVINGS, SavingsRecord(savings=agent.savings), agent.key)

    def _totals(self) -> list[Record]:
        """Return the records of changed totals and days of tenants, and of the bytes."""
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
        """Write this record as soon as the disk takes it, even if its agent is deleted."""
        self._owed[record.kind, record.key] = record

    def write_later(self, *records: Record) -> None:
        """Write these records as soon as the disk takes them, unless their agent or turn is being erased."""
        for record in records:
            if record.key >= LINES or self._registry.needs(record.key):
                self.keep(record)

    async def sync(self, *records: Record) -> None:
        """Write all pending records and then these; return when they are durable.

        Raise Unavailable if the disk refuses; what was pending stays so.
        """
        owed = dict(self._owed)
        await self._writer.sync(*owed.values(), *records)
        for name, record in owed.items():
            if self._owed.get(name) is record:
                del self._owed[name]
                if record.kind == RecordKind.END:
                    self._registry.release(record.key)

    async def settle(self) -> None:
        """Write pending records, and those that the disk refused while nobody waited for them.

        Raise Unavailable if the disk refuses, and once the log is closed.
        """
        self._set_clock()
        self._lost |= self._writer.lost()
        looked = 0
        while self._lost:
            key = self._lost.pop()
            agent = self._registry.by_key(key)
            if key >= LINES:
                self._registry.savings.mark_dirty()
            elif agent is not None and not agent.new:
                self.write_later(self.note(agent), self._line(agent))
            looked += 1
            if looked % BATCH == 0:
                await asyncio.sleep(0)
        self.erase_later(self._registry.savings.forget_days(self.now()))
        self.write_later(*self._totals())
        # Also without pending records: nothing else may write for hours, and `trouble` must clear once it is over.
        if self._owed or self._writer.trouble:
            await self.sync()

    def erase_later(self, keys: Iterable[int]) -> None:
        """Erase these keys with the next erasure. Nobody can reach their records any more."""
        self._to_erase += keys

    def erase_replays(self, agent: int) -> None:
        """Erase what ordinary requests in the name of a deleted agent sampled. `agent`: its key."""
        self.erase_later(self._replays.take(agent))

    def to_erase(self) -> list[int]:
        """Return the keys that wait for erasure, and clear the list."""
        keys, self._to_erase = self._to_erase, []
        return keys

    async def erase(self, keys: Sequence[int]) -> None:
        """Erase the records with these keys. If the disk refuses, they are in `to_erase` again."""
        gone = set(keys)
        self._owed = {name: record for name, record in self._owed.items() if record.key not in gone}
        # Once an agent is erased, nothing else names the owners of its pins, so their records are written first.
        pins = [record for record in self._owed.values() if record.kind == RecordKind.UNPIN]
        try:
            await self._writer.erase(keys, *pins)
        except BaseException:
            self._to_erase += keys
            raise
        for record in pins:
            self._owed.pop((record.kind, record.key), None)


def _retime(agent: Agent, change: Callable[[float], float]) -> None:
    """Change the times from which an agent's ages are computed. The time of its creation stays."""
    agent.used = change(agent.used)
    for turn in agent.own:
        turn.at = change(turn.at)
    record = agent.record
    left, moved = {key: change(at) for key, at in record.left.items()}, record.moved and change(record.moved)
    agent.record = msgspec.structs.replace(record, left=left, moved=moved)
