"""A turn in memory takes its place in the tree and in the log's index, and none of its text."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from cairn.agents.agent_registry import AgentRegistry
from cairn.agents.archive import Archive
from cairn.agents.content import Content, Descent
from cairn.agents.log.index import RecordKind
from cairn.agents.log.records import AgentRecord, EndRecord, TurnRecord, pack
from cairn.agents.log.segment import Record
from cairn.agents.log.token_log import TokenLog
from cairn.agents.turn_tree import Agent, Turn
from cairn.system.posix import SystemFiles, SystemRng
from cairn.types.errors import Damaged, Unavailable
from cairn.types.request import SamplingParams
from tests.agents.house import hear, house
from tests.files import CrashFiles

MOST = 600
"""Bytes that a turn may take."""
IDENTITY = b"model" * 4


def begin(log: TokenLog, agent: int, number: int, parent: int) -> tuple[Record, TurnRecord]:
    lsn = log.next_lsn()
    began = TurnRecord(
        agent=agent,
        number=number,
        parent=parent,
        messages=({"role": "user", "content": f"And what of day {number}? " * 40},),
        prefix=1000 + 30 * number if number > 1 else 0,
        ids=pack(range(500)),
        digest=bytes(32),
        identity=IDENTITY,
        sampling=SamplingParams(max_tokens=400),
        began=1e9 + number,
        request=lsn,
    )
    return Record(lsn, RecordKind.TURN, lsn, msgspec.msgpack.encode(began)), began


def finish(log: TokenLog, key: int, number: int) -> tuple[Record, EndRecord]:
    message = {"role": "assistant", "content": f"Nothing of day {number}. " * 40}
    end = EndRecord(state="finished", ids=pack(range(400)), message=message, keep=400, ended=1e9 + number)
    return Record(log.next_lsn(), RecordKind.END, key, msgspec.msgpack.encode(end)), end


def grow(log: TokenLog, registry: AgentRegistry, agent: Agent, turns: int) -> None:
    """Add turns of 4 KB of text and 900 tokens each."""
    for _ in range(turns):
        number = agent.head.number + 1
        record, began = begin(log, agent.key, number, agent.head.key)
        turn = Turn(record.key, began, agent.head)
        registry.add_turn(agent, turn)
        log.write([record], sync=False)
        record, end = finish(log, turn.key, number)
        turn.end(end)
        log.write([record], sync=number % 50 == 0)
        turn.release()


def planted(log: TokenLog, registry: AgentRegistry, key: int) -> Agent:
    record = AgentRecord(id=f"agent-{key}", tenant="default", created=1.0, used=1.0, root=key, base=key, head=key)
    began = TurnRecord(agent=0, number=0, messages=({"role": "system", "content": "The house book."},))
    root = Turn(key, began, None)
    agent = Agent(log.next_lsn(), record, root, root)
    log.write([Record(log.next_lsn(), RecordKind.TURN, key, msgspec.msgpack.encode(began))], sync=False)
    log.write([Record(log.next_lsn(), RecordKind.AGENT, agent.key, msgspec.msgpack.encode(record))], sync=True)
    registry.add(agent)
    root.release()
    return agent


def opened(path: Path) -> TokenLog:
    log = TokenLog.open(SystemFiles(), path, SystemRng())
    assert log is not None
    return log


async def test_a_turn_costs_little_memory_whatever_it_says(tmp_path: Path, figure: Callable[[str, str], None]) -> None:
    """Both while turns are added and after a restart; every text is read back from the log."""
    tracemalloc.start()
    try:
        log, registry = opened(tmp_path / "log"), AgentRegistry()
        agents = [planted(log, registry, log.next_lsn()) for _ in range(10)]
        for agent in agents:
            grow(log, registry, agent, 100)
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        for agent in agents:
            grow(log, registry, agent, 100)
        gc.collect()
        said = (tracemalloc.get_traced_memory()[0] - before) / 1000
        log.close()
        key = agents[3].key
        del log, registry, agents, agent
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        log, registry = opened(tmp_path / "log"), AgentRegistry()
        registry.load(log.recovered)
        log.recovered = []
        gc.collect()
        loaded = (tracemalloc.get_traced_memory()[0] - before) / 2000
    finally:
        tracemalloc.stop()
    figure("agents: memory of a turn, said and after a restart", f"{said:.0f} and {loaded:.0f} bytes")
    assert said < MOST and loaded < MOST
    (agent,) = [one for one in registry if one.key == key]
    branch = await Archive(log).branch(agent.head)
    assert [one.began.number for one in branch.contents] == list(range(201)) and agent.head.size == branch.last.size
    messages = branch.messages()
    assert len(messages) == 401 and messages[-1]["content"].startswith("Nothing of day 200. ")
    assert list(branch.last.tokens) == list(range(400))
    log.close()


def test_contexts_set_aside_by_a_walk_are_packed() -> None:
    """Turns of thinking models: each holds the ids of its whole prompt and does not extend the one before."""
    turns, size = 60, 500
    contents = [Content(TurnRecord(agent=0, number=0))]
    for number in range(1, turns + 1):
        contents.append(Content(TurnRecord(agent=1, number=number, ids=pack(range(1000, 1000 + size)))))
        contents[-1].end(EndRecord(state="finished", ids=pack([1])))
    gc.collect()
    tracemalloc.start()
    try:
        descent = Descent(1 << 20)
        for content in contents:
            descent.down(content)
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held < 8 * turns * size


async def test_a_finished_turn_is_only_in_the_log(folder: Path) -> None:
    async with house(folder) as at:
        await at.agents.create("default", id="ada", messages=[{"role": "system", "content": "Be brief."}])
        for text in ("one", "two"):
            await at.say("ada", text)
        agent = at.agents._find("default", "ada")
        assert [turn.content for turn in agent.head.path()] == [None] * 3
        said = [turn.messages[0]["content"] for turn in await at.agents.turns("default", "ada")]
        assert said == ["one", "two"] and agent.head.size == len(await at.agents.context("default", "ada"))
        heard = await at.say("ada", "three")
        assert heard.done is not None and heard.done.usage.prompt_tokens > agent.head.parent.size  # type: ignore[union-attr]


async def test_a_pending_end_leaves_memory_when_it_is_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with house(folder) as at:
        await at.agents.create("default", id="ada")
        turn, agent = await at.begin("ada", "one"), at.agents._find("default", "ada")

        async def refuse(*records: Record) -> None:
            raise Unavailable("no space left on device")

        with monkeypatch.context() as full:
            full.setattr(at.agents.writer, "sync", refuse)
            assert isinstance((await hear(turn)).error, Unavailable)
        assert agent.head.content is not None
        await at.agents._agents.pending.settle()
        assert agent.head.content is None
        (info,) = await at.agents.turns("default", "ada")
        assert info.state == "finished" and info.answer is not None


async def test_records_lost_from_the_log_are_reported_as_lost(folder: Path) -> None:
    """The record of a turn is damaged while the server runs: its text is unavailable, and other agents go on."""
    async with house(folder) as at:
        for id in ("ada", "bob"):
            await at.agents.create("default", id=id)
            await at.say(id, f"this is {id}'s")
        files: CrashFiles = at.files
        for path, data in files.files().items():
            files.put(path, data.replace(b"this is ada's", b"this is Ada's"))
        assert [turn.state for turn in await at.agents.turns("default", "ada")] == ["damaged"]
        with pytest.raises(Damaged, match="turn 1 of agent ada"):
            await at.begin("ada", "more")
        assert not at.agents._find("default", "ada").busy
        assert (await at.say("bob", "more")).done is not None
        await at.agents.delete("default", "ada")
        assert not any(b"this is Ada's" in data for data in at.files.files().values())
