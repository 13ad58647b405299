"""The cost of agents as they grow, counted in turns visited and bytes hashed, never in seconds."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from cairn.agents import portable
from cairn.agents.agent_registry import AgentRegistry
from cairn.agents.archive import Archive
from cairn.agents.content import Branch, Content, digest
from cairn.agents.log.index import RecordKind
from cairn.agents.log.records import AgentRecord, EndRecord, Savings, SavingsRecord, TurnRecord, pack
from cairn.agents.log.segment import Record, SegmentHeader, encode_header, encode_record
from cairn.agents.log.token_log import TokenLog
from cairn.agents.log.writer_thread import Writer
from cairn.agents.portable import read
from cairn.agents.turn_tree import Agent, Turn
from cairn.types.errors import ContextTooLong, InvalidRequest
from cairn.types.stats import Placed
from tests.agents.house import house

TURNS = 300
NOW = 1e9
WEEK = 7 * 86_400.0


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the keys of all turns that a walk visits."""
    visited: list[int] = []
    path = Turn.path

    def walk(turn: Turn) -> Iterator[Turn]:
        for visited_turn in path(turn):
            visited.append(visited_turn.key)
            yield visited_turn

    monkeypatch.setattr(Turn, "path", walk)
    return visited


def agent_of(registry: AgentRegistry, id: str, key: int, root: Turn | None = None, base: Turn | None = None) -> Agent:
    """Return an agent without turns of its own; its turns' keys follow its own."""
    root = root or Turn(key + 1, TurnRecord(agent=0, number=0), None)
    base = base or root
    record = AgentRecord(id=id, tenant="t", created=NOW, used=NOW, root=root.key, base=base.key, head=base.key)
    agent = Agent(key, record, root, base)
    registry.add(agent)
    return agent


def grow(registry: AgentRegistry, agent: Agent, count: int) -> None:
    for n in range(count):
        key, number = agent.key + 2 + len(agent.own), agent.head.number + 1
        began = TurnRecord(agent=agent.key, number=number, parent=agent.head.key, began=NOW + n)
        turn = Turn(key, began, agent.head)
        turn.end(EndRecord(state="finished", ids=b""))
        registry.add_turn(agent, turn)


def test_the_upkeep_of_young_turns_looks_at_each_once_and_then_at_none(steps: list[int]) -> None:
    registry = AgentRegistry()
    agent = agent_of(registry, "ada", 1000)
    grow(registry, agent, TURNS)
    assert registry.prune(agent, NOW - WEEK) == [] and len(steps) <= 3 * TURNS
    steps.clear()
    assert registry.prune(agent, NOW + 2 * WEEK) == [] and steps == [], "nothing was ever abandoned"


def test_a_branch_that_is_kept_for_a_week_is_looked_at_once(steps: list[int]) -> None:
    registry = AgentRegistry()
    agent = agent_of(registry, "ada", 1000)
    grow(registry, agent, TURNS)
    assert registry.prune(agent, NOW - WEEK) == []
    left, agent.head, agent.straight = agent.head, agent.own[0], False
    agent.record = msgspec.structs.replace(agent.record, left={left.key: NOW})
    grow(registry, agent, 1)
    steps.clear()
    assert registry.prune(agent, NOW - WEEK) == [] and len(steps) <= 3 * TURNS
    steps.clear()
    gone = registry.prune(agent, NOW + WEEK)
    assert len(gone) == TURNS - 1 and len(steps) <= 3 * TURNS
    assert [turn.number for turn in agent.own] == [1, 2]
    assert registry.prune(agent, NOW + WEEK) == []
    steps.clear()
    assert registry.prune(agent, NOW + WEEK) == [] and steps == []


