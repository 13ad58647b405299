"""The work of upkeep with many agents, counted rather than timed."""

from __future__ import annotations

import asyncio
import errno
from collections import Counter
from collections.abc import Iterator

import pytest

from cairn.agents.agent_registry import AgentRegistry
from cairn.agents.log.segment import Record
from cairn.agents.pending_writes import PendingWrites
from cairn.agents.turn_tree import Agent
from cairn.types.errors import Unavailable
from cairn.types.outputs import Done, FinishReason, Usage
from cairn.types.stats import CacheReport
from tests.agents.bare_agents import BareAgents, bare_agents
from tests.files import CrashFile, Fault

MANY = 150
DONE = Done(reason=FinishReason.STOP, usage=Usage(prompt_tokens=3, completion_tokens=1), cache=CacheReport())


class Work:
    """Counts of the records written in each turn of the event loop, and of the agents looked at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.turn = self.looked = 0
        self.noted: Counter[int] = Counter()
        self.pruned: Counter[int] = Counter()
        note, every, prune = PendingWrites.note, AgentRegistry.__iter__, AgentRegistry.prune

        def noted(pending: PendingWrites, agent: Agent) -> Record:
            self.noted[self.turn] += 1
            return note(pending, agent)

        def looked(registry: AgentRegistry) -> Iterator[Agent]:
            for agent in every(registry):
                self.looked += 1
                yield agent

        def pruned(registry: AgentRegistry, agent: Agent, before: float) -> list[int]:
            self.pruned[self.turn] += 1
            return prune(registry, agent, before)

        monkeypatch.setattr(PendingWrites, "note", noted)
        monkeypatch.setattr(AgentRegistry, "__iter__", looked)
        monkeypatch.setattr(AgentRegistry, "prune", pruned)

    async def tick(self) -> None:
        while True:
            self.turn += 1
            await asyncio.sleep(0)


async def many(at: BareAgents) -> None:
    for n in range(MANY):
        await at.make(f"a{n}")


async def refuse(at: BareAgents, agents: list[Agent]) -> None:
    """Let the disk refuse everything, including the savings of ordinary requests in these agents' names."""
    at.files.fail(Fault(at.files.calls, errno.EIO, sticky=True))
    for agent in agents:
        at.writer.append(*at.book.pending.count(agent, DONE), at.book.pending.note(agent))
    with pytest.raises(Unavailable):
        await at.writer.sync(*at.book.pending.count(agents[0], DONE))


async def test_one_refused_record_is_no_work_for_every_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the disk refuses: only the lost records are retried, and a failed retry adds none."""
    async with bare_agents() as at:
        await many(at)
        await refuse(at, [at.agent("a7")])
        work = Work(monkeypatch)
        for _ in range(3):
            with pytest.raises(Unavailable):
                await at.upkeep.tend()
        assert work.noted.total() <= 1 and work.looked == 0
        at.files.heal()
        await at.upkeep.tend()
        await at.again()
        assert at.agent("a7").savings.requests == at.book.registry.savings.totals["me"].requests == 2


async def test_upkeep_of_many_agents_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """It lets other tasks of the event loop run in between."""
    async with bare_agents() as at:
        await many(at)
        await refuse(at, list(at.book.registry))
        at.files.heal()
        work = Work(monkeypatch)
        ticking = asyncio.create_task(work.tick())
        await at.upkeep.tend()
        ticking.cancel()
        assert work.noted.total() == work.pruned.total() == MANY
        assert max(work.noted.values()) <= MANY / 2 and max(work.pruned.values()) <= MANY / 2


async def test_expired_agents_are_erased_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are, the log is compacted once for all of them."""
    written: list[int] = []
    synced: list[int] = []
    append, sync = CrashFile.append, CrashFile.sync

    def appended(file: CrashFile, data: bytes | bytearray) -> None:
        written[-1] += len(data)
        append(file, data)

    def counted(file: CrashFile) -> None:
        synced[-1] += 1
        sync(file)

    for count in (20, 80):
        async with bare_agents() as at:
            for n in range(count):
                await at.make(f"a{n}", ttl=10.0)
            await at.make("stays")
            at.clock.passed = 20.0
            with monkeypatch.context() as patch:
                patch.setattr(CrashFile, "append", appended)
                patch.setattr(CrashFile, "sync", counted)
                written.append(0)
                synced.append(0)
                before = at.writer.bytes
                await at.upkeep.tend()
                assert written[-1] <= 4 * before
            assert at.ids == ["stays"] and not at.on_disk(b"a7")
    assert max(synced) < 12, "a few, of which some are of a compaction beside it"


async def test_expired_agents_are_erased_later_if_the_disk_refuses() -> None:
    async with bare_agents() as at:
        for n in range(3):
            await at.make(f"a{n}", ttl=10.0)
        at.clock.passed = 20.0
        at.files.fail(Fault(at.files.calls, errno.EIO, sticky=True))
        with pytest.raises(Unavailable):
            await at.upkeep.tend()
        assert at.ids == []
        at.files.heal()
        await at.upkeep.tend()
        assert not any(at.on_disk(b"a%d" % n) for n in range(3))
        await at.again()
        assert at.ids == []


async def test_a_change_by_a_cancelled_caller_is_logged_as_applied() -> None:
    """The disk refused it at first, but nobody was left to hear that."""
    async with bare_agents() as at:
        await at.make("ada")
        at.files.fail(Fault(at.files.calls, errno.EIO, sticky=True))
        pinning = asyncio.create_task(at.book.set_pinned(at.agent("ada"), True))
        await asyncio.sleep(0)
        pinning.cancel()
        await asyncio.gather(pinning, return_exceptions=True)
        with pytest.raises(Unavailable):
            await at.upkeep.tend()
        at.files.heal()
        await at.upkeep.tend()
        await at.again()
        assert at.agent("ada").record.pinned


async def test_the_stores_get_a_change_by_a_cancelled_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the stores would keep pins that no agent has."""
    async with bare_agents() as at:
        await at.make("ada")
        stored_pins: list[bool] = []
        monkeypatch.setattr(at.book.kv, "pin_later", lambda agent: stored_pins.append(agent.record.pinned))
        for pinned in (True, False):
            changing = asyncio.create_task(at.book.set_pinned(at.agent("ada"), pinned))
            await asyncio.sleep(0)
            changing.cancel()
            await asyncio.gather(changing, return_exceptions=True)
        assert stored_pins == [True, False]


@pytest.mark.parametrize("pinned", [True, False])
async def test_two_changes_that_the_disk_refuses_together_change_nothing(pinned: bool) -> None:
    async with bare_agents() as at:
        ada = await at.make("ada")
        await at.book.set_pinned(ada, pinned)
        at.files.fail(Fault(at.files.calls, errno.EIO, sticky=True))
        changes = [at.book.set_pinned(ada, value) for value in (not pinned, pinned)]
        refused = await asyncio.gather(*changes, return_exceptions=True)
        assert [type(error) for error in refused] == [Unavailable, Unavailable]
        assert ada.record.pinned is pinned
        at.files.heal()
        await at.upkeep.tend()
        await at.again()
        assert at.agent("ada").record.pinned is pinned


async def test_a_change_that_waits_for_another_writes_nothing_of_an_agent_deleted_meanwhile() -> None:
    async with bare_agents() as at:
        ada = await at.make("ada")
        changes = [asyncio.create_task(at.book.set_pinned(ada, value)) for value in (True, False)]
        await asyncio.sleep(0)
        await at.book.remove(ada)
        await asyncio.gather(*changes)
        await at.again(clean=True)
        assert at.ids == [] and not at.on_disk(b"ada")