def test_a_deletion_looks_at_no_other_family_and_once_at_its_own(steps: list[int]) -> None:
    registry = AgentRegistry()
    for n in range(5):
        grow(registry, agent_of(registry, f"other{n}", 10_000 * (2 + n)), TURNS)
    ada = agent_of(registry, "ada", 1000)
    grow(registry, ada, TURNS)
    forks = [agent_of(registry, f"fork{n}", 5000 + 10 * n, ada.root, ada.own[TURNS // 2]) for n in range(20)]
    for fork in forks:
        grow(registry, fork, 2)
    steps.clear()
    gone = registry.remove(ada)
    assert len(steps) <= 3 * TURNS
    assert gone == [ada.key, *(turn.key for turn in ada.own[TURNS // 2 + 1 :])]
    for fork in forks[1:]:
        assert len(registry.remove(fork)) == 3
    assert len(registry.remove(forks[0])) == 1 + 1 + TURNS // 2 + 1 + 2


def test_a_start_looks_at_each_turn_of_a_family_once(steps: list[int]) -> None:
    registry, records = AgentRegistry(), []
    ada = agent_of(registry, "ada", 1000)
    grow(registry, ada, TURNS)
    for turn in (ada.root, *ada.own):
        records.append(Record(turn.key, RecordKind.TURN, turn.key, msgspec.msgpack.encode(turn.held.began)))
    for n in range(50):
        record = msgspec.structs.replace(ada.record, id=f"a{n}", base=ada.head.key, head=ada.head.key)
        records.append(Record(5000 + n, RecordKind.AGENT, 5000 + n, msgspec.msgpack.encode(record)))
    again = AgentRegistry()
    steps.clear()
    assert again.load(records) == [] and len(steps) <= TURNS + 1 + 2 * 50
    assert all(agent.head.number == TURNS for agent in again)


def test_describing_an_agent_does_not_walk_through_its_turns(steps: list[int]) -> None:
    registry = AgentRegistry()
    ada = agent_of(registry, "ada", 1000)
    grow(registry, ada, TURNS)
    fork = agent_of(registry, "fork", 5000, ada.root, ada.own[TURNS // 2])
    assert [ada.info().turns, fork.info().turns] == [TURNS, TURNS // 2 + 1] and steps == []
    ada.head = ada.root
    assert ada.info().turns == 0


# ------------------------------------------------------------------------------------------------------------- import


def exported(turns: int, identity: bytes = b"", *, anew: bool = False) -> bytes:
    """Return the file of an agent whose every turn extends the context of the one before it, or begins `anew`.

    With `anew` the turn after the last one begins anew, too.
    """
    agent = AgentRecord(id="ada", tenant="", created=NOW, used=NOW, root=2, base=2, head=2 + turns)
    values: list[tuple[RecordKind, int, Any]] = [
        (RecordKind.AGENT, 1, agent),
        (RecordKind.TURN, 2, TurnRecord(agent=0, number=0)),
    ]
    ids: list[int] = []
    for number in range(1, turns + 1):
        ids, key = [] if anew else ids, 2 + number
        prefix = len(ids)
        ids += range(20)
        began = TurnRecord(
            agent=1,
            number=number,
            parent=key - 1,
            messages=({"role": "user", "content": "a"},),
            prefix=prefix,
            ids=pack(range(20)),
            digest=digest(ids),
            identity=identity,
            began=NOW,
        )
        keep = -1 if anew and number == turns else 7
        said = {"role": "assistant", "content": "b"}
        end = EndRecord(state="finished", ids=pack(range(9)), message=said, keep=keep, more=pack([5]), ended=NOW)
        ids += [*range(7), 5]
        values += [(RecordKind.TURN, key, began), (RecordKind.END, key, end)]
    return file_of(values)


def file_of(values: list[tuple[RecordKind, int, Any]]) -> bytes:
    header = SegmentHeader(0, 77)
    out = bytearray(encode_header(header))
    for lsn, (kind, key, value) in enumerate([*values, (RecordKind.SAVINGS, 1, SavingsRecord(savings=Savings()))], 1):
        out += encode_record(header, len(out), Record(lsn, kind, key, msgspec.msgpack.encode(value)))
    return bytes(out)


def broom(depth: int, leaves: int, identity: bytes) -> bytes:
    """Return the file of an agent with one long branch and many leaves at its end; each turn adds its number."""
    agent = AgentRecord(id="ada", tenant="", created=NOW, used=NOW, root=2, base=2, head=2 + depth)
    values: list[tuple[RecordKind, int, Any]] = [
        (RecordKind.AGENT, 1, agent),
        (RecordKind.TURN, 2, TurnRecord(agent=0, number=0)),
    ]
    end = EndRecord(state="finished", ids=b"", message={"role": "assistant", "content": "b"}, keep=0, ended=NOW)
    for number in range(1, depth + leaves + 1):
        before = [*range(1, min(number, depth + 1))]
        began = TurnRecord(
            agent=1,
            number=number,
            parent=2 + len(before),
            messages=({"role": "user", "content": "a"},),
            prefix=len(before),
            ids=pack([number]),
            digest=digest([*before, number]),
            identity=identity,
            began=NOW,
        )
        values += [(RecordKind.TURN, 2 + number, began), (RecordKind.END, 2 + number, end)]
    return file_of(values)


class Counting:
    """A SHA-256 that counts the bytes it hashes."""

    real: Callable[..., Any] = hashlib.sha256
    seen = 0

    def __init__(self, data: bytes = b"", state: Any = None) -> None:
        self._state = state or Counting.real()
        self.update(data)

    def update(self, data: bytes) -> None:
        Counting.seen += len(data)
        self._state.update(data)

    def copy(self) -> Counting:
        return Counting(state=self._state.copy())

    def digest(self) -> bytes:
        return bytes(self._state.digest())


def test_an_import_hashes_each_token_once(monkeypatch: pytest.MonkeyPatch) -> None:
    data = exported(TURNS)
    monkeypatch.setattr(hashlib, "sha256", Counting)
    monkeypatch.setattr(Counting, "seen", 0)
    imported = read(data, 100, b"")
    assert len(imported.turns) == TURNS + 1 and 0 < Counting.seen < len(data)


def test_a_file_of_too_many_turns_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portable, "MAX_TURNS", 5)
    assert len(read(exported(5), 100, b"").turns) == 6
    with pytest.raises(InvalidRequest, match="holds 6 turns; the limit is 5") as caught:
        read(exported(6), 100, b"")
    assert caught.value.field == "turns"


async def test_turns_that_begin_anew_are_each_looked_at_a_few_times(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the next turn, which cannot extend the last, and by the deletion. Both block the event loop."""
    looked = 0
    slot: Any = Content.__dict__["began"]

    def began(content: Content) -> object:
        nonlocal looked
        looked += 1
        return slot.__get__(content)

    monkeypatch.setattr(Content, "began", property(began, slot.__set__))
    visits: dict[int, list[int]] = {}
    async with house(folder) as at:
        for turns in (200, 400):
            await at.agents.import_agent("default", exported(turns, at.service.spec.identity, anew=True))
            visits[turns] = []
            for work in (at.say("ada", "more"), at.agents.delete("default", "ada")):
                looked = 0
                with contextlib.suppress(ContextTooLong):
                    await work
                visits[turns].append(looked)
    assert all(few > 400 and many < 2.2 * few for few, many in zip(visits[200], visits[400], strict=True)), visits


class Asked:
    """A service and a log that record the contexts and keys that they are asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, service: Any) -> None:
        self.evicted: list[list[int]] = []
        self.where: list[int] = []
        self.keys = 0
        read = TokenLog.read

        async def evict(tokens: Sequence[int], *args: Any, **how: Any) -> Placed:
            self.evicted.append(list(tokens))
            return Placed()

        async def where(tokens: Sequence[int], *args: Any) -> Placed:
            self.where.append(len(tokens))
            return Placed()

        def counted(log: TokenLog, wanted: Sequence[tuple[int, int]]) -> list[Record | None]:
            self.keys += len(wanted)
            return read(log, wanted)

        monkeypatch.setattr(service, "evict", evict)
        monkeypatch.setattr(service, "where", where)
        monkeypatch.setattr(TokenLog, "read", counted)


@pytest.mark.parametrize("how", ["deleted", "abandoned", "another model's"])
async def test_branches_that_have_much_in_common_are_read_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    depth, leaves = 60, 60
    async with house(folder) as at:
        mine = at.service.spec.identity
        await at.agents.import_agent("default", broom(depth, leaves, b"other" if how == "another model's" else mine))
        asked = Asked(monkeypatch, at.service)
        if how == "abandoned":
            await at.agents.rollback("default", "ada", turn=depth // 2)
            at.clock.ahead = 2 * WEEK
            await at.agents.tend()
            assert at.agents.get("default", "ada").turns == depth // 2
        else:
            await at.agents.delete("default", "ada")
        await at.agents.kv.settled()
        ends = [] if how == "another model's" else [*range(depth + 1, depth + leaves + 1)]
        assert sorted(asked.evicted) == [[*range(1, depth + 1), end] for end in ends]
        assert asked.keys <= 4 * (depth + leaves)  # another model's too: its store is asked without the model


async def test_an_estimate_of_a_context_stops_at_the_models_length(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with house(folder) as at:
        most = at.service.spec.context
        values: list[tuple[RecordKind, int, Any]] = [
            (RecordKind.AGENT, 1, AgentRecord(id="ada", tenant="", created=NOW, used=NOW, root=2, base=2, head=3)),
            (RecordKind.TURN, 2, TurnRecord(agent=0, number=0)),
        ]
        ids, mine = [n % 50 for n in range(most + 100)], at.service.spec.identity
        began = TurnRecord(agent=1, number=1, parent=2, ids=pack(ids), digest=digest(ids), identity=mine, began=NOW)
        said = {"role": "assistant", "content": "b"}
        end = EndRecord(state="finished", ids=pack(ids), message=said, keep=len(ids), ended=NOW)
        await at.agents.import_agent(
            "default", file_of([*values, (RecordKind.TURN, 3, began), (RecordKind.END, 3, end)])
        )
        asked = Asked(monkeypatch, at.service)
        await at.agents.where("default", "ada")
        await at.agents.delete("default", "ada")
        await at.agents.kv.settled()
        assert asked.where == [most] and asked.evicted == [ids[:most]]


def grove(rng: random.Random) -> list[Turn]:
    """Return a tree of turns of two models, most of which extend the context before them."""
    turns = [Turn(1, TurnRecord(agent=0, number=0), None)]
    for number in range(1, rng.randrange(2, 25)):
        parent = rng.choice([turns[-1], rng.choice(turns)])
        before = Branch([ancestor.held for ancestor in parent.path()][::-1]).known() if parent.number else []
        prefix = rng.choice([len(before), len(before), 0])
        ids = [*before[:prefix], *(rng.randrange(9) for _ in range(rng.randrange(4)))]
        model = rng.choice([parent.identity or b"one", b"one", b"two"])
        began = TurnRecord(
            agent=1, number=number, prefix=prefix, ids=pack(ids[prefix:]), digest=digest(ids), identity=model
        )
        turn = Turn(1 + number, began, parent)
        said, keep = [rng.randrange(9) for _ in range(5)], rng.randrange(6)
        if rng.random() < 0.9:
            turn.end(EndRecord(state="finished", ids=pack(said), keep=keep, more=pack(range(rng.randrange(3)))))
        turns.append(turn)
    return turns


async def test_contexts_put_together_in_one_walk_are_those_of_each_branch(prove: bool) -> None:
    archive = Archive(cast("TokenLog", None))
    for seed in range(3000 if prove else 300):
        rng = random.Random(seed)
        turns, most = grove(rng), rng.choice([1000, rng.randrange(1, 40)])
        mine = [turn for turn in turns if turn.identity == b"one"]
        contexts = [one async for some in archive.contexts(mine, most) for one in some]
        extended = {turn.parent for turn in mine if turn.held.began.prefix}
        wanted = [turn for turn in mine if turn not in extended]
        assert {turn.key for _, turn in contexts} == {turn.key for turn in wanted} and len(contexts) == len(wanted)
        for ids, turn in contexts:
            assert list(ids) == Branch([ancestor.held for ancestor in turn.path()][::-1]).known()[:most], seed


async def test_the_event_loop_does_not_wait_for_an_import(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor for two imports of one id, one of which is refused."""
    threads: list[bool] = []
    record, plant, both_there = Writer.record, portable.plant, threading.Barrier(2)

    def together(*args: Any) -> Agent:
        both_there.wait(30)
        return plant(*args)

    def noted(writer: Writer, kind: RecordKind, value: msgspec.Struct, key: int = 0) -> Record:
        if kind in (RecordKind.TURN, RecordKind.END):
            threads.append(threading.current_thread() is threading.main_thread())
        return record(writer, kind, value, key)

    monkeypatch.setattr(Writer, "record", noted)
    monkeypatch.setattr(portable, "plant", together)
    async with house(folder) as at:
        both = [at.agents.import_agent("default", exported(TURNS)) for _ in range(2)]
        done = await asyncio.gather(*both, return_exceptions=True)
        assert sorted(type(outcome).__name__ for outcome in done) == ["AgentInfo", "Conflict"]
        assert len(threads) == 2 * (2 * TURNS + 1) and not any(threads)
        assert [agent.turns for agent in at.agents.page("default").agents] == [TURNS]
